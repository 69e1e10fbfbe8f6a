"""The partition with the shortest step under a pipeline schedule, which is run on its clock.

The lightest heaviest stage is not always the fastest: what a stage waits for counts, too.  The
search goes through chains of downsets, from the first stage to the last, and leaves a branch when
no step of it can be shorter than the best one known.  With M microbatches, f_s and b_s seconds of
stage s forward and backward and n_s microbatches in flight there, a step lasts at least

    sum_{i<s} (f_i + b_i) + M (f_s + b_s)               to and from stage s, and its own passes
    sum_i f_i + sum_{i!=s} b_i + M b_s + (M - n_s) f_s  what is left after its first gradient
    sum_{i<s} (f_i + b_i) + M T                         T: the heaviest stage of the rest
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from hpc3d.partition.downsets import Chain, Downsets
from hpc3d.partition.max_load import path, table
from hpc3d.partition.stages import Limits
from hpc3d.pipeline.schedule import ONE_STAGE, find, instruction_streams
from hpc3d.pipeline.step_model import in_flight
from hpc3d.pipeline.timeline import Cost, makespan, timeline

SEARCH_BUDGET = 1_000_000  # simulated passes of all searches together
_LOOK = 32  # passes that one look at how to go on counts for


class Timed(NamedTuple):
    """A step: its seconds, the schedule, the downsets behind the stages, the microbatches in
    flight of each, and whether it is `proven` that no step is shorter."""

    seconds: float
    schedule: str
    ends: tuple[int, ...]
    in_flight: tuple[int, ...]
    proven: bool = False


def timed(cuts: Downsets | Chain, limits: Limits, schedule: str, ends: list[int]) -> Timed | None:
    """The step of a partition; None if a stage does not fit."""
    search = _Search(cuts, limits, schedule if ends[1:] else ONE_STAGE, len(ends))
    return search.step(tuple(ends)) if search.fits(ends) else None


def quickest(
    cuts: Downsets | Chain, limits: Limits, schedules: tuple[str, ...], passes: int | None = None
) -> Timed | None:
    """The shortest step of all numbers of stages and `schedules`, as far as so many `passes` go
    (None: SEARCH_BUDGET); None if nothing fits."""
    most = range(min(limits.ranks, cuts.count - 1), 0, -1)  # more are mostly faster
    kinds = [(name if stages > 1 else ONE_STAGE, stages) for stages in most for name in schedules]
    kinds = [*dict.fromkeys(kinds)]
    tables = {
        flights: table(cuts, limits._replace(bandwidth=None, latency=0.0, all_in_flight=flights))
        for flights in {find(name).keeps_all for name, _ in kinds}
    }
    best, left, proven = None, passes or SEARCH_BUDGET, cuts.exact
    for number, (name, stages) in enumerate(kinds):
        if best and left <= 0:
            return best
        search = _Search(cuts, limits, name, stages)
        share = left // (len(kinds) - number)
        search.run(*tables[find(name).keeps_all], share)
        left -= share - search.left
        proven &= search.left > 0
        found = [each for each in (best, search.best) if each]
        best = min(found, key=lambda each: (each.seconds, len(each.ends)), default=None)
    return best and best._replace(proven=proven)


class _Search:
    """That of the schedule of a name and a number of stages."""

    def __init__(self, cuts, limits, name, stages):
        self.cuts, self.limits, self.name, self.stages = cuts, limits, name, stages
        self.micros = limits.microbatches
        self.passes, self.placement = instruction_streams(name, stages, self.micros)
        self.in_flight = [in_flight(stream).activations for stream in self.passes]
        self.rest, self.left, self.best = None, 0, None

    def run(self, following, rest, passes):
        """Find the best, with the table of hpc3d.partition.max_load."""
        self.rest, self.left = rest, passes
        if np.isfinite(rest[0, self.stages]):
            self._try_out(tuple(path(following, self.stages)))
            self.extend((), 0)

    def extend(self, ends, before):
        """Go through all ways to go on behind the stages that end at `ends`."""
        here, behind = len(ends), self.stages - len(ends) - 1
        if behind == 0:
            self._try_out((*ends, self.cuts.count - 1))
            return
        self.left -= _LOOK
        after = self.cuts.after(before)[:-1]
        bound = self.least(before, after, here, behind)
        for place in np.argsort(bound, kind="stable"):
            if self.left <= 0 or (self.best and bound[place] >= self.best.seconds):
                return
            if np.isfinite(bound[place]):
                self.extend((*ends, int(after[place])), int(after[place]))

    def least(self, before, after, here, behind):
        """The seconds of a step at least if the next stage ends at one of `after`; inf where it
        does not fit, or leaves too little for the others."""
        cuts, micros = self.cuts, self.micros
        forward = cuts.forward[after] - cuts.forward[before]
        backward = cuts.backward[after] - cuts.backward[before]
        reached = cuts.forward[before] + cuts.backward[before]
        works = reached + micros * (forward + backward)
        whole = cuts.forward[-1] + cuts.backward[-1]
        after_first = whole + (micros - 1) * backward + (micros - self.in_flight[here]) * forward
        others = reached + forward + backward + micros * self.rest[after, behind]
        bound = np.maximum(np.maximum(works, after_first), others)
        bound[self.held(before, after, here) > self.room] = np.inf
        return bound

    @property
    def room(self):
        return np.inf if self.limits.memory is None else self.limits.memory

    def held(self, before, after, stage):
        """Bytes of the stage between two downsets."""
        saved = self.cuts.saved[after] - self.cuts.saved[before]
        if self.limits.keeps_received:
            saved = saved + self.cuts.crossing[before]
        return self.cuts.fixed(before, after) + self.in_flight[stage] * saved

    def fits(self, ends):
        """Whether every stage does."""
        cuts = enumerate(zip((0, *ends[:-1]), ends, strict=True))
        return all(self.held(*cut, stage) <= self.room for stage, cut in cuts)

    def _try_out(self, ends):
        """Run the step of a partition that fits, and keep it if it is the shortest."""
        if not self.fits(ends):
            return
        self.left -= 2 * self.stages * self.micros
        found = self.step(ends)
        if not self.best or found.seconds < self.best.seconds:
            self.best = found

    def step(self, ends):
        """The Timed of a partition."""
        stages = _costs(self.cuts, ends, self.limits)
        rows = timeline(self.passes, self.placement, stages)
        seconds = makespan(rows)
        if self.limits.sums:
            parameters = map(self.cuts.trained, (0, *ends[:-1]), ends)
            sums = map(self.limits.sums.seconds, parameters)
            seconds = max(row[-1][1] + each for row, each in zip(rows, sums, strict=True))
        return Timed(float(seconds), self.name, ends, tuple(self.in_flight))


def _costs(cuts: Downsets | Chain, ends: tuple[int, ...], limits: Limits) -> list[Cost]:
    """The stages on the clock: what they compute, and messages of all values that are needed
    behind a border, those for a later stage too, for they are handed on."""
    found = []
    for before, after in zip((0, *ends[:-1]), ends):
        forward = cuts.forward[after] - cuts.forward[before]
        backward = cuts.backward[after] - cuts.backward[before]
        found.append(Cost(forward, backward, 0.0, limits.seconds(cuts.crossing[after])))
    return found
