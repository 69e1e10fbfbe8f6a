"""Schedule simulator with an ideal clock: start and end times of each pass of each stage."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from hpc3d.pipeline.instruction import Instruction, Placement, whole

Row = list[tuple[float, float, Instruction]]


class Cost(NamedTuple):
    """Seconds of a microbatch in a full stage, all chunks together, and of a message.

    In a list with one Cost per part, the times are those of one part and of a message from it to
    the next part.
    """

    forward: float
    backward: float
    weight: float
    comm: float = 0.0

    def share(self, chunks: int) -> Cost:
        """Return the cost of one of `chunks` equal chunks."""
        forward, backward, weight = (seconds / chunks for seconds in self[:3])
        return Cost(forward, backward, weight, self.comm)

    def seconds(self) -> dict[str, float]:
        """Return the seconds of each pass; other operations take no time."""
        passes = {"F": self.forward, "B": self.backward, "W": self.weight}
        return {**passes, "BW": self.backward + self.weight}


def timeline(
    streams: Iterable[Iterable[Instruction]], placement: Placement, cost: Cost | Sequence[Cost]
) -> list[Row]:
    """Return (start, end, instruction) of each stage, in seconds from the start of the run.

    `cost` applies to all stages, or is a list with one Cost per part of the model.  The streams
    contain passes, and Reduce and Step, which take no time; a B without a W becomes BW.  An
    instruction starts when the previous one on its stage has ended and its inputs are available:
    results of its own stage at once, results of another stage after the message time of their
    border.  Sends never block.  Raises ValueError, with the original names of the instructions, if
    they deadlock.
    """
    return _Clock(streams, placement, cost).run()


def makespan(rows: Iterable[Row]) -> float:
    """Return the seconds from the first start to the last end over all stages."""
    return max(row[-1][1] for row in rows) - min(row[0][0] for row in rows)


def bubble(rows: Iterable[Row]) -> float:
    """Return (cost - m (T_F + T_B + T_W)) / cost: the idle fraction of the worst stage.

    `cost` is the longest time from the first start to the last end of a stage: arXiv:2401.10241,
    section 5.3.
    """
    cost = max(row[-1][1] - row[0][0] for row in rows)
    work = max(sum(end - start for start, end, _ in row) for row in rows)
    return (cost - work) / cost if cost else 0.0


def refuse_deadlock(stuck: dict[int, str]) -> None:
    """Raise ValueError if any stages are `stuck`; the values describe their positions."""
    if stuck:
        where = ", ".join(f"stage {stage} at {text}" for stage, text in sorted(stuck.items()))
        raise ValueError(f"deadlock: {where}; each stage waits for another; change the order")


class _Clock:
    """Simulate each stage until it needs a missing result, and resume it when the result exists.

    Every instruction is visited once when it is reached and once when its input arrives, so the
    time is linear in the number of instructions.
    """

    def __init__(self, streams, placement, cost):
        self.placement = placement
        if isinstance(cost, Cost):
            cost = [cost.share(placement.chunks)] * placement.parts
        self.messages = [each.comm for each in cost]  # by the part before the border
        self.seconds = {placement.location(part): each.seconds() for part, each in enumerate(cost)}
        self.given = [list(stream) for stream in streams]
        self.streams = [list(whole(stream)) for stream in self.given]
        self.rows: list[Row] = [[] for _ in self.streams]
        self.ends = {}  # (stage, pass) -> end time
        self.waiting = {}  # (stage, pass) -> stages waiting for it

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
        """Run a stage as far as possible; yield the stages that waited for its results."""
        row = self.rows[stage]
        clock = row[-1][1] if row else 0.0
        while len(row) < len(self.streams[stage]):
            instruction = self.streams[stage][len(row)]
            needs = self.placement.needs(stage, instruction)
            missing = [need for need in needs if need not in self.ends]
            if missing:
                self.waiting.setdefault(missing[0], []).append(stage)
                return
            location = stage, instruction.chunk
            start = max([clock, *(self._arrival(location, need) for need in needs)])
            clock = start + self.seconds[location].get(instruction.op, 0.0)
            row.append((start, clock, instruction))
            yield from self.finish(stage, instruction, clock)

    def _arrival(self, location, need):
        """Return the time when the result of a pass arrives at a (stage, chunk)."""
        stage, instruction = need
        if stage == location[0]:
            return self.ends[need]
        parts = self.placement.part(*location), self.placement.part(stage, instruction.chunk)
        return self.ends[need] + self.messages[min(parts)]

    def finish(self, stage, instruction, clock):
        done = (stage, instruction._replace(op=instruction.op[0]))
        self.ends[done] = clock
        return self.waiting.pop(done, [])
