"""Model of a pipeline schedule: step time and memory, given the costs of each model chunk.

Planners use this module to predict the time of a step's passes and gradient reductions, and the
memory of each stage.  The order of the passes depends only on the schedule and its sizes, so it is
computed once and reused for thousands of sets of costs.  hpc3d.pipeline.timeline is the reference
implementation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise
from math import inf
from typing import NamedTuple

import numpy as np

from hpc3d.pipeline.instruction import COMPUTE, Instruction, Placement, paired, whole
from hpc3d.pipeline.schedule import find, gpipe, instruction_streams, interleaved, one_f_one_b
from hpc3d.pipeline.timeline import Cost
from hpc3d.pipeline.zero_bubble import zb_h1, zb_h2, zb_v

# Sentinels for the index of a pass: _NOWHERE if the input does not come from another
# stage, and _START if there is no earlier pass on the stage.
_NOWHERE, _START = -2, -1
PAIR = "F+BW"  # a forward and a backward pass that run as a pair
# Numbers of simulated microbatches per stage. The first number is enough to reach the steady
# state of a schedule, and the second one to measure its period.
_FILL, _ROUNDS = 4, 4
# For each kind of pass: the changes in the number of microbatches with saved activations, and in
# the number of microbatches with saved inputs of W.
_KEPT = {"F": (1, 0), "B": (-1, 1), "W": (0, -1), "BW": (-1, 0)}


class InFlight(NamedTuple):
    """Peak numbers of (microbatch, chunk) pairs for which a stage has saved data.

    `activations` counts the pairs with saved activations, from F to the end of B or BW.
    `weight_inputs` counts the pairs with saved inputs and output gradients of the matrix products
    in W, from the end of B to the end of W.
    """

    activations: int
    weight_inputs: int


def in_flight(stream: Iterable[Instruction]) -> InFlight:
    """Return the peak numbers of microbatches with saved data during a stream of passes."""
    return InFlight(*_kept(whole(stream), 1).max((0, 2)).tolist())


def _kept(passes: Sequence[Instruction], chunks: int) -> np.ndarray:
    """Count the microbatches with saved data on a stage, before each pass and after the last one.

    Returns an array of shape [1 + passes, 2, chunks].  The second axis distinguishes activations
    from the inputs of W.  If `chunks` is 1, the counts are summed over all chunks.
    """
    changes = np.zeros((1 + len(passes), 2, chunks), int)
    columns = [chunk % chunks for _, _, chunk in passes]
    kept = [_KEPT.get(op, (0, 0)) for op, *_ in passes]
    changes[range(1, 1 + len(passes)), :, columns] = np.reshape(kept, (-1, 2))
    return changes.cumsum(0)


def _fullest(states: np.ndarray) -> np.ndarray:
    """Return the Pareto-maximal rows: those that no other row equals or exceeds in every
    column."""
    states = np.array(sorted({*map(tuple, states.tolist())}))
    # A few rows at a time are compared with all rows, to limit the memory.
    kept = [
        (states >= states[first : first + 64, None]).all(2).sum(1) == 1
        for first in range(0, len(states), 64)
    ]
    return states[np.concatenate(kept)]


def _kind(part: int, op: str) -> int:
    """Return the combined index of a model chunk and a kind of pass."""
    return len(COMPUTE) * part + COMPUTE.index(op)


class StageTimes(NamedTuple):
    """Pass times of one microbatch on each stage, and the time of one message, in seconds.

    Pass times are summed over the chunks of a stage.  `weight` is 0 if the backward pass is not
    split.
    """

    forward: Sequence[float]
    backward: Sequence[float]
    weight: Sequence[float]
    message: float = 0.0

    def work(self) -> list[float]:
        """Return the compute time per microbatch on each stage, in seconds."""
        return [sum(passes) for passes in zip(*self[:3])]

    def longest(self) -> int:
        """Return the index of the slowest stage."""
        work = self.work()
        return max(range(len(work)), key=work.__getitem__)


class StepModel:
    """Performance model of a schedule for given numbers of stages, microbatches and chunks."""

    def __init__(self, name: str, stages: int, micros: int, chunks: int) -> None:
        self.schedule = find(name)
        self.stages, self.micros, self.chunks = stages, micros, chunks
        self.placement = Placement(stages, chunks, self.schedule.v_shaped)
        self._known: dict[tuple[int, bool], tuple[list[tuple[str, int]], np.ndarray]] = {}

    @cached_property
    def messages(self) -> list[int]:
        """Number of messages per pass that each model chunk exchanges with other stages.

        Adjacent model chunks on the same stage exchange no messages.
        """
        stages = [self.placement.location(part)[0] for part in range(self.placement.parts)]
        borders = [int(one != other) for one, other in pairwise(stages)]
        return [before + after for before, after in zip([0, *borders], [*borders, 0])]

    @cached_property
    def most_in_flight(self) -> list[int]:
        """Peak number of microbatches in flight on each stage, summed over its chunks."""
        return [int(_kept(passes, 1).sum(1).max()) for passes in self._streams]

    def held(
        self,
        stage: int,
        saved: Sequence[float],
        weight_inputs: Sequence[float],
        gradient: float = 0.0,
        pairs: bool = False,
    ) -> list[tuple[tuple[str, int], float]]:
        """Return the number of bytes saved on a stage when its memory use may peak.

        Parameters
        ----------
        saved, weight_inputs : sequence of float
            Bytes per microbatch for each chunk, saved from F to the end of B or BW, and from the
            end of B to the end of W, respectively.
        gradient : float
            Bytes of an input gradient, which may still be in flight to the previous stage after
            the first backward pass.
        pairs : bool
            True if adjacent forward and backward passes run in pairs (`instruction.is_pair`).

        Returns
        -------
        list
            Pairs ((op, chunk) of a pass, bytes).  Only passes at whose start the memory use may
            peak are included.  For two passes that run as a pair, `op` is PAIR, and `chunk` is
            that of the forward pass.
        """
        kinds, states = self._fullest_moments(stage, pairs)
        nbytes = states @ np.array([*saved, *weight_inputs, gradient])
        return [*zip(kinds, nbytes.tolist(), strict=True)]

    def _fullest_moments(self, stage, pairs):
        """Return the passes, as (op, chunk) pairs, before which memory use may peak.

        Also returns an array with the numbers of blocks that are saved at the start of each of
        these passes; `held` multiplies these numbers by the block sizes in bytes.
        """
        # If a schedule does not run all forward passes first, its memory use peaks within the
        # first 4 * stages microbatches.
        most = 4 * self.stages
        if self.micros > most and not self.schedule.keeps_all:
            return self._of(most)._fullest_moments(stage, pairs)
        if (stage, pairs) not in self._known:
            self._known[stage, pairs] = self._moments_of(stage, pairs)
        return self._known[stage, pairs]

    def _moments_of(self, stage, pairs):
        passes = whole(self.schedule.stream(stage, self.placement, self.micros, 1))
        states = _kept(passes, self.chunks).reshape(1 + len(passes), -1)
        backward = np.cumsum([0, *(op in ("B", "BW") for op, *_ in passes)]) > 0
        states = np.column_stack([states, backward])
        rows: dict[tuple[str, int], list[int]] = {}
        groups = [*(paired(passes) if pairs else zip(passes))]
        for group, number in zip(groups, accumulate(map(len, groups), initial=0)):
            op, _, chunk = group[0]
            rows.setdefault((PAIR if group[1:] else op, chunk), []).append(number)
        fullest = {kind: _fullest(states[numbers]) for kind, numbers in rows.items()}
        kinds = [kind for kind, found in fullest.items() for _ in found]
        return kinds, np.concatenate([*fullest.values()])

    @cached_property
    def _streams(self):
        name = self.schedule.name
        streams, _ = instruction_streams(name, self.stages, self.micros, self.chunks)
        return [whole(stream) for stream in streams]

    @cached_property
    def _order(self):
        """All passes in dependency order, and the index of each stage's last pass.

        A pass is represented by four indices: the previous pass on the same stage, the pass on
        another stage that produces its input, the boundary between the two model chunks, and a
        combined index of model chunk and kind of pass.
        """
        streams, done = self._streams, [0] * self.stages
        lengths = [*map(len, streams)]
        kinds = [*map(self._kinds_on, range(self.stages))]
        numbers: dict[tuple[int | None, int], int] = {}
        waiting: dict[tuple[int | None, int], int] = {}
        found: list[tuple[int, int, int, int]] = []
        last, ready, number = [_START] * self.stages, [*range(self.stages)], 0
        while ready:
            stage = ready.pop()
            while done[stage] < lengths[stage]:
                op, mb, chunk = streams[stage][done[stage]]
                kind, result, need, border = kinds[stage][op, chunk]
                if need is not None and (need, mb) not in numbers:
                    waiting[need, mb] = stage
                    break
                other = _NOWHERE if need is None else numbers[need, mb]
                found.append((last[stage], other, border, kind))
                last[stage] = numbers[result, mb] = number
                done[stage], number = done[stage] + 1, number + 1
                if (result, mb) in waiting:
                    ready.append(waiting.pop((result, mb)))
        return found, last

    def _kinds_on(self, stage):
        """Return a dict from each (op, chunk) on a stage to four indices.

        The indices are the combined index of model chunk and kind of pass, that of its result (BW
        counts as B), that of its input from another stage, or None, and the boundary between the
        two model chunks.
        """
        found = {}
        for chunk, part in enumerate(self.placement.parts_of(stage)):
            for op in COMPUTE:
                needs = self.placement.needs(stage, Instruction(op, 0, chunk))
                others = [
                    (self.placement.part(where, need.chunk), need.op)
                    for where, need in needs
                    if where != stage
                ]
                need = _kind(*others[0]) if others else None
                border = min(part, others[0][0]) if others else 0
                found[op, chunk] = _kind(part, op), _kind(part, op[0]), need, border
        return found

    def ends(self, costs: Sequence[Cost]) -> list[float]:
        """Return the end time of the last pass of each stage, in seconds.

        `costs` has one Cost per model chunk.
        """
        durations = [cost.seconds() for cost in costs]
        seconds = [each[op] for each in durations for op in COMPUTE]
        messages, (passes, last) = [cost.comm for cost in costs], self._order
        ends = [0.0] * len(passes) + [-inf, 0.0]
        for number, (before, other, border, kind) in enumerate(passes):
            start, arrival = ends[before], ends[other] + messages[border]
            ends[number] = (start if start > arrival else arrival) + seconds[kind]
        return [ends[number] for number in last]

    @property
    def simulated_microbatches(self) -> int:
        """Number of microbatches that `steady_ends` simulates.

        A schedule that supports only a fixed number of microbatches, such as a schedule from a
        file, is simulated with all microbatches.
        """
        few = self.micros - self.stages * max(0, self.micros // self.stages - _FILL - _ROUNDS)
        return self.micros if self.schedule.rule(self.schedule.name, self.stages, few) else few

    def steady_ends(self, costs: Sequence[Cost]) -> list[float]:
        """Estimate the result of `ends` by extrapolation from a few simulated microbatches.

        In the steady state, every round of microbatches takes the same time.  The result is exact
        if one stage is always busy.  If round trips of messages between stages limit the
        throughput, the error is at most 2 %.
        """
        few, rounds = self.simulated_microbatches, _ROUNDS * self.stages
        ends = self._of(few).ends(costs)
        if few == self.micros:
            return ends
        before, more = self._of(few - rounds).ends(costs), (self.micros - few) / rounds
        return [end + more * (end - start) for end, start in zip(ends, before, strict=True)]

    def _of(self, micros):
        return step_model(self.schedule.name, self.stages, micros, self.chunks)

    def seconds(self, times: StageTimes) -> float:
        """Return the makespan of a step's passes in seconds.

        A closed form is used if the schedule has one, because planning is slower with simulations
        only (by a fifth for a model with 175 B parameters on 1,024 ranks).
        """
        if self.stages == 1:
            return self.micros * sum(times.work())
        if closed_form := _CLOSED_FORMS.get(self.schedule.generate):
            return closed_form(self, times)
        stages = [Cost(*each, times.message).share(self.chunks) for each in zip(*times[:3])]
        locations = map(self.placement.location, range(self.placement.parts))
        return max(self.steady_ends([stages[stage] for stage, _ in locations]))


step_model = lru_cache(maxsize=4096)(StepModel)


def reduced(
    ends: Sequence[float],
    seconds: Sequence[float],
    shared: Iterable[tuple[Iterable[int], float]] = (),
) -> list[float]:
    """Return the time at which each stage's gradient reductions end, in seconds.

    `ends` lists the end time of each stage's passes, and `seconds` the duration of its own
    reductions.  `shared` contains a (stages, seconds) pair for each subsequent reduction across
    stages, which starts when all of these stages are ready.
    """
    found = [end + each for end, each in zip(ends, seconds, strict=True)]
    for stages, more in shared:
        start = max(found[stage] for stage in stages)
        for stage in stages:
            found[stage] = start + more
    return found


# Closed forms of `StepModel.seconds` for two or more stages.  They equal the result of the
# schedule simulator if all stages have the same work.  If one stage has more work, such as the
# stage with the head, the other stages wait for it.  The slowest stage is idle only until the
# first microbatch arrives, after its last backward pass, and during exposed messages.  The
# docstrings in hpc3d.pipeline.schedule state the bubble of each schedule.


def _busy_and_fill(model, times):
    """Return two compute times in seconds.

    The first is the time of a step on the slowest stage, and the second the total time of one
    microbatch on all other stages.
    """
    work, longest = times.work(), times.longest()
    return model.micros * work[longest], sum(work) - work[longest]


def _all_forward_first(model, times):
    """Return the step time of GPipe, based on the longest forward and backward passes."""
    _, fill = _busy_and_fill(model, times)
    paces = max(times.forward) + max(times.backward)
    return model.micros * paces + fill + 2 * (model.stages - 1) * times.message


def _alternating(model, times):
    """Return the step time of 1F1B: m periods, plus the pipeline fill and exposed messages.

    The period is the time per microbatch of the slowest stage or the slowest loop of messages.  A
    loop consists of the last k stages and the messages between them in both directions, with k
    microbatches in flight; k is at most m, the number of microbatches per step.
    """
    micros, message = model.micros, times.message
    _, fill = _busy_and_fill(model, times)
    tail, period = 0.0, 0.0
    for loop, seconds in enumerate(reversed(times.work()[-micros:]), 1):
        tail += seconds
        period = max(period, seconds, (tail + 2 * (loop - 1) * message) / loop)
    return micros * period + fill + 2 * (model.stages - min(micros, 2)) * message


def _interleaved(model, times):
    """Return the step time of interleaved 1F1B, which divides the fill time by the number of
    chunks per stage."""
    busy, fill = _busy_and_fill(model, times)
    messages = 2 * (model.chunks * model.stages - 1)
    return busy + fill / model.chunks + messages * times.message


def _late_weights(model, times):
    """Return the step time of ZB-H1 or ZB-H2, in which deferred W passes fill the drain."""
    late, micros, count = model.schedule.late_weights, model.micros, model.stages
    busy, _ = _busy_and_fill(model, times)
    ahead, back, slack = _ways(model, times)
    weight = times.weight[times.longest()]
    drain = max(0.0, back - min(micros - 1, late * (count - 1)) * weight)
    # In ZB-H1, which has half as many warm-up passes as ZB-H2, stages wait for messages in every
    # round.
    loops = min(1, (micros - 1) / (count - 1)) if late == 1 else 0
    shown = times.message + loops * max(0.0, times.message - slack)
    return busy + ahead + drain + 2 * (count - 1) * shown


def _down_and_up(model, times):
    """Return the step time of ZB-V, which has no bubble in the ideal case if m >= 2p-1."""
    micros, count = model.micros, model.stages
    busy, _ = _busy_and_fill(model, times)
    ahead, back, slack = _ways(model, times)
    weight = times.weight[times.longest()]
    missing = max(0, 2 * count - 1 - micros) / (2 * count - 2)
    filled, left = max(ahead, back) / 2, ahead + back - (micros - 1) * weight
    bubble = max(filled, left) - missing * (count - 1) * slack
    shown = (5 * count - 7 + missing * (3 - count)) * times.message
    return busy + (max(0.0, bubble) + shown)


def _ways(model, times):
    """Return the forward time, the backward time and the slack per microbatch, in seconds.

    The forward and backward times are summed over all stages except the slowest one.  The slack is
    the work of the slowest stage minus the mean work of the other stages.
    """
    work, longest = times.work(), times.longest()
    ahead, back = (sum(each) - each[longest] for each in times[:2])
    return ahead, back, work[longest] - (sum(work) - work[longest]) / (model.stages - 1)


_CLOSED_FORMS: dict[Callable, Callable[[StepModel, StageTimes], float]] = {
    gpipe: _all_forward_first,
    one_f_one_b: _alternating,
    interleaved: _interleaved,
    zb_h1: _late_weights,
    zb_h2: _late_weights,
    zb_v: _down_and_up,
}
