"""Arrays whose memory is used again.

A fresh array of more than 128 KiB costs a page fault every 4 KiB; a training step asks for the
same sizes over and over.  A `Pool` hands out arrays and takes their memory back when the last view
of them dies, so a step in the steady state allocates nothing.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from hpc3d.arrays.narrow import of_type
from hpc3d.arrays.primitive import composite

if TYPE_CHECKING:
    from numpy.typing import DTypeLike

    from hpc3d.arrays.array import Array

OFFLOADED = "offloaded"  # the kind of arrays that lie outside of the memory of their pool


@composite
def to_host(array: Array) -> np.ndarray:
    """A copy of an array in the memory of the host."""
    return array.copy()


@composite
def on_host(array: Array) -> np.ndarray:
    """The array itself; a copy of one that lies on a device."""
    return array


@composite
def has_values(array: Array) -> bool:
    """Whether an array is more than a shape and a type."""
    return True


@composite
def writeable(array: Array) -> bool:
    """Whether an array is not shared with other ranks."""
    return array.flags.writeable


@composite
def value_of(array: Array | float) -> float:
    """The only element of an array; a number itself."""
    return float(array)


@composite
def from_host(array: Array, values: np.ndarray) -> None:
    """Write the values of an array of the host into `array`."""
    array[...] = values


class Lease:
    """Memory on loan: NumPy keeps it as the base of the array, its death returns the memory."""

    __slots__ = ("__array_interface__", "give_back", "memory")

    def __init__(
        self,
        memory: np.ndarray,
        shape: tuple[int, ...],
        dtype: np.dtype,
        give_back: Callable[[np.ndarray], None],
    ) -> None:
        self.memory = memory
        self.give_back = give_back
        self.__array_interface__ = {
            "version": 3,
            "shape": shape,
            "typestr": _nameable(dtype).str,
            "data": (memory.ctypes.data, False),
        }

    def __del__(self) -> None:
        self.give_back(self.memory)


def lent(lease: Lease, dtype: np.dtype) -> np.ndarray:
    """The array on a lease; one of 16-bit floats is Narrow."""
    return of_type(np.asarray(lease).view(dtype))


class Pool:
    """The arrays of one rank, with the bytes that are live and their peak, by kind.

    Where they are `on_device`, one call of a product also adds biases, residuals and gradients; a
    device with `float8` multiplies numbers of 8 bits with one scale for each matrix.
    """

    on_device = float8 = False
    device: Any = "cpu"  # where they are
    store: Any = None  # where those lie that are offloaded (hpc3d.arrays.host_store.store_of)

    def __init__(self) -> None:
        self.free = defaultdict(list)
        self.live = Counter()
        self.peak = Counter()

    def empty(self, shape: Sequence[int], dtype: DTypeLike, kind: str = "activation") -> Array:
        """An uninitialised array of `shape`; its memory returns here when its last view dies."""
        dtype = np.dtype(dtype)
        nbytes = prod(shape) * dtype.itemsize
        size = size_class(nbytes)
        stock = self.free[size]
        memory = stock.pop() if stock else self.memory(size)
        self.count(kind, nbytes)

        def give_back(memory):
            self.count(kind, -nbytes)
            self.free[size].append(memory)

        return lent(Lease(memory, tuple(shape), dtype, give_back), dtype)

    def memory(self, size: int) -> np.ndarray:
        """Fresh memory, as an array of bytes."""
        return np.empty(size, np.uint8)

    def zeros(self, shape: Sequence[int], dtype: DTypeLike, kind: str = "activation") -> Array:
        array = self.empty(shape, dtype, kind)
        array.fill(0)
        return array

    def bring(self, array: np.ndarray | float) -> Any:
        """An array of the host where the others of this pool are."""
        return array

    def synchronize(self) -> None:
        """Return when all that was asked for is in its place."""

    def count(self, kind: str, size: int) -> None:
        """Book `size` bytes (negative: given back) of `kind`."""
        self.live[kind] += size
        if size > 0:
            self.peak[kind] = max(self.peak[kind], self.live[kind])
            self.peak["all"] = max(self.peak["all"], self.held)

    @property
    def held(self) -> int:
        """The bytes that are live, without those of arrays that lie elsewhere."""
        return self.live.total() - self.live[OFFLOADED]

    def reset_peak(self) -> None:
        """Start a new measurement of the peaks, at what is live now."""
        self.peak = Counter(self.live)
        self.peak["all"] = self.held


def _nameable(dtype: np.dtype) -> np.dtype:
    """A type of the same size that NumPy's interface has a name for: bfloat16 has none."""
    return np.dtype(f"u{dtype.itemsize}") if dtype.kind == "V" else dtype


def size_class(nbytes: int) -> int:
    """`nbytes` rounded up to one of eight steps per power of two, at least 64."""
    step = max(64, 1 << max(0, nbytes.bit_length() - 4))
    return max(64, -(-nbytes // step) * step)


def lease_of(array: object) -> Lease | None:
    """The lease at the bottom of a chain of views, or None."""
    while isinstance(array, np.ndarray):
        array = array.base
    return array if isinstance(array, Lease) else None


@composite
def contiguous(block: Array) -> Array:
    """The block in one piece of memory, row by row."""
    return np.ascontiguousarray(block)


@contiguous.narrow
def _(block):
    return np.asanyarray(block, order="C")
