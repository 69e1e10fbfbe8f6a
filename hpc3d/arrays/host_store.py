"""Arrays that wait outside of the memory of a rank until they are needed (ZeRO-Offload, Ren et
al., arXiv:2101.06840; ZeRO-Infinity, Rajbhandari et al., arXiv:2104.07857).

On processors they lie in a file that is mapped into memory: the system writes it to disk where it
needs the memory for others, and reads ahead what is asked for.  A device has memory of its host
(hpc3d.comm.pinned_store).

    save     working array -> kept array
    load     kept array -> a function that gives a new working array, in flight until it is called
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
    """Where the arrays of a `pool` lie that it counts as offloaded.

    `copied` are the bytes of all copies, and `exposed` the seconds in which the rank did nothing
    but copy, None where a device copies by itself.
    """

    copied: int
    exposed: float | None

    def empty(self, shape: Sequence[int], dtype: DTypeLike) -> Array: ...
    def save(self, array: Array, kept: Array, trace: Any) -> None: ...
    def load(self, kept: Array, kind: str, trace: Any) -> Callable[[], Array]: ...
    def settle(self) -> None:
        """Let what comes now follow all that was saved."""


class _FilePool(Pool):
    """Arrays in a file without a name in the folder for temporary files (TMPDIR), counted by
    their `owner`.  `places` are where in the file each piece of memory begins, by its address."""

    def __init__(self, owner: Pool) -> None:
        super().__init__()
        self.owner, self.folder = owner, gettempdir()
        with TemporaryFile(dir=self.folder) as file:
            self.file = os.dup(file.fileno())
        weakref.finalize(self, os.close, self.file)
        self.size, self.rest = 0, np.empty(0, np.uint8)
        self.places: dict[int, int] = {}

    def count(self, kind: str, size: int) -> None:
        self.owner.count(OFFLOADED, size)

    def memory(self, size: int) -> np.ndarray:
        """Fresh memory of whole pages; the file grows by as much as it has."""
        size = -(-size // PAGESIZE) * PAGESIZE
        if size > len(self.rest):
            self.rest = self._mapped(max(size, self.size))
        memory, self.rest = self.rest[:size], self.rest[size:]
        self.places[memory.ctypes.data] = self.size - len(self.rest) - size
        return memory

    def _mapped(self, size: int) -> np.ndarray:
        start = self.size
        try:
            os.posix_fallocate(self.file, start, size)  # a disk full later would kill the process
        except OSError as error:
            what = f"{error.strerror} for {size / 1e6:,.1f} MB more of what parallel.offload moves"
            raise OSError(
                error.errno, f"{what}; TMPDIR names another folder", self.folder
            ) from None
        self.size += size
        return np.frombuffer(mmap(self.file, size, offset=start), np.uint8)

    def read_ahead(self, array: np.ndarray) -> None:
        """Let the system read what is not in memory of an array."""
        memory = lease_of(array).memory  # type: ignore[union-attr]  # it is one of this pool
        address = memory.ctypes.data
        start = self.places[address] + array.ctypes.data - address
        os.posix_fadvise(self.file, start, array.nbytes, os.POSIX_FADV_WILLNEED)


class FileStore:
    """A HostStore in a file."""

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
    """That of a pool: a file, unless it was given another one."""
    if pool.store is None:
        pool.store = FileStore(pool)
    return pool.store


def walk(store: HostStore, units: Sequence[Sequence[Array]], trace: Any) -> Iterator[list[Any]]:
    """Copies of kept arrays, unit after unit.  What is written into them is kept when the next
    ones are asked for, which are on their way meanwhile."""
    ahead = _asked(store, units[0], trace) if units else []
    for number, unit in enumerate(units):
        arrays = [arrive() for arrive in ahead]
        ahead = _asked(store, units[number + 1], trace) if number + 1 < len(units) else []
        yield arrays
        for array, kept in zip(arrays, unit, strict=True):
            store.save(array, kept, trace)
    store.settle()


def _asked(store: HostStore, unit: Sequence[Array], trace: Any) -> list[Any]:
    return [store.load(kept, "workspace", trace) for kept in unit]
