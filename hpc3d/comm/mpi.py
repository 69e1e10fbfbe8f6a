"""Communicator on MPI's own non-blocking collectives: host arrays, any number of hosts.

MPI has no 16-bit floats: they move as integers, and ranks sum them here in float32 (`fold`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from itertools import pairwise
from time import sleep
from typing import TYPE_CHECKING, Any

import numpy as np
from mpi4py import MPI

from hpc3d.arrays.narrow import integers, is_narrow
from hpc3d.comm.communicator import REDUCTIONS, Communicator, Pending, fold

if TYPE_CHECKING:
    from numpy.typing import DTypeLike

    from hpc3d.arrays.array import Array
    from hpc3d.arrays.pool import Pool

OPERATIONS = {"sum": MPI.SUM, "max": MPI.MAX}
_MESSAGE = 0  # tag of messages between members
# While it waits a rank yields its core, and now and then it sleeps, so that the waiting do not
# keep the working from their caches: with 64 ranks on 2 cores and other programs running, a step
# takes 3 s, and 10 s with yields alone.  Naps get longer with the wait, up to ten times: stages of
# a pipeline wait for long.
_YIELDS, _NAP = 8, 200e-6


def wait_until(done: Callable[[], bool]) -> None:
    """Return when `done()` is true.

    Now and then MPI gets its turn to move the messages of this rank: a peer may wait for one of
    them before it does what `done` waits for.
    """
    tries = 0
    while not done():
        tries += 1
        if tries % _YIELDS:
            os.sched_yield()
        else:
            MPI.COMM_SELF.Iprobe()
            sleep(_NAP * min(10, 1 + tries / 64))


class MpiCommunicator(Communicator):
    """Members of one MPI communicator.

    All members must wait for their collectives in the same order.
    """

    def __init__(self, comm: MPI.Comm, members: Sequence[int], pool: Pool) -> None:
        super().__init__(comm.rank, comm.size, members, pool)
        self.comm = comm

    def empty(self, shape: Sequence[int], dtype: DTypeLike) -> Any:
        return self.pool.empty(shape, dtype, "communication")

    def _all_gather(self, block):
        whole = self.empty((self.size * block.shape[0], *block.shape[1:]), block.dtype)
        request = self.comm.Iallgather(integers(block), integers(whole))
        return arriving(request.Test, whole, block)

    def gather_into(self, block: Array, rows: Array, slots: Sequence[int]) -> Pending:
        """Gather the block of each member j into `rows[slots[j]]`."""
        offsets = [slot * block.size for slot in slots]
        target = [integers(rows), ([block.size] * self.size, offsets)]
        request = self.comm.Iallgatherv(integers(block), target)
        return arriving(request.Test, rows, block)

    def _reduce_scatter(self, block):
        part = self.pool.empty((block.shape[0] // self.size, *block.shape[1:]), block.dtype)
        return self.sum_parts(block, part)

    def sum_parts(self, parts: Array, total: Array) -> Pending:
        """Sum in `total` the parts that all members have for this one; parts[j] is for j."""
        if not is_narrow(parts.dtype):
            request = self.comm.Ireduce_scatter_block(parts, total)
            return arriving(request.Test, total, parts)
        received = self.empty((self.size, *total.shape), parts.dtype)
        request = self.comm.Ialltoall(integers(parts), integers(received))
        return arriving(request.Test, received, parts).then(
            lambda received: fold(np.add, received, total)
        )

    def _all_reduce(self, block, op):
        return self.sum_into(block, self.empty(block.shape, block.dtype), op)

    def sum_into(self, block: Array, total: Array, op: str) -> Pending:
        """Compute the sum (or maximum) of the blocks of all members in `total`."""
        if not is_narrow(block.dtype):
            request = self.comm.Iallreduce(block, total, OPERATIONS[op])
            return arriving(request.Test, total, block)
        slices = slices_of(block.size, self.size)
        counts = [each.stop - each.start for each in slices]
        mine = total.reshape(-1)[slices[self.rank]]
        received = self.empty((self.size, mine.size), block.dtype)
        request = self.comm.Ialltoallv(
            [integers(block), counts], [integers(received), [mine.size] * self.size]
        )

        def gather(received):
            fold(REDUCTIONS[op], received, mine)
            request = self.comm.Iallgatherv(MPI.IN_PLACE, [integers(total), counts])
            return arriving(request.Test, total).wait()

        return arriving(request.Test, received, block).then(gather)

    def _broadcast(self, block, root):
        rows = np.array([block.shape[0]])
        self.comm.Bcast(rows, root)
        return self.spread_rows(block, root, int(rows[0]))

    def spread_rows(self, block: Array, root: int, rows: int) -> Pending:
        """Broadcast the block of the root, which has this number of rows."""
        mine = self.rank == root
        whole = block if mine else self.empty((rows, *block.shape[1:]), block.dtype)
        return arriving(self.comm.Ibcast(integers(whole), root).Test, whole)

    def _reduce(self, block, root):
        mine = self.rank == root
        total = self.empty(block.shape, block.dtype) if mine else block[:0].copy()
        if not is_narrow(block.dtype):
            request = self.comm.Ireduce(block, total if mine else None, MPI.SUM, root)
            return arriving(request.Test, total, block)
        blocks = self.empty((self.size if mine else 0, *block.shape), block.dtype)
        request = self.comm.Igather(integers(block), integers(blocks) if mine else None, root)
        return arriving(request.Test, blocks, block).then(
            lambda blocks: fold(np.add, blocks, total) if mine else total
        )

    def _all_to_all(self, block):
        mixed = self.empty(block.shape, block.dtype)
        request = self.comm.Ialltoall(integers(block), integers(mixed))
        return arriving(request.Test, mixed, block)

    def _send(self, block, peer):
        return arriving(self.comm.Isend(integers(block), peer, _MESSAGE).Test, block)

    def _recv(self, shape, dtype, peer):
        block = self.empty(shape, dtype)
        return arriving(self.comm.Irecv(integers(block), peer, _MESSAGE).Test, block)


def arriving(done: Callable[[], bool], result: Any, source: object = None) -> Pending:
    """A pending `result`, there when `done()`; `source`, which MPI reads, lives until then."""

    def finish(source=source):
        wait_until(done)
        return result

    return Pending(finish)


def slices_of(count: int, size: int) -> list[slice]:
    """The slice of `count` elements that each of `size` members has."""
    bounds = [count * member // size for member in range(size + 1)]
    return [slice(*pair) for pair in pairwise(bounds)]
