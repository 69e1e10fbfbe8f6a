"""MPI communicator, which uses MPI's non-blocking collectives on host buffers.

MPI has no 16-bit floating-point types, so 16-bit floats are transferred as integers. Reductions of
16-bit floats need AllPairs (hpc3d.comm.all_pairs).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from time import sleep
from typing import TYPE_CHECKING, Any

import numpy as np
from mpi4py import MPI

from hpc3d.arrays.narrow import integers
from hpc3d.comm.communicator import Communicator, Pending

if TYPE_CHECKING:
    from numpy.typing import DTypeLike

    from hpc3d.arrays.array import Array
    from hpc3d.arrays.pool import Pool

OPERATIONS = {"sum": MPI.SUM, "max": MPI.MAX}
MESSAGE = 0  # tag of point-to-point messages; the collectives of AllPairs use higher tags
# A waiting rank yields its core, and sometimes sleeps, so that waiting ranks do not evict the
# caches of working ranks. With 64 ranks on 2 cores and other programs running, a step takes 3 s,
# compared with 10 s if waiting ranks only yield. The sleep time grows up to tenfold during a wait,
# because pipeline stages may wait for a long time.
_YIELDS, _NAP = 8, 200e-6


def wait_until(done: Callable[[], bool]) -> None:
    """Wait until `done()` is true.

    MPI is polled regularly to make progress on this rank's messages, because a peer may need one
    of them before `done()` can become true.
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
    """Communicator based on MPI. All members must wait for collectives in the same order."""

    def __init__(self, comm: MPI.Comm, members: Sequence[int], pool: Pool) -> None:
        super().__init__(comm.rank, comm.size, members, pool)
        self.comm = comm

    def empty(self, shape: Sequence[int], dtype: DTypeLike) -> Any:
        return self.pool.empty(shape, dtype, "communication")

    def _all_gather(self, block):
        gathered = self.empty((self.size * block.shape[0], *block.shape[1:]), block.dtype)
        request = self.comm.Iallgather(integers(block), integers(gathered))
        return arriving(request.Test, gathered, block)

    def _reduce_scatter(self, block):
        part = self.pool.empty((block.shape[0] // self.size, *block.shape[1:]), block.dtype)
        return self.scatter_into(block, part).then(lambda _: part)

    def scatter_into(self, block: Array, part: Array) -> Pending:
        """Start a reduce-scatter into `part`, and return `part` as a `Pending`."""
        return arriving(self.comm.Ireduce_scatter_block(block, part).Test, part, block)

    def _all_reduce(self, block, op):
        total = self.empty(block.shape, block.dtype)
        return self.sum_into(block, total, op).then(lambda _: total)

    def sum_into(self, block: Array, total: Array, op: str) -> Pending:
        """Start an all-reduce (sum or maximum) into `total`, and return `total` as a `Pending`."""
        return arriving(self.comm.Iallreduce(block, total, OPERATIONS[op]).Test, total, block)

    def _broadcast(self, block, root):
        rows = np.array([block.shape[0]])
        self.comm.Bcast(rows, root)
        return self.spread_rows(block, root, int(rows[0]))

    def spread_rows(self, block: Array, root: int, rows: int) -> Pending:
        """Broadcast the root's block of `rows` rows, and return it as a `Pending`."""
        mine = self.rank == root
        whole = block if mine else self.empty((rows, *block.shape[1:]), block.dtype)
        return self.spread_into(whole, root)

    def spread_into(self, whole: Array, root: int) -> Pending:
        """Broadcast the root's array `whole` into those of the others, and return a `Pending`."""
        return arriving(self.comm.Ibcast(integers(whole), root).Test, whole)

    def _reduce(self, block, root):
        mine = self.rank == root
        total = self.empty(block.shape, block.dtype) if mine else None
        request = self.comm.Ireduce(block, total, MPI.SUM, root)
        return arriving(request.Test, total if mine else block[:0].copy(), block)

    def _all_to_all(self, block):
        mixed = self.empty(block.shape, block.dtype)
        request = self.comm.Ialltoall(integers(block), integers(mixed))
        return arriving(request.Test, mixed, block)

    def _send(self, block, peer):
        return arriving(self.comm.Isend(integers(block), peer, MESSAGE).Test, block)

    def _recv(self, shape, dtype, peer):
        block = self.empty(shape, dtype)
        return arriving(self.comm.Irecv(integers(block), peer, MESSAGE).Test, block)


def arriving(done: Callable[[], bool], result: Any, source: object = None) -> Pending:
    """Return `result` as a `Pending`, complete when `done()` is true.

    `source`, which MPI may still read, is kept alive until then.
    """

    def finish(source=source):
        wait_until(done)
        return result

    return Pending(finish)
