"""Memory addresses in NCCL calls."""

import ctypes

import numpy as np

from hpc3d.comm.nccl import TYPES


def array_at(pointer, count, number):
    """Return an array of `count` elements of NCCL's type `number` at a host address."""
    dtype = np.dtype(next(name for name, known in TYPES.items() if known == number))
    memory = (ctypes.c_byte * (count * dtype.itemsize)).from_address(pointer)
    return np.frombuffer(memory, np.uint8).view(dtype)
