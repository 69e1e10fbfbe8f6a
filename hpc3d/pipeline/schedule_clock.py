"""The clock of hpc3d.pipeline.timeline for one schedule and many costs: what waits for what is
worked out once, so that a search can ask for thousands of steps."""

from __future__ import annotations

from collections import Counter
from functools import cached_property, lru_cache
from math import inf
from typing import NamedTuple

from hpc3d.pipeline.instruction import Instruction, whole
from hpc3d.pipeline.schedule import instruction_streams
from hpc3d.pipeline.timeline import Cost, timeline

_KINDS = ("F", "B", "W", "BW")
_FILL, _ROUNDS = 4, 4  # of a microbatch per stage: until a schedule is steady, and to look at it


class FullMoment(NamedTuple):
    """The microbatches that are in flight on a stage, by chunk: from F to the end of the backward
    pass, W included; and whether the gradient of one before may still be on its way."""

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
        # Where every pass takes time, what ends first waits for nothing that ends later.
        placement, last = self._placement, [-1] * len(self._streams)
        rows = timeline(self._streams, placement, Cost(*[placement.chunks] * 3))
        passes = sorted(
            (end, stage, place)
            for stage, row in enumerate(rows)
            for place, (_, end, _) in enumerate(row)
        )
        numbers: dict[tuple[int, Instruction], int] = {}
        found: list[tuple[int, int, int, int]] = []
        for number, (_, stage, place) in enumerate(passes):
            done = rows[stage][place][2]
            part = placement.part(stage, done.chunk)
            other, border = len(passes), 0
            for peer, need in placement.needs(stage, done):
                if peer != stage:
                    other = numbers[peer, need]
                    border = min(part, placement.part(peer, need.chunk))
            kind = len(_KINDS) * part + _KINDS.index(done.op)
            found.append((last[stage], other, border, kind))
            numbers[stage, done._replace(op=done.op[0])] = last[stage] = number
        return found, last

    def ends(self, costs: list[Cost]) -> list[float]:
        """When each stage has done its last pass, in seconds, with the Cost of every part."""
        seconds = [cost.seconds()[kind] for cost in costs for kind in _KINDS]
        messages, (passes, last) = [cost.comm for cost in costs], self._order
        # At last, what comes from nowhere, and the start of every stage.
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
