"""Two-level communicator, which uses shared memory inside each host and MPI between hosts.

All hosts have the same number of members. A lane consists of one member of each host. Data crosses
the network once per host, and each lane transfers one slice of it. All members of a host read the
result in shared memory.

                    inside a host                      on the network, by lanes
    all_gather                                         blocks, into shared memory
    reduce_scatter  sum the chunks of this lane    ->  reduce_scatter of the sums
    all_reduce      sum this lane's slice          ->  all_reduce of the sum, into shared memory
    broadcast       the root's block is shared     ->  broadcast of this lane's slice
    reduce          sum this lane's slice          ->  reduce of the sum, to the root's host

Short blocks, messages and all_to_all do not use shared memory.  Sums of 16-bit floats are rounded
once inside a host and once between hosts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import TYPE_CHECKING

import numpy as np

from hpc3d.comm.all_pairs import AllPairs, slices_of
from hpc3d.comm.communicator import REDUCTIONS, Pending, fold
from hpc3d.comm.shared_memory import Region, SharedMemory

if TYPE_CHECKING:
    from mpi4py import MPI
    from numpy.typing import DTypeLike

    from hpc3d.arrays.array import Array
    from hpc3d.arrays.pool import Pool


class TwoLevel(AllPairs):
    """Two-level communicator based on an MPI communicator whose member j is on host `hosts[j]`.

    `long` is the block size in bytes from which hosts exchange blocks between all pairs
    (hpc3d.comm.all_pairs).
    """

    def __init__(
        self,
        comm: MPI.Comm,
        members: Sequence[int],
        pool: Pool,
        hosts: Sequence[int | None],
        long: float,
    ) -> None:
        super().__init__(comm, members, pool)
        names = list(dict.fromkeys(hosts))
        self.table = np.array(
            [[j for j, host in enumerate(hosts) if host == name] for name in names]
        )
        self.host = names.index(hosts[self.rank])
        self.lane = self.table[self.host].tolist().index(self.rank)
        self.peers = self.table[:, self.lane].tolist()
        part = comm.Split(self.host, self.lane), comm.Split(self.lane, self.host)
        here, there = ([members[j] for j in own] for own in (self.table[self.host], self.peers))
        self.node = SharedMemory(part[0], here, pool)
        self.wire = AllPairs(part[1], there, pool, long)

    @property
    def readers(self) -> tuple[int, int]:
        return self.node.readers

    def buffer(self, shape: Sequence[int], dtype: DTypeLike) -> Array:
        short = prod(shape) * np.dtype(dtype).itemsize < self.long
        return super().buffer(shape, dtype) if short else self.node.buffer(shape, dtype)

    def shared(self, shape: Sequence[int], dtype: np.dtype) -> tuple[np.ndarray, Region]:
        """Return a new array that the group's ranks on this host share, and its region."""
        nbytes = prod(shape) * dtype.itemsize
        region = self.node.region(-(-nbytes // self.node.size))
        return self.node.lend(region, region.memory[:nbytes], shape, dtype), region

    def seen(self, whole: np.ndarray, region: Region | None = None) -> np.ndarray:
        """Return `whole`, read-only, once all members on this host have written their slices."""
        whole.flags.writeable = False
        self.node.wait_for_all(self.node.publish(region))
        return whole

    def _all_gather(self, block):
        if block.nbytes * self.size < self.long:
            return super()._all_gather(block)
        shape = self.size * block.shape[0], *block.shape[1:]
        whole, region = self.shared(shape, block.dtype)
        blocks = whole.reshape(self.size, *block.shape)
        coming = self.wire.gather_into(block, blocks, self.peers)
        return coming.then(lambda _: self.seen(whole, region))

    def _reduce_scatter(self, block):
        if block.nbytes < self.long:
            return super()._reduce_scatter(block)
        block, region = self.node.placed(block)
        part = self.pool.empty((block.shape[0] // self.size, *block.shape[1:]), block.dtype)
        sums = self.empty((self.wire.size, part.size), block.dtype)

        def finish(block=block):
            blocks = region.blocks(block.size, block.dtype)
            blocks = blocks.reshape(self.node.size, self.size, part.size)
            for peer, total in zip(self.peers, sums, strict=True):
                fold(np.add, blocks[:, peer], total)
            self.wire.scatter_into(sums, part).wait()
            return part

        return self.node.after(self.node.publish(region), finish)

    def _all_reduce(self, block, op):
        if block.nbytes < self.long:
            return super()._all_reduce(block, op)
        block, region = self.node.placed(block)
        total, common = self.shared(block.shape, block.dtype)

        def finish(block=block, total=total):
            mine = total.reshape(-1)[self._slice_of(block.size)]
            self.wire.sum_into(self._summed_here(region, block, REDUCTIONS[op]), mine, op).wait()
            return self.seen(total, common)

        return self.node.after(self.node.publish(region), finish)

    def spread_rows(self, block: Array, root: int, rows: int) -> Pending:
        shape = rows, *block.shape[1:]
        if prod(shape) * block.itemsize < self.long:
            return super().spread_rows(block, root, rows)
        whole, region = self.shared(shape, block.dtype)
        if self.rank == root:
            whole[...] = block

        def finish(whole=whole):
            mine = whole.reshape(-1)[self._slice_of(whole.size)]
            self.wire.spread_into(mine, self._host_of(root)).wait()
            return self.seen(whole, region)

        return self.node.after(self.node.publish(region), finish)

    def _reduce(self, block, root):
        if block.nbytes < self.long:
            return super()._reduce(block, root)
        block, region = self.node.placed(block)
        mine, there, total, common = self.rank == root, self._host_of(root), None, None
        result = self.empty(block.shape if mine else (0, *block.shape[1:]), block.dtype)
        if self.host == there:
            total, common = self.shared(block.shape, block.dtype)

        def finish(block=block, total=total):
            coming = self.wire._reduce(self._summed_here(region, block, np.add), there).wait()
            if total is not None:
                total.reshape(-1)[self._slice_of(block.size)] = coming
                total = self.seen(total, common)
            if mine:
                result[...] = total
            return result

        return self.node.after(self.node.publish(region), finish)

    def _slice_of(self, count: int) -> slice:
        return slices_of(count, self.node.size)[self.lane]

    def _summed_here(
        self, region: Region, block: np.ndarray, operation: Callable[..., object]
    ) -> np.ndarray:
        mine = self._slice_of(block.size)
        total = self.empty((mine.stop - mine.start,), block.dtype)
        return fold(operation, region.blocks(block.size, block.dtype)[:, mine], total)

    def _host_of(self, member: int) -> int:
        """Return the index of a member's host, i.e. its rank in the inter-host communicator."""
        return int(np.argwhere(self.table == member)[0, 0])
