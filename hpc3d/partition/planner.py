"""Planner that partitions a cost graph to minimize the step time or the largest stage load."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

from hpc3d.config.limits import MOST_PASSES
from hpc3d.console.sanitize import counted
from hpc3d.partition.atom_graph import Graph
from hpc3d.partition.downsets import Chain, Downsets, cuts_of
from hpc3d.partition.evaluation import Limits, as_size, held, load
from hpc3d.partition.improvement import cuts_moved, settled
from hpc3d.partition.joint_search import fastest, lightest, timed
from hpc3d.pipeline.schedule import DEFAULT, FOR_PARTITIONS, find

_SCHEDULES = tuple(each.name for each in FOR_PARTITIONS if each.undivided)
# Maximum number of cells of the dynamic-programming table, and maximum total number of candidate
# cuts tried for all cells.
_MOST_CELLS, _MOST_STEPS = 3e7, 4e9


class _PlannedStage(NamedTuple):
    """Stage of a graph's plan.

    `ids` contains the node ids. `forward`, `backward` and `load` are seconds per microbatch,
    `bytes_in` and `bytes_out` are the bytes received and sent per microbatch, and `held` is the
    memory of the stage in bytes.
    """

    ids: list
    forward: float
    backward: float
    bytes_in: float
    bytes_out: float
    load: float
    held: float


class _PlannedBorder(NamedTuple):
    """Boundary between two stages.

    `nbytes` is the number of bytes per microbatch sent across the boundary in the forward pass,
    and `behind` is the id of the last node before the boundary. `instead` is the id of the last
    node before the best alternative location nearby, and `next_best` is the step time in seconds
    if only this boundary moves there. Both are `None` if no nearby location fits in memory.
    """

    nbytes: float
    behind: str | int
    next_best: float | None
    instead: str | int | None


class GraphPlan(NamedTuple):
    """Planned partition of a graph.

    `proven` is True if the partition is proven to be optimal. `cuts` is the number of cuts
    searched, and `all_cuts` is True if every downset of the graph was among them.
    """

    objective: str
    schedule: str
    time: float
    stages: list[_PlannedStage]
    borders: list[_PlannedBorder]
    proven: bool
    cuts: int
    all_cuts: bool

    @property
    def load(self) -> float:
        """Load of the heaviest stage in seconds per microbatch."""
        return max(stage.load for stage in self.stages)

    @property
    def memory(self) -> float:
        """Peak memory per rank in bytes, on the stage that needs the most."""
        return max(stage.held for stage in self.stages)


def planned(
    graph: Graph, limits: Limits, objective: str = "time", schedule: str | None = None
) -> GraphPlan:
    """Return the best partition of a graph for the `objective`, "time" or "load".

    Raises ValueError if no partition fits in memory; the message reports how much memory would
    suffice.
    """
    cuts = cuts_of(graph)
    _refuse_large(cuts, limits)
    limits = limits._replace(all_in_flight=bool(schedule) and find(schedule).keeps_all)
    if objective == "load":
        ends = lightest(cuts, limits)
        found = ends and timed(cuts, limits, schedule or DEFAULT, ends)
        proven = cuts.exact
    else:
        found = fastest(cuts, limits, (schedule,) if schedule else _SCHEDULES)
        proven = bool(found) and found.proven
        found = found if proven or not found else settled(cuts, limits, found)
    if not found:
        raise ValueError(_nothing_fits(cuts, limits))
    return GraphPlan(
        objective,
        found.schedule,
        found.seconds,
        _stages(graph, cuts, limits, found),
        _borders(graph, cuts, limits, found),
        proven,
        cuts.count,
        cuts.exact,
    )


def _refuse_large(cuts, limits):
    width = min(limits.ranks, cuts.count - 1) + 1
    if cuts.count * width > _MOST_CELLS or cuts.count**2 * width > _MOST_STEPS:
        raise ValueError(
            f"the search over {cuts.count - 1} nodes and {counted(limits.ranks, 'rank')} is too "
            'large; group nodes with "together", or use fewer ranks'
        )
    if (width - 1) * limits.microbatches > MOST_PASSES:
        raise ValueError(
            f"--microbatches {limits.microbatches}: must be at most {MOST_PASSES // (width - 1)} "
            f"with {counted(width - 1, 'stage')}; use fewer microbatches or ranks"
        )


def _stages(graph, cuts, limits, found):
    starts = (0, *found.ends[:-1])
    stages = []
    for before, after, flight in zip(starts, found.ends, found.in_flight, strict=True):
        members = cuts.stage(before, after)
        stages.append(
            _PlannedStage(
                graph.ids(members),
                graph.total("forward", members),
                graph.total("backward", members),
                graph.bytes_in(members),
                graph.bytes_out(members),
                load(graph, members, limits),
                held(graph, members, flight),
            )
        )
    return stages


def _borders(graph, cuts, limits, found):
    borders = []
    for number, (before, here) in enumerate(pairwise((0, *found.ends[:-1]))):
        others = [*cuts_moved(cuts, limits, found, number)]
        best = min(others, key=lambda each: each.seconds, default=None)
        borders.append(
            _PlannedBorder(
                float(cuts.crossing[here]),
                _last(graph, cuts, before, here),
                best and best.seconds,
                best and _last(graph, cuts, before, best.ends[number]),
            )
        )
    return borders


def _last(graph, cuts, before, after):
    return graph.ids(cuts.stage(before, after))[-1]


def _nothing_fits(cuts: Downsets | Chain, limits):
    """Return the error message for a graph that does not fit, with the memory that it needs."""
    low, high = limits.memory, float(cuts.fixed(0, -1) + limits.microbatches * cuts.saved[-1])
    while high - low > 1e-3 * high:
        middle = (low + high) / 2
        fits = lightest(cuts, limits._replace(memory=middle))
        low, high = (low, middle) if fits else (middle, high)
    what = "partition" if cuts.exact else "partition in topological order"
    return (
        f"no {what} into at most {counted(limits.ranks, 'stage')} fits in {limits.memory:.6g} "
        f"bytes per rank; at least {high:.6g} bytes are needed; use --memory {as_size(high)}, "
        "more ranks, or fewer microbatches"
    )
