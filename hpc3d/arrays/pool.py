"""Memory pool for the arrays of a rank.

A newly allocated array of more than 128 KiB causes one page fault per 4 KiB page, and a training
step requests the same sizes repeatedly.  A `Pool` reuses the memory of an array once its last view
is deleted, so a step allocates nothing in the steady state.
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

OFFLOADED = "offloaded"  # memory kind of offloaded arrays, excluded from the pool's total


@composite
def to_host(array: Array) -> np.ndarray:
    """Return a copy of an array in host memory."""
    return array.copy()


@composite
def on_host(array: Array) -> np.ndarray:
    """Return the array itself if it is in host memory, otherwise a host copy."""
    return array


@composite
def has_values(array: Array) -> bool:
    """Return True if an array has data, and False for an abstract array."""
    return True


@composite
def writeable(array: Array) -> bool:
    """Return True if an array is writable, that is, not shared with other ranks."""
    return array.flags.writeable


@composite
def value_of(array: Array | float) -> float:
    """Return the only element of an array; numbers are returned unchanged."""
    return float(array)


@composite
def from_host(array: Array, values: np.ndarray) -> None:
    """Copy the values of a host array to `array`."""
    array[...] = values


class Lease:
    """Handle that owns an array's memory; deleting the handle returns the memory to the pool."""

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
            "typestr": f"|V{dtype.itemsize}",  # bfloat16 has no type string; `lent` sets the dtype
            "data": (memory.ctypes.data, False),
        }

    def __del__(self) -> None:
        self.give_back(self.memory)


def lent(lease: Lease, dtype: np.dtype) -> np.ndarray:
    """Return the memory of `lease` as a Narrow array for 16-bit floats, else as a NumPy array."""
    return of_type(np.asarray(lease).view(dtype))


class Pool:
    """Memory pool of one rank, which counts the live and peak bytes of each kind of array.

    If `on_device` is true, the arrays are in GPU memory. Callers may then use GEMMs that also add
    a bias, a residual or a gradient. If `float8` is true, the GPU has float8 GEMMs with one scale
    per matrix.

    `held` is the number of live bytes of all arrays except offloaded ones.
    """

    on_device = float8 = False
    device: Any = "cpu"  # device of the arrays
    store: Any = None  # store of offloaded arrays (hpc3d.arrays.host_store.store_of)

    def __init__(self) -> None:
        self.free = defaultdict(list)
        self.live = Counter()
        self.peak = Counter()
        self.held = 0

    def empty(self, shape: Sequence[int], dtype: DTypeLike, kind: str = "activation") -> Array:
        """Return an uninitialized array; its memory is reused when its last view is deleted."""
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
        """Allocate `size` bytes of memory as a uint8 array."""
        return np.empty(size, np.uint8)

    def zeros(self, shape: Sequence[int], dtype: DTypeLike, kind: str = "activation") -> Array:
        array = self.empty(shape, dtype, kind)
        array.fill(0)
        return array

    def shared(self, exporter: Any) -> Any:
        """Return an array in the memory of an object that supports DLPack, such as a tensor."""
        return np.from_dlpack(exporter)

    def bring(self, array: np.ndarray | float) -> Any:
        """Copy a host array or a number to this pool's device, if the pool has a device."""
        return array

    def synchronize(self) -> None:
        """Wait until the device has finished all launched operations."""

    def count(self, kind: str, size: int) -> None:
        """Add `size` to the live bytes of `kind`; `size` is negative for freed memory."""
        live = self.live[kind] = self.live[kind] + size
        if kind != OFFLOADED:
            self.held += size
        if size > 0:
            peak = self.peak
            peak[kind] = max(peak[kind], live)
            peak["all"] = max(peak["all"], self.held)

    def reset_peak(self) -> None:
        """Reset the peaks to the current live bytes."""
        self.peak = Counter(self.live)
        self.peak["all"] = self.held


def size_class(nbytes: int) -> int:
    """Round `nbytes` up to a size class: at least 64, with eight classes per power of two."""
    step = max(64, 1 << max(0, nbytes.bit_length() - 4))
    return max(64, -(-nbytes // step) * step)


def lease_of(array: object) -> Lease | None:
    """Return the `Lease` that owns an array's memory, or `None` if no pool allocated the array."""
    while isinstance(array, np.ndarray):
        array = array.base
    return array if isinstance(array, Lease) else None


@composite
def contiguous(block: Array) -> Array:
    """Return an array in row-major contiguous layout; copy it only if necessary."""
    return np.ascontiguousarray(block)


@contiguous.narrow
def _(block):
    return np.asanyarray(block, order="C")
