"""Mesh of a pipeline whose stages may have different numbers of replicas.

Ranks are numbered stage by stage.  The replicas of a stage split the rows of a microbatch in
order.  If two stages have the same number of replicas, each rank sends its rows to the replica
with the same index.  Otherwise, each rank sends rows to all replicas that need some of them.

A replica may consist of several tensor-parallel ranks with adjacent numbers.  The ranks with the
same index in their replicas form a plane, in which messages are sent and gradients are reduced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from copy import copy
from itertools import accumulate, pairwise
from typing import Any

from hpc3d.comm.communicator import Communicator, Pending
from hpc3d.comm.mesh import DATA, Mesh

TENSOR = "x"  # axis of the tensor-parallel ranks of a replica

# Function that creates the communicator for a list of ranks; all listed ranks must call it.
Line = Callable[[Sequence[int]], Communicator]


def ranks_of(replicas: Sequence[int], ways: int = 1, plane: int = 0) -> list[range]:
    """Return one range of ranks per pipeline stage.

    Of the `ways` tensor-parallel ranks of each replica, only rank number `plane` is included.
    """
    ends = pairwise(accumulate(replicas, initial=0))
    return [range(ways * first + plane, ways * stop, ways) for first, stop in ends]


def stage_and_replica(replicas: Sequence[int], rank: int, ways: int = 1) -> tuple[int, int]:
    """Return the pipeline stage of a rank and its replica index in the stage."""
    return next(
        (stage, ranks.index(rank))
        for stage, ranks in enumerate(ranks_of(replicas, ways, rank % ways))
        if rank in ranks
    )


def shares(rows: int, replicas: int) -> list[range]:
    """Split rows evenly over the replicas; return one range of rows per replica."""
    return [
        range(rows * replica // replicas, rows * (replica + 1) // replicas)
        for replica in range(replicas)
    ]


def stage_mesh(
    replicas: Sequence[int],
    rows: int,
    world: Communicator,
    line: Line,
    host: Communicator | None = None,
    ways: int = 1,
) -> Mesh:
    """Return the mesh of this rank, with axes p, d and x, for microbatches of `rows` samples.

    `world` is a communicator of all ranks. If its arrays are in device memory, `host` is another
    one for arrays in host memory. Each replica consists of `ways` tensor-parallel ranks, which
    form axis x.
    """
    plane = world.rank % ways
    stages = ranks_of(replicas, ways, plane)
    stage, replica = stage_and_replica(replicas, world.rank, ways)
    comms: dict[str, Communicator] = {}
    if len(stages) > 1 and len({*replicas}) == 1:
        comms["p"] = line([ranks[replica] for ranks in stages])
    elif len(stages) > 1:
        comms["p"] = SplitRows(world, stages, stage, rows)
    if len(stages[stage]) > 1:
        comms[DATA] = line(stages[stage])
    if ways > 1:
        comms[TENSOR] = line(range(world.rank - plane, world.rank - plane + ways))
    sizes = {"p": len(stages), DATA: len(stages[stage]), TENSOR: ways}
    coords = {"p": stage, DATA: replica, TENSOR: plane}
    return Mesh(sizes, coords, comms, host or world, pool=world.pool)


class SplitRows(Communicator):
    """Communicator for messages between stages with different numbers of replicas.

    Every sample occupies the same number of rows in a block.  A rank exchanges rows with each rank
    of the peer stage that processes some of the same samples.
    """

    def __init__(
        self, world: Communicator, stages: Sequence[range], stage: int, rows: int
    ) -> None:
        self.world, self.stages = world, stages
        self.rows = [shares(rows, len(ranks)) for ranks in stages]
        self.mine = self.rows[stage][stages[stage].index(world.rank)]
        first = [next(self._shared(peer), (ranks[0],))[0] for peer, ranks in enumerate(stages)]
        super().__init__(stage, len(stages), first, world.pool)

    def wrapped(self, wrapper: Any, axis: str) -> Any:
        """Return a copy of this communicator, with messages intercepted by `wrapper`."""
        found = copy(self)
        found.world = wrapper.wrap(self.world, axis)
        return found

    def _shared(self, peer: int) -> Iterator[tuple[int, slice]]:
        """Yield (rank, samples) for each rank of stage `peer` that shares samples with this rank.

        `samples` is a slice of this rank's samples.
        """
        for rank, theirs in zip(self.stages[peer], self.rows[peer], strict=True):
            first, stop = max(self.mine.start, theirs.start), min(self.mine.stop, theirs.stop)
            if first < stop:
                yield rank, slice(first - self.mine.start, stop - self.mine.start)

    def _parts(self, rows: int, peer: int) -> Iterator[tuple[int, slice]]:
        """Yield (rank, rows) for each rank of stage `peer` that shares samples with this rank.

        `rows` is a slice of the `rows` rows of this rank's block.
        """
        each = rows // len(self.mine)
        for rank, samples in self._shared(peer):
            yield rank, slice(samples.start * each, samples.stop * each)

    def _send(self, block: Any, peer: int) -> Pending:
        sent = [self.world.send(block[part], rank) for rank, part in self._parts(len(block), peer)]
        return Pending(lambda: [each.wait() for each in sent])

    def _recv(self, shape: Sequence[int], dtype: Any, peer: int) -> Pending:
        whole, parts = self.pool.empty(shape, dtype, "activation"), []
        for rank, part in self._parts(shape[0], peer):
            rows = part.stop - part.start
            parts.append((part, self.world.recv((rows, *shape[1:]), dtype, rank)))

        def joined():
            for part, pending in parts:
                whole[part] = pending.wait()
            return whole

        return Pending(joined)
