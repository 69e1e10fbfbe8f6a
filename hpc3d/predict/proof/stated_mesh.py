"""Mesh of a rank whose communicators check the states of the blocks that they transfer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hpc3d.arrays.abstract import AbstractPool
from hpc3d.comm.abstract_communicator import AbstractCommunicator
from hpc3d.comm.communicator import Pending
from hpc3d.comm.grid import Grid
from hpc3d.comm.mesh import Mesh, groups_of
from hpc3d.predict.proof.state_check import StateCheck
from hpc3d.predict.proof.stated_array import StatedArray
from hpc3d.predict.proof.states import LOCAL, PARTIAL, PARTS, UNKNOWN, States, named

_TERMS = (PARTIAL, UNKNOWN)  # states that a reduction accepts


class StatedPool(AbstractPool):
    """Pool of arrays whose states `check` checks."""

    kind = StatedArray

    def __init__(self, check: StateCheck) -> None:
        super().__init__()
        self.check = check


class StatedCommunicator(AbstractCommunicator):
    """Communicator along the mesh axes `axes`: one axis, or several data axes.

    Each call states what it accepts and what it returns along these axes. The states along other
    axes do not change.
    """

    def __init__(
        self, rank: int, members: Sequence[int], pool: StatedPool, axes: Sequence[str]
    ) -> None:
        super().__init__(rank, len(members), members, pool)
        self.axes, self.check = axes, pool.check

    def _takes(self, op: str, block: Any, accepted: Callable[[int], bool], wanted: str) -> None:
        """Refuse a block in a state that is not `accepted`, unless the block is zero."""
        for axis in self.axes if block.states is not None else ():
            state = block.states.get(axis)
            if state is None or not accepted(state):
                self.check.refuse(
                    f"{op} along axis {axis}: the block ({block.cell.name}) is {named(state)}; it "
                    f"must be {wanted}"
                )

    def _gives(self, op: str, states: States, pending: Pending, state: int | None) -> Pending:
        """Set the states of the result: `state` along the axes, and `states` along others."""
        states = {axis: each for axis, each in states.items() if axis not in self.axes}
        if state is not None:
            states |= dict.fromkeys(self.axes, state)

        def finish():
            result = pending.wait()
            result.become(states, op)
            return result

        return Pending(finish)

    def _reduction(self, op: str, block: Any, pending: Pending, state: int | None) -> Pending:
        self._takes(op, block, _TERMS.__contains__, "a partial sum")
        return self._gives(op, block.states or {}, pending, state)

    def _all_gather(self, block):
        # Blocks of one row are stacked, so they may be shards of another dimension.
        stop = PARTS if len(block) > 1 else PARTS * block.ndim
        self._takes("all_gather", block, range(LOCAL, stop).__contains__, "sharded along its rows")
        return self._gives("all_gather", block.states or {}, super()._all_gather(block), None)

    def _reduce_scatter(self, block):
        return self._reduction("reduce_scatter", block, super()._reduce_scatter(block), 0)

    def _all_reduce(self, block, op):
        pending = super()._all_reduce(block, op)
        if op == "sum":
            return self._reduction("all_reduce", block, pending, None)
        self._takes(f"all_reduce ({op})", block, lambda state: state != PARTIAL, "sharded")
        return self._gives("all_reduce", block.states or {}, pending, None)

    def _broadcast(self, block, root):
        self._takes("broadcast", block, lambda state: state > LOCAL, "sharded")
        return self._gives("broadcast", block.states or {}, super()._broadcast(block, root), None)

    def rows_at(self, block: Any, root: int) -> int:
        return self.check.rows_of_broadcast(len(block), self.rank == root)

    def _reduce(self, block, root):
        return self._reduction("reduce", block, super()._reduce(block, root), 0)

    def _all_to_all(self, block):
        self._takes("all_to_all", block, lambda state: state > LOCAL, "sharded")
        states = block.states or {}
        found = {states.get(axis, UNKNOWN) // PARTS for axis in self.axes}
        dim = found.pop() if len(found) == 1 else UNKNOWN
        rows = 0
        if block.ndim < 3:  # each member's part of the rows has its part of the columns
            rows = PARTS - 1
            states = {axis: state or PARTS for axis, state in states.items()}
        state = {0: PARTS, 1: rows}.get(dim, UNKNOWN)
        return self._gives("all_to_all", states, super()._all_to_all(block), state)

    def _send(self, block, peer):
        self.sent = block
        return super()._send(block, peer)

    def _recv(self, shape, dtype, peer):
        states = self.sent.states or {}  # all members send at the same time
        if self.sent.ndim < 3:  # the message may have the columns of another rank
            states = {axis: min(state, UNKNOWN) for axis, state in states.items()}
        received = super()._recv(shape, dtype, peer)
        return self._gives("recv", states, received, states.get(self.axes[0]))


def stated_mesh(sizes: Mapping[str, int], coords: Mapping[str, int], check: StateCheck) -> Mesh:
    """Return the mesh, of shape `sizes`, of the rank at `coords`, whose values `check` checks."""
    pool, grid = StatedPool(check), Grid(sizes)
    rank = grid.rank(coords)
    comms = {}
    for name, members in groups_of(grid, coords).items():
        axes = [axis for axis in name.split() if sizes.get(axis, 1) > 1]
        comms[name] = StatedCommunicator(members.index(rank), members, pool, axes)
    return Mesh(sizes, coords, comms, StatedCommunicator(rank, range(grid.size), pool, ()))
