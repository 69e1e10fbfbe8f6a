"""The real CuPy with a CUDA that is simulated on the host.

CuPy calls CUDA through two Cython modules, its runtime and its driver. Here, the functions of both
are replaced (capsules.py): device memory is host memory, a stream is a thread, and a graph is a
list of calls (device.py). NVRTC, which needs no GPU, compiles every kernel for sm_90, but launches
run the emulator of tests/cuda on the same source code; NumPy runs the few kernels of CuPy itself
(kernels.py). cuBLASLt is the fake of the product tests (products.py), and NCCL's C functions use
MPI (nccl.py).

So the program runs as on a GPU, with the CuPy of users: arrays, pools, pinned memory, streams,
events, graphs, RawModule and the bindings of NCCL are the real ones.

    python -m tests.simulated_cuda hpc3d.train --train.backend cupy
"""
