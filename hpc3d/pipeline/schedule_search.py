"""Search for a fast pipeline schedule with one chunk per stage, for given times and memory limits.

List scheduling with several priorities yields initial schedules, like the search of Zero Bubble
(arXiv:2401.10241, section 3.1), and the known schedules that satisfy the memory limits are added.
Simulated annealing then moves single passes on the critical path of the schedule.  Random numbers
have a fixed seed, so the same workload always yields the same schedule.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator
from functools import lru_cache
from itertools import product
from math import exp, inf
from random import Random
from typing import NamedTuple

from hpc3d.pipeline.instruction import Instruction, Placement, from_pattern, whole
from hpc3d.pipeline.schedule import SCHEDULES, SEARCH
from hpc3d.pipeline.schedule_bound import ROUNDING, Workload, lower_bound
from hpc3d.pipeline.timeline import makespan, timeline

MOST_SEARCHED = 8192  # maximum number of stages times microbatches
_BUDGET = 3_000_000  # passes to simulate; takes a few seconds
_STARTS = 4  # initial schedules from which simulated annealing starts
_HEAT = 0.01  # initial temperature, relative to the lower bound
_DELAYS = 0.0, 0.5, 1.0  # delays of F and W in list scheduling, relative to the mean pass time
_TIE = 1e-6  # delay that gives a B a lower priority than a pass that can start at the same time

log = logging.getLogger(__name__)
_NOTHING = inf, inf, 0, ""
_Patterns = tuple[str, ...]  # one string per stage, such as "FFBWBW"


class FoundSchedule(NamedTuple):
    """Schedule found by a search: one stream of passes per stage.

    `seconds` is its makespan, and `bound` a lower bound on the makespan of all schedules.
    """

    streams: list[list[Instruction]]
    placement: Placement
    seconds: float
    bound: float

    @property
    def gap(self) -> float:
        """Proven gap: maximum relative distance of the makespan from the optimum."""
        return max(0.0, self.seconds / self.bound - 1)


def find_schedule(work: Workload, budget: int = _BUDGET) -> FoundSchedule:
    """Search for the schedule with the shortest makespan that satisfies the memory limits.

    Simulated annealing simulates about `budget` passes, or fewer if the schedule is optimal.
    Raises ValueError if a single microbatch does not fit on a stage, or if the workload has too
    many microbatches.
    """
    _refuse(work)
    search, bound, random = _Search(work), lower_bound(work), Random(0)
    found = sorted((search.seconds(each), each) for each in search.initial())
    best, starts = found[0], found[:_STARTS]
    for start in [*starts, None, None]:
        log.info("found a makespan of %.4g s, lower bound %.4g s", best[0], bound)
        # Half of the budget is for the initial schedules, the other half for the best schedule.
        share = budget / (2 * len(starts) if start else 4)
        best = min(best, search.annealed(start or best, bound, share, random))
    return FoundSchedule(_streams(best[1]), search.placement, best[0], bound)


def _refuse(work):
    for stage, (saved, inputs, limit) in enumerate(work.memory):
        if max(saved, inputs) > limit * (1 + ROUNDING):
            raise ValueError(
                f"--memory: the saved data of one microbatch on stage {stage} needs "
                f"{max(saved, inputs):.6g}, but the limit is {limit:.6g}; increase --memory"
            )
    if (size := len(work.costs) * work.micros) > MOST_SEARCHED:
        raise ValueError(
            f"schedule {SEARCH}: stages x microbatches = {size} exceeds the limit of "
            f"{MOST_SEARCHED}; reduce the number of microbatches"
        )


def _streams(patterns):
    return [*map(_stream, patterns)]


@lru_cache(maxsize=1024)
def _stream(pattern):
    return [*from_pattern(pattern)]


def _pattern(stream):
    return "".join(op for op, *_ in whole(stream))


class _Search:
    """Schedules of a workload that satisfy its memory limits."""

    def __init__(self, work):
        self.work, self.placement = work, Placement(len(work.costs), 1)

    def rows(self, patterns):
        return timeline(_streams(patterns), self.placement, self.work.costs)

    def seconds(self, patterns):
        return makespan(self.rows(patterns))

    def initial(self) -> Iterator[_Patterns]:
        """Yield the known schedules that satisfy the memory limits, and list schedules."""
        stages, micros = range(self.placement.stages), self.work.micros
        for schedule in SCHEDULES.values():
            if schedule.asynchronous or schedule.forbids(len(stages), micros, 1):
                continue
            streams = (schedule.stream(stage, self.placement, micros, 1) for stage in stages)
            patterns = tuple(map(_pattern, streams))
            if schedule.chunks == 1 and all(map(self.fits, stages, patterns)):
                yield patterns
        times = [seconds for cost in self.work.costs for seconds in cost[:3]]
        mean = sum(times) / len(times)
        for forward, backward, weight in product(_DELAYS, (0.0, _TIE), _DELAYS):
            delays = {"B": backward * mean, "F": forward * mean, "W": weight * mean}
            yield _ListScheduler(self.work, delays).run()

    def fits(self, stage: int, pattern: str) -> bool:
        """Return True if the passes are in a valid order, and their data fits in memory."""
        flying = waiting = 0
        for op in pattern:
            flying += (op == "F") - (op == "B")
            waiting += (op == "B") - (op == "W")
            if flying < 0 or waiting < 0:
                return False
        memory = self.work.memory[stage]
        return memory.peak(pattern) <= memory.limit * (1 + ROUNDING)

    def annealed(
        self, start: tuple[float, _Patterns], bound: float, budget: float, random: Random
    ) -> tuple[float, _Patterns]:
        """Improve a schedule by simulated annealing; return the best makespan and its schedule.

        The search simulates `budget` passes, and ends early at the lower bound.
        """
        best, (now, patterns) = start, start
        critical = self.critical(self.rows(patterns))
        steps = int(budget / (3 * self.placement.stages * self.work.micros)) + 1
        for step in range(steps):
            if best[0] <= bound * (1 + ROUNDING) or not critical:
                break
            stage, index = random.choice(critical)
            moved = self.moved(patterns, stage, index, random)
            if moved is None:
                continue
            try:
                rows = self.rows(moved)
            except ValueError:  # deadlock
                continue
            seconds, heat = makespan(rows), _HEAT * bound * (1 - step / steps) ** 2
            if seconds <= now or random.random() < exp((now - seconds) / heat):
                now, patterns, critical = seconds, moved, self.critical(rows)
                best = min(best, (now, patterns))
        return best

    def moved(
        self, patterns: _Patterns, stage: int, index: int, random: Random
    ) -> _Patterns | None:
        """Move one of two adjacent passes across the other one, and possibly across further ones.

        Returns None if the order of the passes is the same or invalid.
        """
        old, distance = patterns[stage], 1 + int(random.expovariate(0.5))
        if random.random() < 0.5:
            first = max(0, index - distance)
            new = old[:first] + old[index] + old[first:index] + old[index + 1 :]
        else:
            last = min(len(old), index + distance)
            new = old[: index - 1] + old[index:last] + old[index - 1] + old[last:]
        if new == old or not self.fits(stage, new):
            return None
        return (*patterns[:stage], new, *patterns[stage + 1 :])

    def critical(self, rows):
        """Return the passes on a critical path that wait for the previous pass of their stage.

        The result is a list of (stage, index) pairs.
        """
        stage = max(range(len(rows)), key=lambda stage: rows[stage][-1][1])
        index, found = len(rows[stage]) - 1, []
        order = [{done: n for n, (*_, done) in enumerate(row)} for row in rows]
        while rows[stage][index][0] > 0:
            start, _, done = rows[stage][index]
            if index and rows[stage][index - 1][1] >= start:
                found.append((stage, index))
                index -= 1
            else:
                needs = self.placement.needs(stage, done)
                stage, need = next(each for each in needs if each[0] != stage)
                index = order[stage][need]
        return found


class _ListScheduler:
    """List scheduling: repeatedly appends the pass that can start first, on any stage.

    `delays` maps F, B and W to seconds that are added to their start times in this comparison.
    """

    def __init__(self, work, delays):
        self.work, self.delays, stages = work, delays, range(len(work.costs))
        self.seconds = [cost.seconds() for cost in work.costs]
        self.clocks, self.used = [0.0 for _ in stages], [0.0 for _ in stages]
        self.patterns = ["" for _ in stages]
        # Arrival times of the inputs of passes that have not run.
        self.arrivals: list[dict[str, deque[float]]]
        self.arrivals = [{op: deque() for op in "FBW"} for _ in stages]
        self.arrivals[0]["F"].extend([0.0] * work.micros)

    def run(self) -> _Patterns:
        """Return the schedule."""
        stages = range(len(self.clocks))
        following = [self.following(stage) for stage in stages]
        while (first := min(following)) < _NOTHING:
            _, start, stage, op = first
            self.append(start, stage, op)
            for changed in stages[max(0, stage - 1) : stage + 2]:
                following[changed] = self.following(changed)
        return tuple(self.patterns)

    def following(self, stage):
        """Return the next pass of a stage: start time with delay, start time, stage and op."""
        found = [_NOTHING]
        for op, delay in self.delays.items():
            arrivals = self.arrivals[stage][op]
            if arrivals and self.fits(stage, op):
                start = max(self.clocks[stage], arrivals[0])
                found.append((start + delay, start, stage, op))
        return min(found)

    def fits(self, stage, op):
        """Return True if the data of a pass fits in memory, so that the stage cannot deadlock."""
        saved, inputs, limit = self.work.memory[stage]
        more = {"F": max(saved, inputs), "B": inputs - saved, "W": 0.0}[op]
        return self.used[stage] + more <= limit * (1 + ROUNDING)

    def append(self, start, stage, op):
        arrivals, (saved, inputs, _) = self.arrivals, self.work.memory[stage]
        arrivals[stage][op].popleft()
        self.patterns[stage] += op
        self.used[stage] += {"F": saved, "B": inputs - saved, "W": -inputs}[op]
        self.clocks[stage] = end = start + self.seconds[stage][op]
        if op == "F" and stage < len(self.clocks) - 1:
            arrivals[stage + 1]["F"].append(end + self.work.costs[stage].comm)
        elif op == "F":
            arrivals[stage]["B"].append(end)
        elif op == "B":
            arrivals[stage]["W"].append(end)
            if stage:
                arrivals[stage - 1]["B"].append(end + self.work.costs[stage - 1].comm)
