"""`make gpu-check`: all that a machine with a GPU can say about the GPU backend, in one run.

    python -m tests.gpu [--json FILE] [--only PART ...] [--minutes 9] [--quick]

It needs the repository and a Python >= 3.11 with NumPy, CuPy, ml_dtypes and h5py; torch, pytest,
mpi4py with an MPI and cuDNN's frontend add to what is checked.  docs/gpu-verification.md tells
what each part does.
"""
