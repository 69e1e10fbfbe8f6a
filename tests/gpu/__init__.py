"""`make gpu-check`: all checks of the GPU backend on a machine with a GPU, in one run.

    python -m tests.gpu [--json FILE] [--only PART ...] [--minutes 9] [--quick]

It requires the repository and Python >= 3.11 with NumPy, CuPy, ml_dtypes and h5py. Some checks
also require torch, pytest, mpi4py with MPI, or the cuDNN frontend. docs/gpu-verification.md
describes each part.
"""
