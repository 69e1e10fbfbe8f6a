"""A schedule on an ideal clock: when each pass of each stage starts and ends."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from hpc3d.pipeline.instruction import Instruction, Placement, whole

Row = list[tuple[float, float, Instruction]]


class Cost(NamedTuple):
    """Seconds of a microbatch in a whole stage, all chunks together, and of a message; or in one
    part of the model, and of a message between that and the next part."""

    forward: float
    backward: float
    weight: float
    comm: float = 0.0

    def share(self, chunks: int) -> Cost:
        """That of one of `chunks` equal chunks."""
        forward, backward, weight = (seconds / chunks for seconds in self[:3])
        return Cost(forward, backward, weight, self.comm)

    def seconds(self) -> dict[str, float]:
        """Those of each operation; others take none."""
        passes = {"F": self.forward, "B": self.backward, "W": self.weight}
        return {**passes, "BW": self.backward + self.weight}


def timeline(
    streams: Iterable[Iterable[Instruction]], placement: Placement, cost: Cost | Sequence[Cost]
) -> list[Row]:
    """(start, end, instruction) of each stage, in seconds from the start of the run.

    `cost` is that of all stages, or a list has one for each part of the model.  The streams hold
    passes, and Reduce and Step, which take no time; a B that has no W comes out as BW.  An
    instruction starts when the one before it on its stage has ended and its inputs are there:
    results of its own stage at once, those of another after the time of a message over their
    border.  Sends never block.  Raises ValueError, with instructions as the streams name them, if
    these wait for each other.
    """
    return _Clock(streams, placement, cost).run()


def makespan(rows: Iterable[Row]) -> float:
    """Seconds from the first start to the last end of all stages."""
    return max(row[-1][1] for row in rows) - min(row[0][0] for row in rows)


def bubble(rows: Iterable[Row]) -> float:
    """(cost - m (T_F + T_B + T_W)) / cost: the share of its time that the worst stage waits.

    `cost` is the longest time from the first start to the last end of a stage: arXiv:2401.10241,
    section 5.3.
    """
    cost = max(row[-1][1] - row[0][0] for row in rows)
    work = max(sum(end - start for start, end, _ in row) for row in rows)
    return (cost - work) / cost if cost else 0.0


def refuse_deadlock(stuck: dict[int, str]) -> None:
    """Raise ValueError if there are stages that are `stuck`, at the text given for each."""
    if stuck:
        where = ", ".join(f"stage {stage} at {text}" for stage, text in sorted(stuck.items()))
        raise ValueError(f"deadlock: {where}; each waits for another: change their order")


class _Clock:
    """Stages that run until they need a result that is not there, and go on when it is.

    Every instruction is looked at once when it is reached and once when its input comes, so the
    time is linear in their number.
    """

    def __init__(self, streams, placement, cost):
        self.placement = placement
        if isinstance(cost, Cost):
            cost = [cost.share(placement.chunks)] * placement.parts
        self.messages = [each.comm for each in cost]  # by the part before the border
        self.seconds = {placement.place(part): each.seconds() for part, each in enumerate(cost)}
        self.given = [list(stream) for stream in streams]
        self.streams = [list(whole(stream)) for stream in self.given]
        self.rows: list[Row] = [[] for _ in self.streams]
        self.ends = {}  # (stage, pass) -> when it ended
        self.waiting = {}  # (stage, pass) -> the stages that wait for it

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
        """Run a stage as far as it goes; yields the stages that wait for what it has done."""
        row = self.rows[stage]
        clock = row[-1][1] if row else 0.0
        while len(row) < len(self.streams[stage]):
            instruction = self.streams[stage][len(row)]
            needs = self.placement.needs(stage, instruction)
            missing = [need for need in needs if need not in self.ends]
            if missing:
                self.waiting.setdefault(missing[0], []).append(stage)
                return
            place = stage, instruction.chunk
            start = max([clock, *(self._arrival(place, need) for need in needs)])
            clock = start + self.seconds[place].get(instruction.op, 0.0)
            row.append((start, clock, instruction))
            yield from self.finish(stage, instruction, clock)

    def _arrival(self, place, need):
        """When the result of a pass is at a (stage, chunk)."""
        stage, instruction = need
        if stage == place[0]:
            return self.ends[need]
        parts = self.placement.part(*place), self.placement.part(stage, instruction.chunk)
        return self.ends[need] + self.messages[min(parts)]

    def finish(self, stage, instruction, clock):
        done = (stage, instruction._replace(op=instruction.op[0]))
        self.ends[done] = clock
        return self.waiting.pop(done, [])
