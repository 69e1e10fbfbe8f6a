"""Communicators for abstract arrays. They return blocks of the right shape and move no data."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from hpc3d.arrays.abstract import AbstractArray, AbstractPool
from hpc3d.comm.communicator import SMALL_SUM, Communicator, Pending, ready
from hpc3d.comm.grid import Grid
from hpc3d.comm.mesh import Mesh, groups_of

if TYPE_CHECKING:
    from numpy.typing import DTypeLike

    from hpc3d.arrays.array import Array
    from hpc3d.arrays.pool import Pool


class AbstractCommunicator(Communicator):
    """Communicator that moves no data but allocates the same memory as a real one.

    Real arrays are returned unchanged, or resized if the result has a different shape. Gathered
    blocks are allocated in full. Blocks of CPU ranks are allocated as in hpc3d.comm.shared_memory:
    a reduction copies its input, unless `buffer` has returned the input, and the ranks of a node
    share one copy of each gathered block, broadcast block and large all-reduce result. On devices,
    and if the pool has no shared memory (`mesh.transport = "mpi"`), inputs are not copied and
    results are not shared.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        members: Sequence[int] | None = None,
        pool: Pool | None = None,
    ) -> None:
        super().__init__(rank, size, (), pool)
        # A range remains a range, so that the memory of the communicator of many ranks is small.
        self.members = range(size) if members is None else members

    def call(self, op: str, nbytes: int, peer: int | None, move: Callable[[], Pending]) -> Pending:
        """Start a call without counting it, because no watchdog observes abstract ranks."""
        return move()

    # Messages need no contiguous blocks.

    def send(self, block: Array, peer: int) -> Pending:
        return self._send(block, peer)

    def recv(self, shape: Sequence[int], dtype: DTypeLike, peer: int) -> Pending:
        return self._recv(shape, dtype, peer)

    @property
    def _of_node(self) -> bool:
        """True if the members share the memory of a node, False for devices and plain MPI."""
        return self.pool.shared_memory

    def buffer(self, shape: Sequence[int], dtype: DTypeLike) -> AbstractArray:
        block: Any = super().buffer(shape, dtype)
        block.lease.slot_of = self
        return block

    def placed(self, block: Any) -> Array:
        ours = getattr(block, "lease", None) and getattr(block.lease, "slot_of", None) is self
        return self.like(block, block.shape) if self._of_node and not ours else block

    def like(self, block: Any, shape: Sequence[int], kind: str = "communication") -> Any:
        """Return a result block with the given shape and the dtype of `block`."""
        if isinstance(block, AbstractArray):
            return self.pool.empty(shape, block.dtype, kind)
        return np.resize(block, shape)

    def shared(self, block: Any) -> Any:
        """Mark a block as stored once per node, in shared memory, and return the block."""
        if self._of_node and isinstance(block, AbstractArray):
            block.lease.shared = True  # type: ignore[union-attr]  # set by `pool.empty`
        return block

    def _all_gather(self, block):
        whole = self.shared(self.like(block, (self.size * len(block), *block.shape[1:])))
        sent = None if self._of_node else block  # a device reads the block during the call
        return Pending(lambda sent=sent: whole)

    def _reduce_scatter(self, block):
        copy, rows = self.placed(block), block.shape[0] // self.size
        part = self.like(block, (rows, *block.shape[1:]), "activation")
        return Pending(lambda copy=copy: part)

    def _all_reduce(self, block, op):
        copy, total = self.placed(block), self.like(block, block.shape)
        large = block.nbytes > SMALL_SUM and block.size >= self.size
        return Pending(lambda copy=copy: self.shared(total) if large else total)

    def rows_at(self, block: Any, root: int) -> int:
        """Return the number of rows of the block that the root broadcasts."""
        if not len(block):
            raise ValueError("an abstract broadcast needs a block of the full shape on every rank")
        return len(block)

    def _broadcast(self, block, root):
        shape = self.rows_at(block, root), *block.shape[1:]
        return ready(self.shared(self.like(block, shape)))

    def _reduce(self, block, root):
        copy, rows = self.placed(block), block.shape[0] * (self.rank == root)
        total = self.like(block, (rows, *block.shape[1:]))
        return Pending(lambda copy=copy: total)

    def _all_to_all(self, block):
        mixed = self.like(block, block.shape)
        return Pending(lambda sent=block: mixed)

    def _send(self, block, peer):
        return Pending(lambda block=block: block)

    def _recv(self, shape, dtype, peer):
        return ready(self.pool.empty(shape, dtype, "communication"))


def abstract_mesh(
    sizes: Mapping[str, int], coords: Mapping[str, int], pool: Pool | None = None
) -> Mesh:
    """Return the mesh, of shape `sizes`, as seen by the rank at `coords`.

    No other rank is created and no data is exchanged.
    """
    pool, grid = pool or AbstractPool(), Grid(sizes)
    world = AbstractCommunicator(grid.rank(coords), grid.size, None, pool)
    comms = {
        axis: AbstractCommunicator(members.index(world.rank), len(members), members, pool)
        for axis, members in groups_of(grid, coords).items()
    }
    return Mesh(sizes, coords, comms, world)
