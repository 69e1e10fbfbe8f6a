"""Communicator for the ranks of one node, whose collectives use shared memory.

A gathered block exists once per group, not once per rank: each member writes its shard, sets its
flag and reads the full block.  A partial product is written directly to shared memory, and each
member sums its own slice of all partial products.  Nothing is copied through a message queue.

Contract: all members make the same calls in the same order, and release the arrays returned here
at the same points of the program, which reference counting guarantees. The members' allocators
therefore agree without communication. A member may reuse memory that was released after post t
once it has seen post t+1 of all members. Each post records its region, so that members raise an
error if their calls differ.
"""

from __future__ import annotations

import mmap
import os
import platform
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from hpc3d.arrays.narrow import of_type
from hpc3d.arrays.pool import Lease, Pool, lease_of, lent, size_class
from hpc3d.comm.all_pairs import slices_of
from hpc3d.comm.communicator import REDUCTIONS, SMALL_SUM, Pending, fold
from hpc3d.comm.mpi import MpiCommunicator, wait_until

if TYPE_CHECKING:
    from mpi4py import MPI
    from numpy.typing import DTypeLike


SHARED = "/dev/shm"
_SEGMENT = 1 << 20
# A post is a member's announcement that it has written to a region. The flag page has one row of
# 8-byte words per member: the number of posts so far, the region signatures of the last _RING
# posts, and the values of these posts (in a broadcast, the number of rows).
_RING = 63
_LINE = 1 + 2 * _RING


def usable(node_ranks: int) -> bool:
    """Return True if the `node_ranks` ranks of this node can share memory.

    On x86, other ranks see a block before the flag that is written after it; other architectures
    would need memory fences.
    """
    if platform.machine() not in ("x86_64", "AMD64") or not os.path.isdir(SHARED):
        return False
    free = os.statvfs(SHARED)
    return free.f_bavail * free.f_frsize > node_ranks * (16 << 20)


class Region:
    """Region of shared memory with `size` slots, one per member."""

    def __init__(self, number: int, memory: np.ndarray, size: int) -> None:
        self.memory, self.slot = memory, memory.size // size
        self.signature = number << 40 | memory.size
        self.freed_at = -1

    def blocks(self, count: int, dtype: DTypeLike) -> np.ndarray:
        """Return the first `count` elements of every slot, as an array [size, count]."""
        whole = of_type(self.memory.view(dtype))
        return whole.reshape(-1, self.slot // whole.itemsize)[:, :count]


class SharedLease(Lease):
    """Handle to an array's memory in a region that the members of a communicator share.

    If the memory is this member's own slot of the region, `slot_of` is the communicator. Otherwise
    (the memory holds a result for all members), `slot_of` is `None`.
    """

    __slots__ = ("region", "slot_of")

    def __init__(
        self,
        region: Region,
        memory: np.ndarray,
        shape: tuple[int, ...],
        dtype: DTypeLike,
        give_back: Callable[[np.ndarray], None],
    ) -> None:
        super().__init__(memory, shape, np.dtype(dtype), give_back)
        self.region, self.slot_of = region, None


class SharedMemory(MpiCommunicator):
    """Communicator based on an MPI communicator whose members are all on this node."""

    def __init__(self, comm: MPI.Comm, members: Sequence[int], pool: Pool) -> None:
        super().__init__(comm, members, pool)
        self.flags = memoryview(self._segment(self.size * _LINE * 8).data).cast("q")
        self.regions: list[Region] = []
        self.free: defaultdict[int, deque[Region]] = defaultdict(deque)
        self.unused = np.empty(0, np.uint8)
        self.posted = self.seen = 0

    def _segment(self, size: int) -> np.ndarray:
        """Return `size` bytes of shared memory that all members map.

        The backing file has no name, so it cannot outlive the processes.
        """
        handle = path = None
        if self.rank == 0:
            handle = os.open(SHARED, os.O_TMPFILE | os.O_RDWR, 0o600)
            os.posix_fallocate(handle, 0, size)
            path = f"/proc/{os.getpid()}/fd/{handle}"
        path = self.comm.bcast(path)
        handle = os.open(path, os.O_RDWR) if handle is None else handle
        memory = np.frombuffer(mmap.mmap(handle, size), np.uint8)
        self.comm.Barrier()
        os.close(handle)
        return memory

    def region(self, nbytes: int) -> Region:
        """Allocate the same region on all members, with slots of at least `nbytes` bytes."""
        size = self.size * size_class(nbytes)
        stock = self.free[size]
        if stock and stock[0].freed_at < self.seen:
            return stock.popleft()
        if self.unused.size < size:
            self.unused = self._segment(max(size, _SEGMENT))
        memory, self.unused = self.unused[:size], self.unused[size:]
        self.regions.append(Region(len(self.regions), memory, self.size))
        return self.regions[-1]

    def lend(
        self, region: Region, memory: np.ndarray, shape: Sequence[int], dtype: DTypeLike
    ) -> np.ndarray:
        """Return an array in `memory`; release `region` when the array's last view is deleted."""
        shape, booked = tuple(shape), prod(shape) * np.dtype(dtype).itemsize
        self.pool.count("communication", booked)

        def give_back(_):
            self.pool.count("communication", -booked)
            self.release(region)

        return lent(SharedLease(region, memory, shape, dtype, give_back), np.dtype(dtype))

    def release(self, region: Region) -> None:
        region.freed_at = self.posted
        self.free[region.memory.size].append(region)

    def publish(self, region: Region | None = None, value: int = 0) -> int:
        """Set this member's flag to announce its writes to its peers; return the post number."""
        self.posted += 1
        if self.posted - self.seen >= _RING:
            self.wait_for_all(self.posted - _RING + 1)
        line, entry = self.rank * _LINE, 1 + self.posted % _RING
        self.flags[line + entry] = region.signature if region else -1
        self.flags[line + _RING + entry] = value
        self.flags[line] = self.posted
        return self.posted

    def wait_for_all(self, post: int) -> None:
        """Wait until every member has reached post number `post`."""
        if post <= self.seen:
            return
        flags, entry = self.flags, 1 + post % _RING
        region = flags[self.rank * _LINE + entry]
        for line in range(0, self.size * _LINE, _LINE):
            if flags[line] < post:
                wait_until(lambda line=line: flags[line] >= post)  # type: ignore[misc]  # a default
            # A member that is _RING - 1 posts ahead may already be overwriting this entry.
            if flags[line + entry] != region and flags[line] < post + _RING - 1:
                raise RuntimeError(
                    f"ranks {self.members} disagree on the layout of shared memory: they made "
                    "different calls, or one still references an array that the others freed"
                )
        self.seen = max(self.seen, post)

    def buffer(self, shape: Sequence[int], dtype: DTypeLike) -> np.ndarray:
        region = self.region(prod(shape) * np.dtype(dtype).itemsize)
        memory = region.memory[self.rank * region.slot : (self.rank + 1) * region.slot]
        array = self.lend(region, memory, shape, dtype)
        lease: Any = lease_of(array)
        lease.slot_of = self
        return array

    def placed(self, block: np.ndarray) -> tuple[np.ndarray, Region]:
        """Return `block` or a copy of it in shared memory, and the region that contains it."""
        lease: Any = lease_of(block)
        ours = isinstance(lease, SharedLease) and lease.slot_of is self
        if ours and block.ctypes.data == lease.memory.ctypes.data:
            return block, lease.region
        copy = self.buffer(block.shape, block.dtype)
        copy[...], lease = block, lease_of(copy)
        return copy, lease.region

    def _all_gather(self, block):
        region = self.region(block.nbytes) if block.nbytes else None
        shape = (self.size * block.shape[0], *block.shape[1:])
        if region is None:
            return self.after(self.publish(), lambda: of_type(np.empty(shape, block.dtype)))
        packed = region.memory[: self.size * block.nbytes]
        whole = self.lend(region, packed, shape, block.dtype)
        rows = block.shape[0]
        whole[self.rank * rows : (self.rank + 1) * rows] = block
        whole.flags.writeable = False
        return self.after(self.publish(region), lambda: whole)

    def _reduce_scatter(self, block):
        block, region = self.placed(block)
        part = self.pool.empty((block.shape[0] // self.size, *block.shape[1:]), block.dtype)
        mine = slice(self.rank * part.size, (self.rank + 1) * part.size)

        def finish(block=block):
            fold(np.add, region.blocks(block.size, block.dtype)[:, mine], part.reshape(-1))
            return part

        return self.after(self.publish(region), finish)

    def _all_reduce(self, block, op):
        if block.nbytes > SMALL_SUM and block.size >= self.size:
            return self._sum_by_slices(block, op)
        block, region = self.placed(block)
        total = self.empty(block.shape, block.dtype)

        def finish(block=block):
            blocks = region.blocks(block.size, block.dtype)
            REDUCTIONS[op].reduce(blocks, axis=0, out=total.reshape(-1))
            return total

        return self.after(self.publish(region), finish)

    def _sum_by_slices(self, block: np.ndarray, op: str) -> Pending:
        """Reduce blocks into a shared array; each member computes one slice of the array."""
        block, region = self.placed(block)
        result = self.region(-(-block.nbytes // self.size))
        total = self.lend(result, result.memory[: block.nbytes], block.shape, block.dtype)
        mine = slices_of(block.size, self.size)[self.rank]

        def finish(block=block, total=total):
            blocks = region.blocks(block.size, block.dtype)[:, mine]
            fold(REDUCTIONS[op], blocks, total.reshape(-1)[mine])
            total.flags.writeable = False
            self.wait_for_all(self.publish(result))
            return total

        return self.after(self.publish(region), finish)

    def _broadcast(self, block, root):
        self.wait_for_all(header := self.publish(value=block.shape[0]))
        rows = self.flags[root * _LINE + _RING + 1 + header % _RING]
        shape = (rows, *block.shape[1:])
        nbytes = max(1, prod(shape) * block.itemsize)
        region = self.region(nbytes // self.size + 64)
        whole = self.lend(region, region.memory[:nbytes], shape, block.dtype)
        if self.rank == root:
            whole[...] = block
        whole.flags.writeable = False
        return self.after(self.publish(region), lambda: whole)

    def _reduce(self, block, root):
        block, region = self.placed(block)
        mine = self.rank == root
        total = self.empty(block.shape if mine else (0, *block.shape[1:]), block.dtype)

        def finish(block=block):
            if mine:
                fold(np.add, region.blocks(block.size, block.dtype), total.reshape(-1))
            return total

        return self.after(self.publish(region), finish)

    def after(self, post: int, finish: Callable[[], Any]) -> Pending:
        """Return a `Pending` that calls `finish` once all members' counters reach `post`."""

        def meet_and_finish():
            self.wait_for_all(post)
            return finish()

        return Pending(meet_and_finish)
