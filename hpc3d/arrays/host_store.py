"""Offloading: store arrays outside the rank's own memory while they are not in use.

See ZeRO-Offload (Ren et al., arXiv:2101.06840) and ZeRO-Infinity (Rajbhandari et al.,
arXiv:2104.07857).

On CPUs, offloaded arrays are stored in a memory-mapped file, which the operating system writes to
disk when memory is scarce and prefetches on request.  On devices, they are stored in host memory
(hpc3d.comm.pinned_store).

    save     working array -> stored array
    load     stored array -> function that waits for the copy and returns a new working array
"""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from mmap import PAGESIZE, mmap
from tempfile import TemporaryFile, gettempdir
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from hpc3d.arrays.pool import OFFLOADED, Pool, lease_of

if TYPE_CHECKING:
    from numpy.typing import DTypeLike

    from hpc3d.arrays.array import Array


class HostStore(Protocol):
    """Store of the offloaded arrays of a `pool`.

    `copied` is the number of bytes copied so far.  `exposed` is the total time in seconds of the
    copies that did not overlap with computation, or `None` if a device copies asynchronously.
    """

    pool: Pool
    copied: int
    exposed: float | None

    def empty(self, shape: Sequence[int], dtype: DTypeLike) -> Array: ...
    def save(self, array: Array, kept: Array, trace: Any) -> None: ...
    def load(self, kept: Array, kind: str, trace: Any) -> Callable[[], Array]: ...
    def settle(self) -> None:
        """Make all later operations wait for the pending saves."""


class _FilePool(Pool):
    """Pool that allocates from a memory-mapped, unnamed file in the temporary folder (TMPDIR).

    The pool `owner` counts the bytes.  `offsets` maps the address of each memory block to its file
    offset.
    """

    def __init__(self, owner: Pool) -> None:
        super().__init__()
        self.owner, self.folder = owner, gettempdir()
        with TemporaryFile(dir=self.folder) as file:
            self.file = os.dup(file.fileno())
        weakref.finalize(self, os.close, self.file)
        self.size, self.rest = 0, np.empty(0, np.uint8)
        self.offsets: dict[int, int] = {}

    def count(self, kind: str, size: int) -> None:
        self.owner.count(OFFLOADED, size)

    def memory(self, size: int) -> np.ndarray:
        """Allocate `size` bytes, rounded up to full pages; if the file is full, enlarge it."""
        size = -(-size // PAGESIZE) * PAGESIZE
        if size > len(self.rest):
            self.rest = self._mapped(max(size, self.size))
        memory, self.rest = self.rest[:size], self.rest[size:]
        self.offsets[memory.ctypes.data] = self.size - len(self.rest) - size
        return memory

    def _mapped(self, size: int) -> np.ndarray:
        start = self.size
        try:
            os.posix_fallocate(self.file, start, size)  # avoids a later SIGBUS if the disk is full
        except OSError as error:
            what = f"cannot offload {size / 1e6:,.1f} MB more ({error.strerror})"
            raise OSError(
                error.errno, f"{what}; set TMPDIR to a folder with more space", self.folder
            ) from None
        self.size += size
        return np.frombuffer(mmap(self.file, size, offset=start), np.uint8)

    def read_ahead(self, array: np.ndarray) -> None:
        """Ask the operating system to prefetch the pages of an array."""
        memory = lease_of(array).memory  # type: ignore[union-attr]  # allocated by this pool
        address = memory.ctypes.data
        start = self.offsets[address] + array.ctypes.data - address
        os.posix_fadvise(self.file, start, array.nbytes, os.POSIX_FADV_WILLNEED)


class FileStore:
    """`HostStore` that stores offloaded arrays in a memory-mapped file."""

    def __init__(self, pool: Pool) -> None:
        self.pool, self.files = pool, _FilePool(pool)
        self.copied, self.exposed = 0, 0.0

    def empty(self, shape: Sequence[int], dtype: DTypeLike) -> Array:
        return self.files.empty(shape, dtype, OFFLOADED)

    def save(self, array: Array, kept: Array, trace: Any) -> None:
        with self._copying("offload", array, trace):
            kept[...] = array

    def load(self, kept: Array, kind: str, trace: Any) -> Callable[[], Array]:
        self.files.read_ahead(kept)

        def finish():
            array = self.pool.empty(kept.shape, kept.dtype, kind)
            with self._copying("fetch", kept, trace):
                array[...] = kept
            return array

        return finish

    @contextmanager
    def _copying(self, name: str, array: Array, trace: Any) -> Iterator[None]:
        begin = time.perf_counter()
        with trace.copying(name, array.nbytes):
            yield
        self.copied += array.nbytes
        self.exposed += time.perf_counter() - begin

    def settle(self) -> None:
        pass


def store_of(pool: Pool) -> HostStore:
    """Return the host store of a pool; create a FileStore if the pool has none."""
    if pool.store is None:
        pool.store = FileStore(pool)
    return pool.store


def walk(store: HostStore, units: Sequence[Sequence[Array]], trace: Any) -> Iterator[list[Any]]:
    """For each group of stored arrays in `units`, yield working copies of the arrays.

    While the caller uses one group, the next group is prefetched. Changes to the copies are saved
    when the caller requests the next group.
    """

    def requested(unit):
        return [store.load(kept, "workspace", trace) for kept in unit]

    ahead = requested(units[0]) if units else []
    for unit, following in zip(units, [*units[1:], ()]):
        arrays = [arrive() for arrive in ahead]
        ahead = requested(following)
        yield arrays
        for array, kept in zip(arrays, unit, strict=True):
            store.save(array, kept, trace)
    store.settle()
