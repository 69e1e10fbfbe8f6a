"""Instructions of pipeline stages, and the placement of the model's parts on stages."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import NamedTuple

COMPUTE = ("F", "B", "W", "BW")
# Message -> (the peer's name for it, distance to the peer in parts).
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

    F is a forward pass, B the gradient of its input, W the gradient of its weights, and BW both in
    one.  RecvF and SendF transfer an activation, RecvB and SendB its gradient.  Reduce sums the
    gradients of a chunk over the data axis, and Step is the optimizer update.  As text, a chunk
    other than 0 comes first: F3, 1B0, Reduce, 1Reduce, Step.
    """

    op: str
    mb: int = -1
    chunk: int = 0

    def __str__(self) -> str:
        return f"{self.chunk or ''}{self.op}{'' if self.mb < 0 else self.mb}"


def parse(text: str) -> Instruction:
    """Return the instruction that `text` describes; raise ValueError if it is invalid."""
    written = _WRITTEN.fullmatch(text)
    chunk, op, mb = written.groups() if written else ("", "", "")
    numbered = op not in ("Reduce", "Step")
    if not written or numbered != bool(mb) or (op == "Step" and chunk):
        raise ValueError(
            f"{text!r} is not an instruction; write an operation and a microbatch, as in F0 or "
            "B12, preceded by the chunk unless it is 0, as in 1F0"
        )
    return Instruction(op, int(mb or -1), int(chunk or 0))


def from_pattern(pattern: Iterable[str]) -> Iterator[Instruction]:
    """Yield the stream of a pattern of letters: F, B, W for chunk 0, small letters for chunk 1.

    Each letter gets its microbatches in order: "FFBFB" is F0 F1 B0 F2 B1.
    """
    count: Counter[str] = Counter()
    for letter in pattern:
        yield Instruction(letter.upper(), count[letter], int(letter.islower()))
        count[letter] += 1


def whole(stream: Iterable[Instruction]) -> Iterator[Instruction]:
    """Yield the stream with BW for each B without a W: such a B is the full backward pass."""
    stream = list(stream)
    split = {(mb, chunk) for op, mb, chunk in stream if op == "W"}
    for instruction in stream:
        op, mb, chunk = instruction
        is_whole = op == "B" and (mb, chunk) not in split
        yield Instruction("BW", mb, chunk) if is_whole else instruction


class Placement(NamedTuple):
    """Mapping between the parts of the model and the chunks of the stages.

    A part is a segment of the model in model order: part 0 has the embedding, the last the head.
    Chunk by chunk, the parts are placed on the stages from first to last,

        stage 0: 0 4    1: 1 5    2: 2 6    3: 3 7        (stages=4, chunks=2)

    or, with `v_shaped` and two chunks, from first to last and back, so that stage 0 has both the
    embedding and the head:

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

    def parts_of(self, stage: int) -> list[int]:
        """Return the parts of a stage by chunk."""
        return [self.part(stage, chunk) for chunk in range(self.chunks)]

    def location(self, part: int) -> tuple[int, int]:
        """Return the (stage, chunk) of a part."""
        chunk, stage = divmod(part, self.stages)
        return (self.parts - 1 - part if self.v_shaped and chunk == 1 else stage), chunk

    def first(self, stage: int, chunk: int) -> bool:
        return self.part(stage, chunk) == 0

    def last(self, stage: int, chunk: int) -> bool:
        return self.part(stage, chunk) == self.parts - 1

    def neighbor(self, stage: int, chunk: int, further: int) -> tuple[int, int] | None:
        """Return the (stage, chunk) of the part `further` parts away in model order, or None."""
        part = self.part(stage, chunk) + further
        return self.location(part) if 0 <= part < self.parts else None

    def other(self, stage: int, instruction: Instruction) -> tuple[int, Instruction]:
        """Return the peer stage of a message, and the peer's name for the message.

        Raises ValueError if there is no such part (before the first part or after the last one),
        or if both parts are on one stage."""
        op, further = MESSAGES[instruction.op]
        place = self.neighbor(stage, instruction.chunk, further)
        if place is None or place[0] == stage:
            raise ValueError(
                f"stage {stage}: {instruction}: no other stage has the matching message"
            )
        return place[0], Instruction(op, instruction.mb, place[1])

    def needs(self, stage: int, instruction: Instruction) -> list[tuple[int, Instruction]]:
        """Return the passes, each with its stage, whose results a pass needs.

        F needs F of the previous part.  B and BW need B of the next part and their own F.  W needs
        its own B.  A BW satisfies the need for a B.
        """
        op, mb, chunk = instruction
        if op == "W":
            return [(stage, Instruction("B", mb, chunk))]
        if op not in COMPUTE:
            return []
        own = [] if op == "F" else [(stage, Instruction("F", mb, chunk))]
        location = self.neighbor(stage, chunk, -1 if op == "F" else 1)
        return [*own, (location[0], Instruction(op[0], mb, location[1]))] if location else own
