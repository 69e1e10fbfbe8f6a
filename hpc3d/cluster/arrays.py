"""Arrays whose memory is used again.

A fresh array of more than 128 KiB costs a page fault every 4 KiB; a training step asks for the
same sizes over and over.  A `Pool` hands out arrays and takes their memory back when the last view
of them dies, so a step in the steady state allocates nothing.
"""

from collections import Counter, defaultdict
from functools import singledispatch
from math import prod

import numpy as np

KINDS = ("parameter", "gradient", "optimizer", "activation", "communication", "workspace")

# A function on arrays that takes the rule of the type of its first array: NumPy's is the one that
# stands there, others are registered.
kernel = singledispatch


class Lease:
    """Memory on loan: NumPy keeps it as the base of the array, its death returns the memory."""

    __slots__ = ("__array_interface__", "give_back", "memory")

    def __init__(self, memory, shape, dtype, give_back):
        self.memory = memory
        self.give_back = give_back
        self.__array_interface__ = {
            "version": 3,
            "shape": shape,
            "typestr": dtype.str,
            "data": (memory.ctypes.data, False),
        }

    def __del__(self):
        self.give_back(self.memory)


class Pool:
    """The arrays of one rank, with the bytes that are live and their peak, by kind."""

    def __init__(self):
        self.free = defaultdict(list)
        self.live = Counter()
        self.peak = Counter()

    def empty(self, shape, dtype, kind="activation"):
        """An uninitialised array of `shape`; its memory returns here when its last view dies."""
        dtype = np.dtype(dtype)
        nbytes = prod(shape) * dtype.itemsize
        size = size_class(nbytes)
        stock = self.free[size]
        memory = stock.pop() if stock else np.empty(size, np.uint8)
        self.count(kind, nbytes)

        def give_back(memory):
            self.count(kind, -nbytes)
            self.free[size].append(memory)

        return np.asarray(Lease(memory, tuple(shape), dtype, give_back))

    def zeros(self, shape, dtype, kind="activation"):
        array = self.empty(shape, dtype, kind)
        array.fill(0)
        return array

    def count(self, kind, size):
        """Book `size` bytes (negative: given back) of `kind`."""
        self.live[kind] += size
        self.peak[kind] = max(self.peak[kind], self.live[kind])
        self.peak["all"] = max(self.peak["all"], self.live.total())

    def reset_peak(self):
        """Start a new measurement of the peaks, at what is live now."""
        self.peak = Counter(self.live)
        self.peak["all"] = self.live.total()


def size_class(nbytes):
    """`nbytes` rounded up to one of eight steps per power of two, at least 64."""
    step = max(64, 1 << max(0, nbytes.bit_length() - 4))
    return max(64, -(-nbytes // step) * step)


def lease_of(array):
    """The lease at the bottom of a chain of views, or None."""
    while isinstance(array, np.ndarray):
        array = array.base
    return array if isinstance(array, Lease) else None
