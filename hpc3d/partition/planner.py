"""From a graph and what may be used to a plan: the objectives by name, and what a plan says."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

from hpc3d.limits import MOST_PASSES
from hpc3d.partition.atom_graph import Graph
from hpc3d.partition.downsets import Chain, Downsets, cuts_of
from hpc3d.partition.evaluation import Limits, as_size, held, load
from hpc3d.partition.improvement import cuts_moved, settled
from hpc3d.partition.joint_search import lightest, quickest, timed
from hpc3d.pipeline.schedule import DEFAULT, FOR_PARTITIONS, find
from hpc3d.plain import counted

_SCHEDULES = tuple(each.name for each in FOR_PARTITIONS if each.undivided)
_MOST_CELLS, _MOST_STEPS = 3e7, 4e9  # of the table that a search begins with


class _PlannedStage(NamedTuple):
    """A stage of a plan: its ids, seconds of a microbatch, bytes in and out, and bytes held."""

    ids: list
    forward: float
    backward: float
    bytes_in: float
    bytes_out: float
    load: float
    held: float


class _PlannedBorder(NamedTuple):
    """What lies between two stages: the bytes of a microbatch that cross it forward, the id before
    it, and the seconds of the step if it lay where it is next best, behind `instead`; these are
    None where it could lie nowhere else."""

    nbytes: float
    behind: str | int
    next_best: float | None
    instead: str | int | None


class GraphPlan(NamedTuple):
    """A partition of a graph; `proven` if no other is better, and by what cuts it was found."""

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
        """Of the heaviest stage."""
        return max(stage.load for stage in self.stages)

    @property
    def memory(self) -> float:
        """Of the fullest stage."""
        return max(stage.held for stage in self.stages)


def planned(
    graph: Graph, limits: Limits, objective: str = "time", schedule: str | None = None
) -> GraphPlan:
    """The best GraphPlan; ValueError if nothing fits, with what would."""
    cuts = cuts_of(graph)
    _refuse_large(cuts, limits)
    limits = limits._replace(all_in_flight=bool(schedule) and find(schedule).keeps_all)
    if objective == "load":
        ends = lightest(cuts, limits)
        found = ends and timed(cuts, limits, schedule or DEFAULT, ends)
        proven = cuts.exact
    else:
        found = quickest(cuts, limits, (schedule,) if schedule else _SCHEDULES)
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
            f"{cuts.count - 1} nodes on {counted(limits.ranks, 'rank')} are too many to search: "
            'group nodes by "together", or use fewer ranks'
        )
    if (width - 1) * limits.microbatches > MOST_PASSES:
        raise ValueError(
            f"--microbatches {limits.microbatches}: on {counted(width - 1, 'stage')} at most "
            f"{MOST_PASSES // (width - 1)} are laid out; use fewer"
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
    """Every border, and what the step takes if it alone is moved."""
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
    """The line that says how much memory would do."""
    low, high = limits.memory, float(cuts.fixed(0, -1) + limits.microbatches * cuts.saved[-1])
    while high - low > 1e-3 * high:
        middle = (low + high) / 2
        fits = lightest(cuts, limits._replace(memory=middle))
        low, high = (low, middle) if fits else (middle, high)
    what = "partition" if cuts.exact else "cut of the chain of sorted nodes"
    return (
        f"no {what} into at most {counted(limits.ranks, 'stage')} fits "
        f"{limits.memory:.6g} bytes a rank: the nearest needs {high:.6g}; use "
        f"--memory {as_size(high)}, more ranks, or fewer microbatches"
    )
