"""Pipeline timelines as labeled spans for Gantt charts."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from hpc3d.pipeline.timeline import Row


class PassSpan(NamedTuple):
    """Pass or other activity of a pipeline stage, from `start` to `end` in seconds.

    `kind` is one of the span kinds of hpc3d.analyze.report.gantt, such as F or BW. If the index of
    the model chunk is not 0, the kind is prefixed with this index, as in 1BW. `label` is the text
    drawn on the span.
    """

    start: float
    end: float
    kind: str
    label: str


def spans(timeline: Iterable[Row]) -> list[list[PassSpan]]:
    """Convert a timeline of hpc3d.pipeline.timeline to the rows of a Gantt chart."""
    return [[PassSpan(start, end, *_kind(what)) for start, end, what in row] for row in timeline]


def _kind(instruction):
    op, mb, chunk = instruction
    return f"{chunk or ''}{op if mb >= 0 else op.lower()}", str(mb) if mb >= 0 else ""
