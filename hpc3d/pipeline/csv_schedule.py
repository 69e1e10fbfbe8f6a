"""Pipeline schedules in CSV files, with one row per stage and one cell per instruction."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable
from itertools import product
from typing import NamedTuple

from hpc3d.console import small_files
from hpc3d.pipeline.instruction import COMPUTE, Instruction, Placement, parse

_TURN = "turn"


class ScheduleTable(NamedTuple):
    """Schedule read from a CSV file.

    It consists of the instruction stream of each stage, the placement of the model chunks, and the
    number of microbatches.
    """

    streams: list[list[Instruction]]
    placement: Placement
    micros: int


def from_csv(path: str) -> ScheduleTable:
    """Read a schedule from a CSV file.

    Cells contain only F, B, W and BW; `passes.lower` adds the other instructions.  If the first
    row contains only the word `turn`, the placement is `v_shaped` (see `Placement`).  Blank cells
    and rows are ignored, and rows may have any length.  Raises ValueError with the one-based row
    and column of the error.
    """
    content = small_files.read(
        path, small_files.MOST_SCHEDULE, "use a CSV file with one row per stage"
    )
    try:
        return _table(_rows(content))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def to_csv(path: str, streams: Iterable[Iterable[Instruction]], placement: Placement) -> None:
    """Write a synchronous schedule to a CSV file that `from_csv` can read."""
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerows([[_TURN]] if placement.v_shaped else [])
        writer.writerows(streams)


def _rows(content):
    """Parse CSV content into a list of (row, [(column, text), ...]), skipping blank rows and
    cells."""
    try:
        reader = csv.reader(io.StringIO(content.decode("utf-8-sig"), newline=""))
        rows = [(reader.line_num, list(enumerate(map(str.strip, row), 1))) for row in reader]
    except (UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"not a CSV file in UTF-8: {error}") from None
    rows = [(row, [cell for cell in cells if cell[1]]) for row, cells in rows]
    return [(row, cells) for row, cells in rows if cells]


def _table(rows):
    turn = bool(rows) and [text for _, text in rows[0][1]] == [_TURN]
    streams = {row: _stream(row, cells) for row, cells in rows[turn:]}
    passes = [instruction for stream in streams.values() for instruction in stream]
    if not passes:
        raise ValueError("the file has no instructions; write one row per stage")
    micros, chunks = (1 + max(numbers) for numbers in list(zip(*passes))[1:])
    if turn and chunks != 2:
        wrong = (
            f'a schedule whose first row is "turn" must have 2 model chunks per stage, but this '
            f"one has {chunks}"
        )
        raise ValueError(f"row {rows[0][0]}: {wrong}")
    for row, stream in streams.items():
        _refuse_gaps(row, stream, micros, chunks)
    return ScheduleTable([*streams.values()], Placement(len(streams), chunks, turn), micros)


def _stream(row, cells):
    stream: list[Instruction] = []
    done: set[tuple[str, int, int]] = set()
    for column, text in cells:
        try:
            stream.append(_pass(text, done))
        except ValueError as error:
            raise ValueError(f"row {row}, column {column}: {error}") from None
    return stream


def _pass(text, done):
    """Parse the instruction in a cell, and add its passes to `done`.

    `done` contains the passes (F, B or W) of the cells to the left.  Raises ValueError if a pass
    is repeated, or precedes a pass that it depends on.
    """
    instruction = parse(text)
    op, mb, chunk = instruction
    if op not in COMPUTE:
        raise ValueError(f"{text} is not a pass and is added automatically; remove it")
    for letter in op:
        before = {"F": None, "B": "F", "W": "B"}[letter]
        if before and (before, mb, chunk) not in done:
            raise ValueError(f"{text} comes before {Instruction(before, mb, chunk)}; swap them")
        if (letter, mb, chunk) in done:
            raise ValueError(f"{text} appears twice; remove one")
        done.add((letter, mb, chunk))
    return instruction


def _refuse_gaps(row, stream, micros, chunks):
    done = {(op[0], mb, chunk) for op, mb, chunk in stream}
    for letter, chunk, mb in product("FB", range(chunks), range(micros)):
        if (letter, mb, chunk) not in done:
            missing = Instruction(letter, mb, chunk)
            raise ValueError(
                f"row {row}: {missing} is missing; each stage must run F and B for every "
                "microbatch and chunk in the file"
            )
