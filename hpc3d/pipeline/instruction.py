"""What the stages of a pipeline do, one instruction after the other, and where their parts lie."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import NamedTuple

COMPUTE = ("F", "B", "W", "BW")
# A message, the same message as its peer names it, and how many parts further that peer is.
MESSAGES = {
    "SendF": ("RecvF", +1),
    "RecvF": ("SendF", -1),
    "SendB": ("RecvB", -1),
    "RecvB": ("SendB", +1),
}
_WRITTEN = re.compile(
    rf"([0-9]{{0,9}})({'|'.join([*COMPUTE, *MESSAGES])}|Reduce|Step)([0-9]{{0,9}})"
)


class Instruction(NamedTuple):
    """One operation of a stage on microbatch `mb` (-1: on none) of model chunk `chunk`.

    F is a forward pass, B the gradient of its input, W that of its weights, BW both in one.  RecvF
    and SendF move an activation, RecvB and SendB its gradient.  Reduce sums the gradients of a
    chunk over the data axis, Step is the optimiser.  Text puts a chunk other than 0 in front:
    F3, 1B0, Reduce, 1Reduce, Step.
    """

    op: str
    mb: int = -1
    chunk: int = 0

    def __str__(self) -> str:
        return f"{self.chunk or ''}{self.op}{'' if self.mb < 0 else self.mb}"


def parse(text: str) -> Instruction:
    """The instruction that is written as `text`; raises ValueError if none is."""
    written = _WRITTEN.fullmatch(text)
    chunk, op, mb = written.groups() if written else ("", "", "")
    numbered = op not in ("Reduce", "Step")
    if not written or numbered != bool(mb) or (op == "Step" and chunk):
        raise ValueError(
            f"{text!r} is no instruction: write an operation and a microbatch, as in F0 or B12, "
            "and the chunk in front of it if there are several, as in 1F0"
        )
    return Instruction(op, int(mb or -1), int(chunk or 0))


def from_pattern(pattern: Iterable[str]) -> Iterator[Instruction]:
    """A stream from its pattern of letters: F, B, W of chunk 0, small letters for chunk 1.

    Each letter takes its microbatches in order: "FFBFB" is F0 F1 B0 F2 B1.
    """
    count: Counter[str] = Counter()
    for letter in pattern:
        yield Instruction(letter.upper(), count[letter], int(letter.islower()))
        count[letter] += 1


def whole(stream: Iterable[Instruction]) -> Iterator[Instruction]:
    """The stream with BW for each B that has no W: such a B is the whole backward pass."""
    stream = list(stream)
    split = {(mb, chunk) for op, mb, chunk in stream if op == "W"}
    for instruction in stream:
        op, mb, chunk = instruction
        is_whole = op == "B" and (mb, chunk) not in split
        yield Instruction("BW", mb, chunk) if is_whole else instruction


class Placement(NamedTuple):
    """Which part of the model is which chunk of which stage.

    A part is a piece of the model in model order: part 0 has the embedding, the last the head.
    The parts go down the stages again for each chunk,

        stage 0: 0 4    1: 1 5    2: 2 6    3: 3 7        (stages=4, chunks=2)

    or with `v_shaped`, of two chunks, down and back up, so that stage 0 has both ends of the
    model:

        stage 0: 0 7    1: 1 6    2: 2 5    3: 3 4
    """

    stages: int
    chunks: int
    v_shaped: bool = False

    @property
    def parts(self) -> int:
        return self.stages * self.chunks

    def part(self, stage: int, chunk: int) -> int:
        if self.v_shaped and chunk == 1:
            return self.parts - 1 - stage
        return chunk * self.stages + stage

    def place(self, part: int) -> tuple[int, int]:
        """The (stage, chunk) of a part."""
        chunk, stage = divmod(part, self.stages)
        return (self.parts - 1 - part if self.v_shaped and chunk == 1 else stage), chunk

    def first(self, stage: int, chunk: int) -> bool:
        return self.part(stage, chunk) == 0

    def last(self, stage: int, chunk: int) -> bool:
        return self.part(stage, chunk) == self.parts - 1

    def neighbour(self, stage: int, chunk: int, further: int) -> tuple[int, int] | None:
        """The (stage, chunk) of the part that is `further` in model order; None at its ends."""
        part = self.part(stage, chunk) + further
        return self.place(part) if 0 <= part < self.parts else None

    def other(self, stage: int, instruction: Instruction) -> tuple[int, Instruction]:
        """The stage at the other end of a message, and the message as that stage names it.

        Raises ValueError where there is no such part: before the first part, after the last one,
        and between two parts on one stage."""
        op, further = MESSAGES[instruction.op]
        place = self.neighbour(stage, instruction.chunk, further)
        if place is None or place[0] == stage:
            raise ValueError(f"stage {stage}: {instruction}: no other stage has the other end")
        return place[0], Instruction(op, instruction.mb, place[1])

    def needs(self, stage: int, instruction: Instruction) -> list[tuple[int, Instruction]]:
        """The passes, each with its stage, whose results a pass works on.

        F needs F of the part before; B and BW need B of the part after, and their own F; W needs
        its own B.  Where a B is named, a BW is as good.
        """
        op, mb, chunk = instruction
        if op == "W":
            return [(stage, Instruction("B", mb, chunk))]
        if op not in COMPUTE:
            return []
        own = [] if op == "F" else [(stage, Instruction("F", mb, chunk))]
        place = self.neighbour(stage, chunk, -1 if op == "F" else 1)
        return [*own, (place[0], Instruction(op[0], mb, place[1]))] if place else own
