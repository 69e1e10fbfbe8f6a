"""A plan with one border elsewhere: what shows that a border lies well, and what improves a plan
that a search has not proven to be the best."""

from __future__ import annotations

from collections.abc import Iterator

from hpc3d.partition.downsets import Chain, Downsets
from hpc3d.partition.stages import Limits
from hpc3d.partition.step_time import Timed, timed

_NEAR = 16  # places of a border that are tried
_BORDER_BUDGET = 100_000  # simulated passes in which the borders of a plan are improved


def moved(cuts: Downsets | Chain, limits: Limits, found: Timed, number: int) -> Iterator[Timed]:
    """The steps with border `number` at other places that are near and fit."""
    ends = (0, *found.ends)
    before, here, after = ends[number : number + 3]
    others = [int(place) for place in cuts.between(before, after) if place != here]
    others.sort(key=lambda place: abs(cuts.forward[place] - cuts.forward[here]))
    for place in others[:_NEAR]:
        there = [*found.ends]
        there[number] = place
        if step := timed(cuts, limits, found.schedule, there):
            yield step


def settled(cuts: Downsets | Chain, limits: Limits, found: Timed) -> Timed:
    """A step that no near place of any one border makes shorter, as far as the time allows."""
    left, borders, still = _BORDER_BUDGET, len(found.ends) - 1, 0
    number = 0
    while borders and still < borders and left > 0:
        best = min(
            moved(cuts, limits, found, number), key=lambda each: each.seconds, default=found
        )
        better = best.seconds < found.seconds
        found, still = (best, 0) if better else (found, still + 1)
        left -= 2 * _NEAR * len(found.ends) * limits.microbatches
        number = (number + 1) % borders
    return found
