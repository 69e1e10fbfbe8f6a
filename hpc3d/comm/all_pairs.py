"""Collectives based on messages between all pairs of ranks, for long blocks and 16-bit sums.

MPI's collectives are the default. On networks with remote memory access, they may use the network
in ways that messages cannot. Long blocks are exchanged between all pairs only over TCP, the only
network on which this was measured to be faster.

MPI uses the rendezvous protocol for long messages. Over TCP, the receiver's reply is queued behind
the data that it sends. In collectives of Open MPI, members receive before they send, so about half
of all calls use only one direction of the network at a time. Here, all sends are posted first.
Each member sends each peer no more data than the standard algorithms do:

    reduce_scatter        each member sends chunk j to member j, and sums the received chunks
    all_gather            each member sends its block to all other members (at most 8 members)
    all_reduce            2 members exchange their blocks; 3 use reduce_scatter and all_gather
    broadcast             the root sends each piece to one member, which sends it to the others
                          (3 to 8 members)

MPI has no 16-bit floating-point types, so AllPairs always sums 16-bit floats itself, in float32
(`fold`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from math import inf
from typing import TYPE_CHECKING, Any

import numpy as np
from mpi4py import MPI

from hpc3d.arrays.narrow import integers, is_narrow
from hpc3d.comm.communicator import REDUCTIONS, SMALL_SUM, Pending, fold, pieces_passed_on
from hpc3d.comm.mpi import MESSAGE, MpiCommunicator, arriving
from hpc3d.runtime.host_map import has_remote_memory_access

if TYPE_CHECKING:
    from hpc3d.arrays.array import Array
    from hpc3d.arrays.pool import Pool

_CALLS = 1 << 13  # number of calls before a tag is reused; MPI guarantees tags up to 2 ** 15 - 1
# Maximum group sizes for which these collectives are used.  In larger groups, MPI's ring reduction
# is equally fast, and MPI's ring all-gather sends each block to each host only once, even if the
# host has several members.
_MOST = {"all_gather": 8, "all_reduce": 3}


class AllPairs(MpiCommunicator):
    """MPI communicator with its own collectives for blocks of at least `long` bytes.

    By default, `long` is the message size at which MPI switches to the rendezvous protocol over
    TCP. If it is infinite, only sums of 16-bit floats differ from MPI's collectives. All members
    must use the same value. They must also create only one object per MPI communicator, because
    each object numbers its message tags independently.
    """

    long: float = 1 << 16

    def __init__(
        self, comm: MPI.Comm, members: Sequence[int], pool: Pool, long: float | None = None
    ) -> None:
        super().__init__(comm, members, pool)
        self.exchanges = 0
        if long is not None:
            self.long = long

    def _all_gather(self, block):
        if block.nbytes < self.long or self.size > _MOST["all_gather"]:
            return super()._all_gather(block)
        gathered = self.empty((self.size * block.shape[0], *block.shape[1:]), block.dtype)
        blocks = gathered.reshape(self.size, *block.shape)
        return self.gather_into(block, blocks, range(self.size)).then(lambda _: gathered)

    def gather_into(self, block: Array, blocks: Array, slots: Sequence[int]) -> Pending:
        """Start to gather member j's block into blocks[slots[j]], and return a `Pending`."""
        if block.nbytes >= self.long:
            blocks[slots[self.rank]] = block
            received = [blocks[slot] for slot in slots]
            coming = self.swapped([block] * self.size, received, self.tag())
            return coming.then(lambda _: blocks)
        counts, offsets = [block.size] * self.size, [slot * block.size for slot in slots]
        request = self.comm.Iallgatherv(integers(block), [integers(blocks), counts, offsets, None])
        return arriving(request.Test, blocks, block)

    def scatter_into(self, block: Array, part: Array) -> Pending:
        if part.nbytes < self.long and not is_narrow(block.dtype):
            return super().scatter_into(block, part)
        return self.summed(np.add, block.reshape(self.size, -1), part.reshape(-1), self.tag())

    def sum_into(self, block: Array, total: Array, op: str) -> Pending:
        narrow, few = is_narrow(block.dtype), self.size <= _MOST["all_reduce"]
        if not (narrow or (few and block.nbytes // self.size >= self.long)):
            return super().sum_into(block, total, op)
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

    def spread_into(self, whole: Array, root: int) -> Pending:
        each = 0 if whole.nbytes < self.long else pieces_passed_on(self.size, whole.nbytes)
        if not each:
            return super().spread_into(whole, root)
        others = [peer for peer in range(self.size) if peer != root]
        tag, flat = self.tag(), whole.reshape(-1)
        pieces = [flat[part] for part in slices_of(flat.size, len(others) * each)]
        if self.rank == root:
            requests = [
                self.comm.Isend(integers(piece), others[number % len(others)], tag)
                for number, piece in enumerate(pieces)
            ]
            return arriving(lambda: MPI.Request.Testall(requests), whole)
        return self._passed_on(whole, pieces, root, others, tag)

    def _passed_on(
        self, whole: Array, pieces: Sequence[Array], root: int, others: Sequence[int], tag: int
    ) -> Pending:
        """Receive all pieces, and send those that come from the root to the other members."""
        peers = [peer for peer in others if peer != self.rank]
        first, step = others.index(self.rank), len(others)
        coming = []
        for number, piece in enumerate(pieces):
            source = root if number % step == first else others[number % step]
            coming.append(self.comm.Irecv(integers(piece), source, tag))

        def finish():
            sent = []
            for piece, request in zip(pieces[first::step], coming[first::step], strict=True):
                arriving(request.Test, piece).wait()
                sent += [self.comm.Isend(integers(piece), peer, tag) for peer in peers]
            return arriving(lambda: MPI.Request.Testall(coming + sent), whole).wait()

        return Pending(finish)

    def _reduce(self, block, root):
        if not is_narrow(block.dtype):
            return super()._reduce(block, root)
        tag = self.tag()
        if self.rank != root:
            request = self.comm.Isend(integers(block), root, tag)
            return arriving(request.Test, block[:0].copy(), block)
        blocks = self.empty((self.size, *block.shape), block.dtype)
        blocks[root] = block
        peers = [peer for peer in range(self.size) if peer != root]
        requests = [self.comm.Irecv(integers(blocks[peer]), peer, tag) for peer in peers]
        coming = arriving(lambda: MPI.Request.Testall(requests), blocks)
        return coming.then(
            lambda blocks: fold(np.add, blocks, self.empty(block.shape, block.dtype))
        )

    def summed(
        self, operation: Callable[..., object], parts: Sequence[Any], out: np.ndarray, tag: int
    ) -> Pending:
        """Reduce the blocks that all members send to this member; return `out` as a `Pending`.

        parts[j] is this rank's block for member j. Blocks are reduced in the order of the members.
        """
        first = 0 if self.rank else 1
        others = iter(self.empty((self.size - 2, *out.shape), out.dtype))
        blocks = [out if peer == first else None for peer in range(self.size)]
        blocks[self.rank] = parts[self.rank]
        blocks = [next(others) if block is None else block for block in blocks]
        return self.swapped(parts, blocks, tag).then(lambda blocks: fold(operation, blocks, out))

    def swapped(self, sent: Sequence[Any], received: Sequence[Any], tag: int) -> Pending:
        """Send sent[j] to peer j and receive received[j], for all j; return a `Pending`."""
        peers = [(self.rank + ahead) % self.size for ahead in range(1, self.size)]
        requests = [self.comm.Isend(integers(sent[peer]), peer, tag) for peer in peers]
        requests += [
            self.comm.Irecv(integers(received[peer]), peer, tag) for peer in reversed(peers)
        ]
        return arriving(lambda: MPI.Request.Testall(requests), received, sent)

    def tag(self) -> int:
        """Return the tag of a new collective; tag + 1 is reserved for its second stage.

        The second stage starts in `wait()`, possibly after later calls have started.
        """
        self.exchanges += 1
        return MESSAGE + 1 + 2 * (self.exchanges % _CALLS)


def shortest_exchange(comm: MPI.Comm) -> float:
    """Return the block size in bytes from which collectives exchange messages between all pairs.

    The size is infinite if a host of the job has a network with remote memory access. All ranks
    return the same size. The call is collective over `comm`.
    """
    return inf if comm.allreduce(has_remote_memory_access(), MPI.LOR) else AllPairs.long


def slices_of(count: int, size: int) -> list[slice]:
    """Split `count` elements into `size` slices, one per member."""
    bounds = [count * member // size for member in range(size + 1)]
    return [slice(*pair) for pair in pairwise(bounds)]
