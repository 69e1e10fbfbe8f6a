"""The clock of hpc3d.pipeline.timeline for one schedule and many costs: what waits for what is
worked out once, so that a search can ask for thousands of steps."""

from __future__ import annotations

from collections import Counter, deque
from functools import cached_property, lru_cache
from math import inf
from typing import NamedTuple

from hpc3d.pipeline.instruction import Instruction, whole
from hpc3d.pipeline.schedule import instruction_streams
from hpc3d.pipeline.timeline import Cost

_KINDS = ("F", "B", "W", "BW")
_NOWHERE, _START = -2, -1  # behind all passes: what nothing comes from, the start of a stage
_FILL, _ROUNDS = 4, 4  # of a microbatch per stage: until a schedule is steady, and to look at it


class FullMoment(NamedTuple):
    """The microbatches that are in flight on a stage, by chunk: from F to the end of the backward
    pass, W included; and whether the gradient of one before may still be in flight."""

    counts: tuple[int, ...]
    sending: bool


class ScheduleClock:
    """Of a schedule for so many stages, microbatches and chunks.

    `peaks` has for every stage all FullMoments at which there is more of something than at others.
    """

    def __init__(self, name: str, stages: int, micros: int, chunks: int) -> None:
        self._streams, self._placement = instruction_streams(name, stages, micros, chunks)
        self.peaks = [_in_flight(stream, chunks) for stream in self._streams]

    @cached_property
    def _order(self):
        """All passes, none before what it waits for: the numbers of the one before it on its stage
        and of another one that it needs, over which border, and its part and kind; and the number
        of the last one of every stage."""
        streams = [deque(whole(stream)) for stream in self._streams]
        numbers: dict[tuple[int, Instruction], int] = {}
        waiting: dict[tuple[int, Instruction], int] = {}
        found: list[tuple[int, int, int, int]] = []
        last, ready = [_START] * len(streams), [*range(len(streams))]
        while ready:
            stage = ready.pop()
            while streams[stage]:
                need = self._from_another(stage, streams[stage][0])
                if need and need not in numbers:
                    waiting[need] = stage
                    break
                done = streams[stage].popleft()
                found.append((last[stage], *self._numbered(stage, done, need, numbers)))
                result = stage, done._replace(op=done.op[0])
                numbers[result] = last[stage] = len(found) - 1
                ready += [waiting.pop(result)] if result in waiting else []
        return found, last

    def _from_another(self, stage, instruction):
        """The pass of another stage that a pass needs, if there is one."""
        needs = self._placement.needs(stage, instruction)
        return next((need for need in needs if need[0] != stage), None)

    def _numbered(self, stage, instruction, need, numbers):
        part = self._placement.part(stage, instruction.chunk)
        kind = len(_KINDS) * part + _KINDS.index(instruction.op)
        if need is None:
            return _NOWHERE, 0, kind
        return numbers[need], min(part, self._placement.part(need[0], need[1].chunk)), kind

    def ends(self, costs: list[Cost]) -> list[float]:
        """When each stage has done its last pass, in seconds, with the Cost of every part."""
        seconds = [cost.seconds()[kind] for cost in costs for kind in _KINDS]
        messages, (passes, last) = [cost.comm for cost in costs], self._order
        ends = [0.0] * len(passes) + [-inf, 0.0]
        for number, (before, other, border, kind) in enumerate(passes):
            start, arrival = ends[before], ends[other] + messages[border]
            ends[number] = (start if start > arrival else arrival) + seconds[kind]
        return [ends[number] for number in last]


def _in_flight(stream, chunks):
    live: Counter[int] = Counter()
    found, sending = set(), False
    for op, _, chunk in whole(stream):
        live[chunk] += (op == "F") - (op in ("W", "BW"))
        sending |= op in ("B", "BW")
        found.add(FullMoment(tuple(live[each] for each in range(chunks)), sending))
    return [
        moment
        for moment in found
        if not any(other != moment and _is_fuller(other, moment) for other in found)
    ]


def _is_fuller(one, other):
    return one.sending >= other.sending and all(a >= b for a, b in zip(one.counts, other.counts))


clock_of = lru_cache(maxsize=1024)(ScheduleClock)


def steady_ends(
    name: str, stages: int, micros: int, chunks: int, costs: list[Cost]
) -> list[float]:
    """The ends of a schedule with any number of microbatches, as quick with many as with few:
    what comes after the first rounds takes as long as some rounds after them.

    Exact where one stage is busy all the time; within 2 % where loops of messages set the pace.
    """
    few = clocked_microbatches(stages, micros)
    ends = clock_of(name, stages, few, chunks).ends(costs)
    if few == micros:
        return ends
    rounds = _ROUNDS * stages
    before = clock_of(name, stages, few - rounds, chunks).ends(costs)
    more = (micros - few) / rounds
    return [end + more * (end - start) for end, start in zip(ends, before, strict=True)]


def clocked_microbatches(stages: int, micros: int) -> int:
    """How many of so many microbatches `steady_ends` runs on the clock."""
    return micros - stages * max(0, micros // stages - _FILL - _ROUNDS)
