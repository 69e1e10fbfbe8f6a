"""Local search that improves the pipeline arrangement of a module.

Each move changes one property: a stage boundary, the number of replicas of one or two stages, or
the recomputation of a model chunk. After these moves, the search moves all boundaries at once,
each to a nearby atom. The planner also reports the step time after moving a single boundary,
to explain the location of that boundary. For a partition into downsets, `cuts_moved` and `settled`
move only the boundaries.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from hpc3d.partition.downsets import Chain, Downsets
from hpc3d.partition.evaluation import (
    Evaluated,
    Limits,
    ModelCosts,
    PipelineChoice,
    busiest,
    bytes_held,
    evaluated,
)
from hpc3d.partition.joint_search import Allowed, JointSearch, Timed, timed

_NEAR = 6  # number of atoms, and of block boundaries, to try on each side of a stage boundary
# If all boundaries move jointly, the number of atoms tried on each side of every boundary is this
# number divided by the number of boundaries.
_AROUND = 60
_CLIMB_BUDGET = 600_000  # maximum number of forward and backward passes simulated by `_climbed`
_NEAR_CUTS = 16  # maximum number of downsets tried per stage boundary
_BORDER_BUDGET = 100_000  # maximum number of forward and backward passes simulated by `settled`


def improved(
    costs: ModelCosts, choice: PipelineChoice, allowed: Allowed, positions: np.ndarray
) -> tuple[PipelineChoice, Evaluated]:
    """Improve an arrangement that fits in memory by local search.

    Returns the improved arrangement and its predicted step time and memory. The search stops if no
    single change shortens the step, or if its budget is exhausted. A boundary moves either by a
    few atoms, or to one of the nearest `positions`.
    """
    for _ in range(2):
        choice = _climbed(costs, choice, allowed, positions)
        choice, step = _refined(costs, choice, allowed)
    return choice, step


def _climbed(costs, choice, allowed, positions):
    """Apply single changes until no change shortens the step or the budget is used up."""
    best = evaluated(costs, choice, allowed.memory)
    left, better = _CLIMB_BUDGET, True
    while better and left > 0:
        better = False
        # Each change affects a boundary, the recomputation of a chunk, or the replicas of a stage.
        for kind in range(2 * len(choice.stages) - 1 + choice.width):
            for other in _changed(costs, choice, kind, allowed, positions):
                if left <= 0 or busiest(costs, other) >= best.seconds:
                    continue
                if max(bytes_held(costs, other)) > allowed.memory:
                    continue
                left -= 2 * len(other.stages) * other.microbatches
                found = evaluated(costs, other, allowed.memory)
                if found.seconds < (1 - 1e-9) * best.seconds:
                    choice, best, better = other, found, True
    return choice


def _refined(costs, choice, allowed):
    """Move all boundaries jointly to nearby atoms, and return the best arrangement.

    The replicas, the number of microbatches and the schedule do not change.
    """
    near = _AROUND // max(1, len(choice.stages) - 1)
    ends = [stage.end for stage in choice.stages[:-1]]
    positions = {position for end in ends for position in range(end - near, end + near + 1)}
    inside = sorted(position for position in positions if 0 < position < costs.count)
    same = allowed._replace(
        microbatches=(choice.microbatches,),
        schedules=(choice.schedule,),
        replicas=choice.replicas,
    )
    found = [choice]
    if choice.width > 1:
        found += JointSearch(costs, same, np.array([0, *inside, costs.count])).found()
    steps = [(each, evaluated(costs, each, allowed.memory)) for each in found]
    return min(steps, key=lambda each: each[1].seconds)


def _changed(costs, choice, kind, allowed, positions):
    parts = len(choice.stages)
    if kind < parts - 1:
        yield from moved(choice, kind, positions)
    elif kind < 2 * parts - 1:
        part = kind - parts + 1
        again = not choice.stages[part].recompute
        if again in allowed.recompute:
            yield choice.changed(part, recompute=again)
    elif allowed.replicas is None:
        yield from _shifted(costs, choice, kind - 2 * parts + 1, allowed.ranks)


def moved(choice: PipelineChoice, border: int, positions: np.ndarray) -> Iterator[PipelineChoice]:
    """Yield variants with one boundary moved to a nearby atom or to a nearby position."""
    ends = (0, *(stage.end for stage in choice.stages))
    before, here, after = ends[border : border + 3]
    low, high = np.searchsorted(positions, [here, here + 1])
    near = {*range(here - _NEAR, here + _NEAR + 1)}
    near |= {
        *positions[max(0, low - _NEAR) : low].tolist(),
        *positions[high : high + _NEAR].tolist(),
    }
    for position in sorted(near - {here}, key=lambda position: abs(position - here)):
        if before < position < after:
            yield choice.changed(border, end=position)


def _shifted(costs, choice, stage, ranks):
    """Yield the arrangements in which a stage has one more replica.

    The new replica runs on an idle rank or on a rank taken from another stage. The stage
    boundaries stay the same, because the search moves them in separate steps.
    """
    replicas, idle = choice.replicas, ranks - choice.ranks
    if replicas[stage] == costs.rows(choice.microbatches, 1):
        return
    if idle:
        yield _with_replicas(choice, {stage: replicas[stage] + 1})
    for other, count in enumerate(replicas):
        if other != stage and count > 1:
            yield _with_replicas(choice, {stage: replicas[stage] + 1, other: count - 1})


def _with_replicas(choice, replicas):
    width = choice.width
    stages = [
        stage._replace(replicas=replicas.get(number % width, stage.replicas))
        for number, stage in enumerate(choice.stages)
    ]
    return choice._replace(stages=tuple(stages))


def next_best(
    costs: ModelCosts, choice: PipelineChoice, step: Evaluated, border: int, memory: float
) -> tuple[PipelineChoice | None, float | None, bool]:
    """Find the best nearby location to which a stage boundary can be moved.

    Returns the arrangement with the moved boundary and its step time in seconds; both are `None`
    if no nearby location fits in memory. The third result is True if some nearby location would
    shorten the step, but does not fit in memory.
    """
    others = moved(choice, border, np.arange(0))
    found = [(other, evaluated(costs, other, memory)) for other in others]
    shorter = any(not each.fits and each.seconds < step.seconds for _, each in found)
    fitting = [(other, each.seconds) for other, each in found if each.fits]
    other, seconds = min(fitting, key=lambda each: each[1], default=(None, None))
    return other, seconds, shorter


def cuts_moved(
    cuts: Downsets | Chain, limits: Limits, found: Timed, number: int
) -> Iterator[Timed]:
    """Yield one simulated step for each nearby downset to which boundary `number` can be moved.

    A downset is a set of atoms that contains all predecessors of each of its atoms. Downsets for
    which a stage would not fit in memory are skipped.
    """
    ends = (0, *found.ends)
    before, here, after = ends[number : number + 3]
    others = [int(position) for position in cuts.between(before, after) if position != here]
    others.sort(key=lambda position: abs(cuts.forward[position] - cuts.forward[here]))
    for position in others[:_NEAR_CUTS]:
        there = [*found.ends]
        there[number] = position
        if step := timed(cuts, limits, found.schedule, there):
            yield step


def settled(cuts: Downsets | Chain, limits: Limits, found: Timed) -> Timed:
    """Move one boundary at a time until no move shortens the step or the budget is used up."""
    left, borders, still, number = _BORDER_BUDGET, len(found.ends) - 1, 0, 0
    while borders and still < borders and left > 0:
        best = min(
            cuts_moved(cuts, limits, found, number), key=lambda each: each.seconds, default=found
        )
        better = best.seconds < found.seconds
        found, still = (best, 0) if better else (found, still + 1)
        left -= 2 * _NEAR_CUTS * len(found.ends) * limits.microbatches
        number = (number + 1) % borders
    return found
