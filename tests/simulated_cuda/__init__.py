"""CuPy itself, on a CUDA that is simulated on the host.

CuPy calls CUDA through two Cython modules, its runtime and its driver.  Here the functions of
both are others (capsules.py): memory of the device is memory of the host, a stream is a thread, a
graph is a list of calls (device.py).  NVRTC, which needs no GPU, compiles every kernel for sm_90;
launched is what the emulator of tests/cuda makes of the same text, or, for the few kernels of
CuPy's own, what NumPy does (kernels.py).  cuBLASLt is the stand-in of the products' tests
(products.py), NCCL is MPI behind NCCL's C functions (nccl.py).

So the program runs as on a GPU, with the CuPy of users: arrays, pools, pinned memory, streams,
events, graphs, RawModule and the bindings of NCCL are the real ones.

    python -m tests.simulated_cuda hpc3d.train --train.backend cupy
"""
