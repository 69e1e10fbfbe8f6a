"""A timeline as text, the way that papers draw schedules."""

from collections.abc import Sequence
from typing import NamedTuple

from hpc3d.pipeline.timeline import Row


class Scale(NamedTuple):
    """Seconds and characters of a cell, how many of the characters are a gap, and cells a line."""

    unit: float
    width: int
    gap: int
    cells: int

    def cell(self, time: float) -> int:
        """The cell that begins nearest to a time; the rounding of sums of times is forgiven."""
        return int(round(time / self.unit, 6) + 0.5)


def draw(rows: Sequence[Row], columns: int = 99, unit: float = 0.0) -> str:
    """A line for each stage, a cell for each `unit` of seconds (0: those of the shortest pass).

    A pass is its letter, small for chunk 1, its microbatch, and a line as far as it goes; a bar
    behind it is a Step; blank is a stage that waits.  What is wider than `columns` is cut, and a
    last line says so.
    """
    spans = [span for row in rows for span in row]
    heads = [f"{stage:>{len(str(len(rows) - 1))}} |" for stage in range(len(rows))]
    unit = unit or min(end - start for start, end, _ in spans if end > start)
    scale = _scale(spans, columns - len(heads[0]), unit)
    lines = [(head + _line(row, scale)).rstrip() for head, row in zip(heads, rows)]
    cells = scale.cell(max(end for _, end, _ in spans))
    if cells > scale.cells:
        lines.append(f"cut after {scale.cells} of {cells} cells of {unit:.3g} s")
    return "\n".join(lines)


def _scale(spans, columns, unit):
    """Cells as wide as the longest label; wider by a gap if all fit, or if it shows a Step."""
    label = max(len(_label(instruction)) for *_, instruction in spans)
    cells = Scale(unit, 0, 0, 0).cell(max(end for _, end, _ in spans))
    steps = any(instruction.op == "Step" for *_, instruction in spans)
    gap = int(steps or cells * (label + 1) <= columns)
    return Scale(unit, label + gap, gap, max(1, columns // (label + gap)))


def _line(row, scale):
    text = ""
    for start, end, instruction in row:
        first, last = scale.cell(start), min(scale.cell(end), scale.cells)
        if instruction.op == "Step" and first <= scale.cells:
            text = text[:-1] + "|"
        elif first < last:
            length, line = (last - first) * scale.width - scale.gap, "-" * (last - first > 1)
            bar = _label(instruction).ljust(length, line or " ")
            text = text.ljust(first * scale.width) + bar + " " * scale.gap
    return text


def _label(instruction):
    """F3, f3 of chunk 1, 2F3 of chunk 2; nothing for what has no microbatch."""
    op, mb, chunk = instruction
    letter = op[0].lower() if chunk == 1 else op[0]
    return "" if mb < 0 else f"{chunk if chunk > 1 else ''}{letter}{mb}"
