"""MPI communicator: host buffers, non-blocking calls, any hosts.

MPI uses a rendezvous for long messages, and over TCP the reply waits behind the data that the peer
sends.  Members that receive before they send, as in collectives of Open MPI, therefore use one
direction of the network at a time in about half of all calls.  This module implements collectives
of long messages by messages that are sent first.  Each member sends a peer no more than the usual
formula says:

    reduce_scatter        each member sends part j to member j, and sums the received parts
    all_gather            each member sends its block to all others (up to 8 members)
    all_reduce            2 members send all and sum; 3: by slices, reduce_scatter + all_gather

MPI has no 16-bit floats: they are moved as integers and all their sums are computed here, in
float32 (`fold`), as are those of short messages.
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
from hpc3d.comm.communicator import REDUCTIONS, SMALL_SUM, Communicator, Pending, fold

if TYPE_CHECKING:
    from numpy.typing import DTypeLike

    from hpc3d.arrays.array import Array
    from hpc3d.arrays.pool import Pool

OPERATIONS = {"sum": MPI.SUM, "max": MPI.MAX}
_MESSAGE, _PART = 0, 1  # tags of messages between members and of the first part of a collective
_CALLS = 1 << 13  # calls whose parts have different tags; the largest tag may be 2 ** 15 - 1
# Largest numbers of members.  Above them, MPI's rings are as fast for sums, and if several members
# on a host gather, a ring sends each block over the network only once.
_MOST = {"all_gather": 8, "all_reduce": 3}
# A waiting rank yields its core, and sometimes sleeps, so that waiting ranks do not evict the
# caches of working ones: with 64 ranks on 2 cores and other programs running, a step takes 3 s,
# but 10 s with yields only.  Sleeps grow with the wait, up to tenfold, because pipeline stages
# wait for a long time.
_YIELDS, _NAP = 8, 200e-6


def wait_until(done: Callable[[], bool]) -> None:
    """Return when `done()` is true.

    MPI progress is called now and then to move this rank's messages: a peer may wait for one of
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
    """Communicator on one MPI communicator; all members wait for their collectives in one order.

    Messages of `long` bytes and more use MPI's rendezvous.
    """

    long: float = 1 << 16

    def __init__(self, comm: MPI.Comm, members: Sequence[int], pool: Pool) -> None:
        super().__init__(comm.rank, comm.size, members, pool)
        self.comm, self.in_parts = comm, 0

    def empty(self, shape: Sequence[int], dtype: DTypeLike) -> Any:
        return self.pool.empty(shape, dtype, "communication")

    def _all_gather(self, block):
        whole = self.empty((self.size * block.shape[0], *block.shape[1:]), block.dtype)
        if block.nbytes < self.long or self.size > _MOST["all_gather"]:
            request = self.comm.Iallgather(integers(block), integers(whole))
            return arriving(request.Test, whole, block)
        places = whole.reshape(self.size, *block.shape)
        places[self.rank] = block
        return self.swapped([block] * self.size, places, self.tag()).then(lambda _: whole)

    def _reduce_scatter(self, block):
        part = self.pool.empty((block.shape[0] // self.size, *block.shape[1:]), block.dtype)
        if part.nbytes < self.long and not is_narrow(block.dtype):
            return arriving(self.comm.Ireduce_scatter_block(block, part).Test, part, block)
        parts, flat = block.reshape(self.size, -1), part.reshape(-1)
        return self.summed(np.add, parts, flat, self.tag()).then(lambda _: part)

    def _all_reduce(self, block, op):
        total = self.empty(block.shape, block.dtype)
        return self.sum_into(block, total, op).then(lambda _: total)

    def sum_into(self, block: Array, total: Array, op: str) -> Pending:
        """Return the pending sum (or maximum) of all blocks, in the memory of `total`."""
        narrow, few = is_narrow(block.dtype), self.size <= _MOST["all_reduce"]
        if not (narrow or (few and block.nbytes // self.size >= self.long)):
            return arriving(self.comm.Iallreduce(block, total, OPERATIONS[op]).Test, total, block)
        flat, into, tag = block.reshape(-1), total.reshape(-1), self.tag()
        if self.size == 2 or block.nbytes <= SMALL_SUM:
            return self.summed(REDUCTIONS[op], [flat] * self.size, into, tag)
        slices = slices_of(flat.size, self.size)
        totals = [into[each] for each in slices]
        mine = totals[self.rank]
        summed = self.summed(REDUCTIONS[op], [flat[each] for each in slices], mine, tag)

        def finish():
            summed.wait()
            self.swapped([mine] * self.size, totals, tag + 1).wait()
            return into

        return Pending(finish)

    def summed(
        self, operation: Callable[..., object], parts: Sequence[Any], out: np.ndarray, tag: int
    ) -> Pending:
        """Return the pending sum of all members' blocks for this one, in `out`.

        parts[j] is this rank's block for member j.  Blocks are added in the order of the members.
        """
        first = 0 if self.rank else 1
        others = iter(self.empty((self.size - 2, *out.shape), out.dtype))
        blocks = [out if peer == first else None for peer in range(self.size)]
        blocks[self.rank] = parts[self.rank]
        blocks = [next(others) if block is None else block for block in blocks]

        def add(blocks):
            fold(operation, blocks, out)
            return out

        return self.swapped(parts, blocks, tag).then(add)

    def swapped(self, sent: Sequence[Any], received: Sequence[Any], tag: int) -> Pending:
        """Return the pending blocks received[j] from all peers j, which get sent[j] (sent
        first)."""
        peers = [(self.rank + ahead) % self.size for ahead in range(1, self.size)]
        requests = [self.comm.Isend(integers(sent[peer]), peer, tag) for peer in peers]
        requests += [
            self.comm.Irecv(integers(received[peer]), peer, tag) for peer in reversed(peers)
        ]
        return arriving(lambda: MPI.Request.Testall(requests), received, sent)

    def tag(self) -> int:
        """Return the tag of a collective's parts; the next tag is for its second stage.

        The second stage starts when the call is waited for, perhaps after later calls.
        """
        self.in_parts += 1
        return _PART + 2 * (self.in_parts % _CALLS)

    def _broadcast(self, block, root):
        rows = np.array([block.shape[0]])
        self.comm.Bcast(rows, root)
        return self.spread_rows(block, root, int(rows[0]))

    def spread_rows(self, block: Array, root: int, rows: int) -> Pending:
        """Return the pending block of the root, which has `rows` rows."""
        mine = self.rank == root
        whole = block if mine else self.empty((rows, *block.shape[1:]), block.dtype)
        return arriving(self.comm.Ibcast(integers(whole), root).Test, whole)

    def _reduce(self, block, root):
        if is_narrow(block.dtype):
            return self._summed_at(block, root)
        mine = self.rank == root
        total = self.empty(block.shape, block.dtype) if mine else None
        request = self.comm.Ireduce(block, total, MPI.SUM, root)
        return arriving(request.Test, total if mine else block[:0].copy(), block)

    def _summed_at(self, block: Array, root: int) -> Pending:
        """Return the pending sum at the root of blocks of a type that MPI cannot add."""
        tag = self.tag()
        if self.rank != root:
            request = self.comm.Isend(integers(block), root, tag)
            return arriving(request.Test, block[:0].copy(), block)
        blocks = self.empty((self.size, *block.shape), block.dtype)
        blocks[root], requests = block, []
        for peer in range(self.size):
            if peer != root:
                requests.append(self.comm.Irecv(integers(blocks[peer]), peer, tag))

        def add(blocks):
            total = self.empty(block.shape, block.dtype)
            fold(np.add, blocks, total)
            return total

        return arriving(lambda: MPI.Request.Testall(requests), blocks).then(add)

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
    """Return a pending `result`, complete when `done()`; `source`, read by MPI, is kept alive."""

    def finish(source=source):
        wait_until(done)
        return result

    return Pending(finish)


def slices_of(count: int, size: int) -> list[slice]:
    """Return the slice of `count` elements of each of `size` members."""
    bounds = [count * member // size for member in range(size + 1)]
    return [slice(*pair) for pair in pairwise(bounds)]
