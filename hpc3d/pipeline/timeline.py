"""Schedule simulator: ideal start and end times of each pass on each stage."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from hpc3d.pipeline.instruction import Instruction, Placement, paired, whole

Row = list[tuple[float, float, Instruction]]
_Kind = tuple[int, str, int]  # stage, operation and chunk of a pass


class Cost(NamedTuple):
    """Times in seconds of the passes of one microbatch, and of a message.

    A single Cost applies to all stages: its pass times are summed over the chunks of a stage, and
    `comm` is the time of a message between stages.  In a list with one Cost per model chunk, each
    Cost contains the pass times of its chunk and the time of a message to the next chunk.
    """

    forward: float
    backward: float
    weight: float
    comm: float = 0.0

    def share(self, chunks: int) -> Cost:
        """Return the Cost of one chunk if the stage has `chunks` equal chunks."""
        forward, backward, weight = (seconds / chunks for seconds in self[:3])
        return Cost(forward, backward, weight, self.comm)

    def seconds(self) -> dict[str, float]:
        """Return a dict that maps each pass (F, B, W, BW) to its duration in seconds."""
        passes = {"F": self.forward, "B": self.backward, "W": self.weight}
        return {**passes, "BW": self.backward + self.weight}


def timeline(
    streams: Iterable[Iterable[Instruction]],
    placement: Placement,
    cost: Cost | Sequence[Cost],
    pairs: bool = False,
) -> list[Row]:
    """Simulate a schedule; return a list of (start, end, instruction) for each stage.

    Times are in seconds from the start of the run.  `cost` applies to all stages, or is a list
    with one Cost per model chunk.  The streams contain passes, Reduce and Step; Reduce and Step
    take no time.  A B without a W becomes BW.  An instruction starts when the previous one on its
    stage has ended and its inputs are available: results of the same stage immediately, results of
    another stage after the message time of the stage boundary.  Sends never block.  If `pairs` is
    true, adjacent passes that form a pair (see `is_pair`) start together and end together, after
    the sum of their durations.  Raises ValueError if the instructions deadlock; the message names
    them as given in the streams.
    """
    return _Clock(streams, placement, cost, pairs).run()


def makespan(rows: Iterable[Row]) -> float:
    """Return the makespan: the time in seconds from the first start to the last end."""
    return max(row[-1][1] for row in rows) - min(row[0][0] for row in rows)


def bubble(rows: Iterable[Row]) -> float:
    """Return the bubble rate (cost - work) / cost, as defined in arXiv:2401.10241, section 5.3.

    `cost` is the maximum over stages of the time from the first start to the last end on the
    stage, and `work` the maximum over stages of the total duration of the stage's passes.
    """
    cost = max(row[-1][1] - row[0][0] for row in rows)
    work = max(sum(end - start for start, end, _ in row) for row in rows)
    return (cost - work) / cost if cost else 0.0


def refuse_deadlock(stuck: dict[int, str]) -> None:
    """Raise ValueError if any stage is blocked.

    `stuck` maps each blocked stage to the instruction at which it is blocked.
    """
    if stuck:
        where = ", ".join(f"stage {stage} at {text}" for stage, text in sorted(stuck.items()))
        raise ValueError(
            f"deadlock: {where} cannot proceed; reorder the instructions of the schedule"
        )


class _Clock:
    """Event-driven simulator: a stage runs until an input is missing, and resumes when it arrives.

    An instruction is visited when it is reached and again when a missing input arrives, so the
    run time is linear in the number of instructions.
    """

    def __init__(self, streams, placement, cost, pairs):
        self.placement = placement
        if isinstance(cost, Cost):
            cost = [cost.share(placement.chunks)] * placement.parts
        self.messages = [each.comm for each in cost]  # indexed by the chunk before the boundary
        self.seconds = {placement.location(part): each.seconds() for part, each in enumerate(cost)}
        self.given = [list(stream) for stream in streams]
        self.streams = [whole(stream) for stream in self.given]
        self.units = [[*(paired(each) if pairs else zip(each))] for each in self.streams]
        self.done = [0] * len(self.streams)  # number of completed units of each stage
        self.rows: list[Row] = [[] for _ in self.streams]
        # Maps each kind of pass (stage, op, chunk) to the end times by microbatch, and to the
        # result of `_kind`. `waiting` maps (kind, microbatch) to the stages that wait for it.
        self.ends: dict[_Kind, dict[int, float]] = defaultdict(dict)
        self.kinds: dict[_Kind, tuple[float, _Kind, list]] = {}
        self.waiting: dict[tuple[_Kind, int], list[int]] = {}

    def run(self):
        ready = list(range(len(self.streams)))
        while ready:
            ready += self.advance(ready.pop())
        refuse_deadlock(
            {
                stage: str(stream[len(row)])
                for stage, (stream, row) in enumerate(zip(self.given, self.rows))
                if len(row) < len(stream)
            }
        )
        return self.rows

    def advance(self, stage) -> Iterator[int]:
        """Simulate a stage until an input is missing; yield the stages that it has unblocked."""
        row, units = self.rows[stage], self.units[stage]
        clock = row[-1][1] if row else 0.0
        while self.done[stage] < len(units):
            unit, start, total = units[self.done[stage]], clock, 0.0
            kinds = [self._kind(stage, op, chunk) for op, _, chunk in unit]
            for (_, mb, _), (seconds, _, inputs) in zip(unit, kinds, strict=True):
                total += seconds
                for kind, ends, delay in inputs:
                    if mb not in ends:
                        self.waiting.setdefault((kind, mb), []).append(stage)
                        return
                    start = max(start, ends[mb] + delay)
            clock = start + total
            self.done[stage] += 1
            for instruction, (_, done, _) in zip(unit, kinds, strict=True):
                row.append((start, clock, instruction))
                self.ends[done][instruction.mb] = clock
                yield from self.waiting.pop((done, instruction.mb), [])

    def _kind(self, stage, op, chunk):
        """Return the duration of a pass, the kind of its result, and its inputs.

        An input is a kind of pass, its end times and the message time. These values are the same
        for all microbatches.
        """
        kind = stage, op, chunk
        if kind not in self.kinds:
            inputs, placement = [], self.placement
            for where, need in placement.needs(stage, Instruction(op, 0, chunk)):
                parts = placement.part(stage, chunk), placement.part(where, need.chunk)
                delay = 0 if where == stage else self.messages[min(parts)]
                each = where, need.op, need.chunk
                inputs.append((each, self.ends[each], delay))
            seconds = self.seconds[stage, chunk].get(op, 0.0)
            self.kinds[kind] = seconds, (stage, op[0], chunk), inputs
        return self.kinds[kind]
