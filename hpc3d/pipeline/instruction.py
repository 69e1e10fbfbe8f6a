"""Instructions of pipeline stages, and the placement of model chunks on stages."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

COMPUTE = ("F", "B", "W", "BW")
# Message operation -> matching operation on the peer stage, and index of the peer's model chunk
# relative to this chunk.
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
    """Operation of a stage on microbatch `mb` (-1 if it has none) and model chunk `chunk`.

    F is a forward pass.  B computes the gradient with respect to the input, W the gradient with
    respect to the weights, and BW both.  RecvF and SendF transfer an activation, RecvB and SendB
    its gradient.  Reduce sums the gradients of a chunk over the data axis, and Step is the
    optimizer update.  In text form, the chunk is a prefix unless it is 0: F3, 1B0, Reduce,
    1Reduce, Step.
    """

    op: str
    mb: int = -1
    chunk: int = 0

    def __str__(self) -> str:
        return f"{self.chunk or ''}{self.op}{'' if self.mb < 0 else self.mb}"


def parse(text: str) -> Instruction:
    """Parse the text form of an instruction; raise ValueError if it is invalid."""
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
    """Convert a string of letters to passes: F, B and W for chunk 0, and f, b and w for chunk 1.

    For each letter, microbatches are numbered consecutively: "FFBFB" yields F0 F1 B0 F2 B1.
    """
    count: Counter[str] = Counter()
    for letter in pattern:
        yield Instruction(letter.upper(), count[letter], int(letter.islower()))
        count[letter] += 1


def whole(stream: Iterable[Instruction]) -> list[Instruction]:
    """Replace each B that has no matching W with BW, the full backward pass."""
    stream = list(stream)
    split = {(mb, chunk) for op, mb, chunk in stream if op == "W"}
    return [
        Instruction("BW", *each[1:]) if each[0] == "B" and each[1:] not in split else each
        for each in stream
    ]


def is_pair(passes: Sequence[Instruction]) -> bool:
    """Return True for a forward pass and a full backward pass that can alternate.

    They are independent if they are passes of different microbatches, and they share no layers if
    they are passes of different model chunks.
    """
    if [each.op for each in passes] != ["F", "BW"]:
        return False
    return all(one != other for one, other in zip(passes[0][1:], passes[1][1:], strict=True))


def paired(stream: Sequence[Instruction]) -> Iterator[tuple[Instruction, ...]]:
    """Group a stream into pairs (see `is_pair`) of adjacent passes and single instructions."""
    first = 0
    while first < len(stream):
        size = 2 if is_pair(stream[first : first + 2]) else 1
        yield tuple(stream[first : first + size])
        first += size


class Placement(NamedTuple):
    """Assignment of model chunks to pipeline stages.

    `part` is the index of a model chunk in model order: the first model chunk has the embedding,
    and the last one has the head.  By default, model chunks are assigned to stages round-robin:

        stage 0: 0 4    1: 1 5    2: 2 6    3: 3 7        (stages=4, chunks=2)

    With `v_shaped` and two chunks per stage, model chunks are assigned from the first stage to the
    last and back, so that stage 0 has both the embedding and the head:

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
        """Return the indices, in model order, of the model chunks on a stage."""
        return [self.part(stage, chunk) for chunk in range(self.chunks)]

    def location(self, part: int) -> tuple[int, int]:
        """Return the stage that runs model chunk `part`, and its chunk index on that stage."""
        chunk, stage = divmod(part, self.stages)
        return (self.parts - 1 - part if self.v_shaped and chunk == 1 else stage), chunk

    def first(self, stage: int, chunk: int) -> bool:
        return self.part(stage, chunk) == 0

    def last(self, stage: int, chunk: int) -> bool:
        return self.part(stage, chunk) == self.parts - 1

    def neighbor(self, stage: int, chunk: int, further: int) -> tuple[int, int] | None:
        """Return the location of the model chunk that is `further` chunks later in model order.

        The location is a (stage, chunk) pair, or `None` if the model has no such chunk.
        """
        part = self.part(stage, chunk) + further
        return self.location(part) if 0 <= part < self.parts else None

    def other(self, stage: int, instruction: Instruction) -> tuple[int, Instruction]:
        """Return the peer stage of a message and the matching instruction on that stage.

        Raises ValueError if the message has no peer: the neighboring model chunk does not exist or
        is on the same stage.
        """
        found = _other(self, stage, instruction.op, instruction.chunk)
        if found is None:
            raise ValueError(
                f"stage {stage}: {instruction} has no matching message on another stage; remove it"
            )
        peer, op, chunk = found
        return peer, Instruction(op, instruction.mb, chunk)

    def needs(self, stage: int, instruction: Instruction) -> list[tuple[int, Instruction]]:
        """Return the passes that an instruction depends on, as a list of (stage, pass) pairs.

        F needs the F of the previous model chunk.  B and BW need the B of the next model chunk and
        the F of the same model chunk.  W needs the B of the same model chunk.  BW counts as B.
        """
        op, mb, chunk = instruction
        return [
            (where, Instruction(need, mb, part))
            for where, need, part in _needs(self, stage, op, chunk)
        ]


# The results of the following functions are cached. They are the same for all microbatches.


@lru_cache(maxsize=1 << 16)
def _other(placement: Placement, stage: int, op: str, chunk: int) -> tuple[int, str, int] | None:
    """Return the stage, the operation and the chunk of the matching message, if there is any."""
    matching, further = MESSAGES[op]
    place = placement.neighbor(stage, chunk, further)
    return None if place is None or place[0] == stage else (place[0], matching, place[1])


@lru_cache(maxsize=1 << 16)
def _needs(placement: Placement, stage: int, op: str, chunk: int) -> list[tuple[int, str, int]]:
    """Return the stage, the operation and the chunk of each pass that a pass depends on."""
    if op == "W":
        return [(stage, "B", chunk)]
    if op not in COMPUTE:
        return []
    own = [] if op == "F" else [(stage, "F", chunk)]
    location = placement.neighbor(stage, chunk, -1 if op == "F" else 1)
    return [*own, (location[0], op[0], location[1])] if location else own
