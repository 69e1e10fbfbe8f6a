"""Step time and memory peaks of a schedule for many costs.

The order of the passes depends only on the schedule.  It is computed once, so that a search can
evaluate thousands of costs.  hpc3d.pipeline.timeline is the reference.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from functools import cache, cached_property, lru_cache
from math import inf
from typing import NamedTuple

import numpy as np

from hpc3d.pipeline.instruction import Instruction, Placement, whole
from hpc3d.pipeline.schedule import find, instruction_streams
from hpc3d.pipeline.timeline import Cost

_KINDS = ("F", "B", "W", "BW")
_NOWHERE, _START = -2, -1  # indices after all passes: no remote input; start of a stage
_FILL, _ROUNDS = 4, 4  # microbatches per stage until a schedule is steady, and to measure its pace
# Change of the microbatches whose activations and whose inputs of W a stage saves.
_KEPT = {"F": (1, 0), "B": (-1, 1), "W": (0, -1), "BW": (-1, 0)}


class InFlight(NamedTuple):
    """Peaks of a stage, in microbatches of one chunk.

    `activations` are saved from F to the end of B or BW; `weight_inputs`, the inputs and gradients
    of the products that W computes, from the end of B to the end of W.
    """

    activations: int
    weight_inputs: int


class FullMoment(NamedTuple):
    """Microbatches in flight on a stage, by chunk, from F to the end of W or BW.

    `sending` is True if the gradient of an earlier microbatch may still be in flight.
    """

    counts: tuple[int, ...]
    sending: bool


def in_flight(stream: Iterable[Instruction]) -> InFlight:
    """Return the peaks of a stream of passes."""
    return InFlight(*_kept([*whole(stream)], 1).max((0, 2)).tolist())


def _kept(passes: Sequence[Instruction], chunks: int) -> np.ndarray:
    """Return the microbatches that a stage saves, [before each pass and at the end, 2, chunks].

    The second axis has activations and inputs of W.  With one chunk, all chunks count together.
    """
    changes = np.zeros((1 + len(passes), 2, chunks), int)
    for number, (op, _, chunk) in enumerate(passes, 1):
        changes[number, :, chunk % chunks] = _KEPT.get(op, 0)
    return changes.cumsum(0)


def _fullest(states: np.ndarray) -> np.ndarray:
    """Return the rows that no other row equals or exceeds in every column."""
    states = np.unique(states, axis=0)
    return states[[np.all(states >= row, axis=1).sum() == 1 for row in states]]


@cache
def kept_by_pass(
    name: str, stages: int, micros: int, chunks: int, stage: int
) -> list[tuple[tuple[str, int], np.ndarray]]:
    """Return ((op, chunk), fullest states) for the passes of a stage, when these passes start.

    A row of the states has the microbatches by chunk whose activations the stage saves, then
    the microbatches whose inputs of W it saves.
    """
    schedule = find(name)
    # More microbatches than twice the fill of the pipeline change nothing.
    micros = micros if schedule.keeps_all else min(micros, 4 * stages)
    placement = Placement(stages, chunks, schedule.v_shaped)
    passes = [*whole(schedule.stream(stage, placement, micros, 1))]
    states = _kept(passes, chunks).reshape(1 + len(passes), -1)
    rows: dict[tuple[str, int], list[int]] = {}
    for number, (op, _, chunk) in enumerate(passes):
        rows.setdefault((op, chunk), []).append(number)
    return [(kind, _fullest(states[numbers])) for kind, numbers in rows.items()]


class StepModel:
    """Order of the passes of a schedule for given numbers of stages, microbatches and chunks."""

    def __init__(self, name: str, stages: int, micros: int, chunks: int) -> None:
        streams, self._placement = instruction_streams(name, stages, micros, chunks)
        self._streams = [[*whole(stream)] for stream in streams]

    @cached_property
    def peaks(self) -> list[list[FullMoment]]:
        """By stage, all FullMoments that no other one dominates."""
        return [self._full_moments(passes) for passes in self._streams]

    @property
    def most_in_flight(self) -> list[int]:
        """By stage, the largest number of microbatches in flight, over all chunks together."""
        return [max(sum(each.counts) for each in moments) for moments in self.peaks]

    def _full_moments(self, passes):
        counts = _kept(passes, self._placement.chunks).sum(1)
        backward = np.cumsum([0, *(op in ("B", "BW") for op, *_ in passes)])
        found = _fullest(np.column_stack([counts, backward > 0])).tolist()
        return [FullMoment(tuple(row), bool(sending)) for *row, sending in found]

    @cached_property
    def _order(self):
        """All passes in dependency order, and the last pass of every stage.

        A pass is (index of the previous pass on its stage, index of the pass that it needs from
        another stage, border between these, part and kind).
        """
        streams = [deque(passes) for passes in self._streams]
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
        """Return the pass of another stage that a pass needs, or None."""
        needs = self._placement.needs(stage, instruction)
        return next((need for need in needs if need[0] != stage), None)

    def _numbered(self, stage, instruction, need, numbers):
        part = self._placement.part(stage, instruction.chunk)
        kind = len(_KINDS) * part + _KINDS.index(instruction.op)
        if need is None:
            return _NOWHERE, 0, kind
        return numbers[need], min(part, self._placement.part(need[0], need[1].chunk)), kind

    def ends(self, costs: Sequence[Cost]) -> list[float]:
        """Return the end time in seconds of the last pass of each stage; `costs` has one per
        part."""
        seconds = [cost.seconds()[kind] for cost in costs for kind in _KINDS]
        messages, (passes, last) = [cost.comm for cost in costs], self._order
        ends = [0.0] * len(passes) + [-inf, 0.0]
        for number, (before, other, border, kind) in enumerate(passes):
            start, arrival = ends[before], ends[other] + messages[border]
            ends[number] = (start if start > arrival else arrival) + seconds[kind]
        return [ends[number] for number in last]


step_model = lru_cache(maxsize=1024)(StepModel)


def steady_ends(
    name: str, stages: int, micros: int, chunks: int, costs: Sequence[Cost]
) -> list[float]:
    """Return the ends of the passes for any number of microbatches by simulating a few of them.

    After the first rounds, every round takes the same time.  The result is exact if one stage is
    always busy, and within 2 % if message loops set the pace.
    """
    few = simulated_microbatches(name, stages, micros)
    ends = step_model(name, stages, few, chunks).ends(costs)
    if few == micros:
        return ends
    rounds = _ROUNDS * stages
    before = step_model(name, stages, few - rounds, chunks).ends(costs)
    more = (micros - few) / rounds
    return [end + more * (end - start) for end, start in zip(ends, before, strict=True)]


def simulated_microbatches(name: str, stages: int, micros: int) -> int:
    """Return the number of microbatches that `steady_ends` simulates.

    A schedule from a file has a fixed number of microbatches, and all of them are simulated.
    """
    few = micros - stages * max(0, micros // stages - _FILL - _ROUNDS)
    return micros if find(name).rule(name, stages, few) else few
