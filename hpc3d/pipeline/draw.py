"""Text diagrams of pipeline timelines, in the style of the papers on pipeline schedules."""

from collections.abc import Sequence
from typing import NamedTuple

from hpc3d.pipeline.timeline import Row


class Scale(NamedTuple):
    """Scale of a diagram.

    `unit` is the time per cell in seconds, `width` the number of characters per cell, `gap` the
    number of blanks after a pass, and `cells` the number of cells per line.
    """

    unit: float
    width: int
    gap: int
    cells: int

    def cell(self, time: float) -> int:
        """Return the index of the cell that starts closest to `time` (in seconds).

        `time` is rounded first, so that accumulated rounding errors do not change the result.
        """
        return int(round(time / self.unit, 6) + 0.5)


def draw(rows: Sequence[Row], columns: int = 99) -> str:
    """Return a diagram with one line per stage, whose cells are as long as the shortest pass.

    A pass is drawn as its letter (lowercase for chunk 1) and its microbatch, followed by dashes up
    to its end time.  A vertical bar marks a Step, and blank space is idle time.  A diagram wider
    than `columns` characters is truncated; a final line then states how many cells are shown.
    """
    spans = [span for row in rows for span in row]
    heads = [f"{stage:>{len(str(len(rows) - 1))}} |" for stage in range(len(rows))]
    unit = min(end - start for start, end, _ in spans if end > start)
    scale = _scale(spans, columns - len(heads[0]), unit)
    lines = [(head + _line(row, scale)).rstrip() for head, row in zip(heads, rows)]
    cells = scale.cell(max(end for _, end, _ in spans))
    if cells > scale.cells:
        lines.append(f"truncated after {scale.cells} of {cells} cells of {unit:.3g} s")
    return "\n".join(lines)


def _scale(spans, columns, unit):
    """Choose a scale whose cells are as wide as the longest label.

    Passes are separated by a blank if the diagram contains a Step, or if it then still fits in
    `columns` characters.
    """
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
    """Return the label of an instruction, or "" if it has no microbatch.

    A forward pass of microbatch 3 is labeled F3 on chunk 0, f3 on chunk 1, and 2F3 on chunk 2.
    """
    op, mb, chunk = instruction
    letter = op[0].lower() if chunk == 1 else op[0]
    return "" if mb < 0 else f"{chunk if chunk > 1 else ''}{letter}{mb}"
