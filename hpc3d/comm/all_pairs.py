"""All-pairs exchange: collectives of long blocks between hosts that MPI reaches over TCP.

MPI asks the receiver before it sends a long message, and over TCP the answer waits behind the data
that the receiver sends.  Members of Open MPI's collectives receive before they send, so about half
of all calls use one direction of the network at a time.  Here each member first posts its sends to
all others.  Between emulated hosts with NICs of 200 Mbit/s, MPI's own collectives take 1.4 to 3.4
times as long (docs/hosts.md).  On one host neither is faster, so MPI's own are used there:

    reduce_scatter   each member sends part j to member j and sums the parts that it receives
    all_gather       each member sends its block to all others (up to 8 members)
    all_reduce       2 members exchange their blocks; each of 3 members sums a slice and sends it
                     to the others

Members send each other no more bytes than the closed forms count.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from mpi4py import MPI

from hpc3d.arrays.narrow import integers, is_narrow
from hpc3d.comm.communicator import REDUCTIONS, SMALL_SUM, Pending, fold
from hpc3d.comm.mpi import MpiCommunicator, arriving, slices_of

if TYPE_CHECKING:
    from hpc3d.arrays.array import Array
    from hpc3d.arrays.pool import Pool

# Largest numbers of members.  With more, MPI's rings are as good for sums; and if several members
# gather on one host, a ring brings each block to the host once.
_MOST = {"all_gather": 8, "all_reduce": 3}
_FIRST_TAG = 1  # tag 0 is that of messages between members
_CALLS = 1 << 13  # calls with different tags; MPI guarantees tags up to 2 ** 15 - 1 only
# Device classes of RDMA networks: InfiniBand, RoCE, Omni-Path and EFA; Slingshot.
_FABRICS = ("/sys/class/infiniband", "/sys/class/cxi")


class AllPairs(MpiCommunicator):
    """Members of one MPI communicator that exchange blocks of `long` bytes and more in pairs."""

    long = 1 << 16  # MPI asks the receiver before it sends as many bytes

    def __init__(self, comm: MPI.Comm, members: Sequence[int], pool: Pool) -> None:
        super().__init__(comm, members, pool)
        self.exchanges = 0

    def _all_gather(self, block):
        if block.nbytes < self.long or self.size > _MOST["all_gather"]:
            return super()._all_gather(block)
        whole = self.empty((self.size * block.shape[0], *block.shape[1:]), block.dtype)
        rows = whole.reshape(self.size, *block.shape)
        return self.gather_into(block, rows, range(self.size)).then(lambda _: whole)

    def gather_into(self, block: Array, rows: Array, slots: Sequence[int]) -> Pending:
        received = [rows[slot] for slot in slots]
        received[self.rank][...] = block
        return self._exchange([block] * self.size, received, self._tag())

    def _reduce_scatter(self, block):
        if block.nbytes // self.size < self.long:
            return super()._reduce_scatter(block)
        part = self.pool.empty((block.shape[0] // self.size, *block.shape[1:]), block.dtype)
        return self.sum_parts(block.reshape(self.size, -1), part.reshape(-1)).then(lambda _: part)

    def sum_parts(self, parts: Array, total: Array) -> Pending:
        return self._sum(np.add, parts, total, self._tag())

    def sum_into(self, block: Array, total: Array, op: str) -> Pending:
        few = self.size <= _MOST["all_reduce"] or is_narrow(block.dtype)
        if not few or block.nbytes // self.size < self.long:
            return super().sum_into(block, total, op)
        flat, into, tag = block.reshape(-1), total.reshape(-1), self._tag()
        if self.size == 2 or block.nbytes <= SMALL_SUM:
            return self._sum(REDUCTIONS[op], [flat] * self.size, into, tag).then(lambda _: total)
        slices = slices_of(flat.size, self.size)
        totals = [into[each] for each in slices]
        mine = totals[self.rank]
        summed = self._sum(REDUCTIONS[op], [flat[each] for each in slices], mine, tag)

        def gather(mine):
            self._exchange([mine] * self.size, totals, tag + 1).wait()
            return total

        return summed.then(gather)

    def _sum(self, operation: Callable[..., object], parts: Any, out: Array, tag: int) -> Pending:
        """Reduce in `out` the parts that all members have for this one, in the order of the
        members; parts[j] is for member j."""
        first = 0 if self.rank else 1
        others = iter(self.empty((self.size - 2, *out.shape), out.dtype))
        blocks = [out if peer == first else None for peer in range(self.size)]
        blocks[self.rank] = parts[self.rank]
        blocks = [next(others) if block is None else block for block in blocks]
        return self._exchange(parts, blocks, tag).then(lambda blocks: fold(operation, blocks, out))

    def _exchange(self, sent: Sequence[Any], received: Sequence[Any], tag: int) -> Pending:
        """Send sent[j] to each peer j, and receive its block in received[j]."""
        peers = [(self.rank + ahead) % self.size for ahead in range(1, self.size)]
        requests = [self.comm.Isend(integers(sent[peer]), peer, tag) for peer in peers]
        requests += [
            self.comm.Irecv(integers(received[peer]), peer, tag) for peer in reversed(peers)
        ]
        return arriving(lambda: MPI.Request.Testall(requests), received, sent)

    def _tag(self) -> int:
        """Return the tag of a collective; the next tag is that of its second exchange, which
        begins when the call is waited for, perhaps after later calls."""
        self.exchanges += 1
        return _FIRST_TAG + 2 * (self.exchanges % _CALLS)


def mpi_communicator(comm: MPI.Comm, members: Sequence[int], pool: Pool) -> MpiCommunicator:
    """Return the communicator of ranks that share no memory: AllPairs over TCP, else MPI's own
    collectives.  Collective over `comm`."""
    kind = AllPairs if over_tcp(comm) else MpiCommunicator
    return kind(comm, members, pool)


def over_tcp(comm: MPI.Comm) -> bool:
    """Return whether the ranks are on several hosts of which one has no RDMA network.
    Collective over `comm`."""
    node = comm.Split_type(MPI.COMM_TYPE_SHARED)
    several = node.size < comm.size
    node.Free()
    fabric = any(os.path.isdir(path) and os.listdir(path) for path in _FABRICS)
    return several and comm.allreduce(not fabric, MPI.LOR)
