"""Pipeline timelines as labeled spans for Gantt charts."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from hpc3d.pipeline.timeline import Row


class PassSpan(NamedTuple):
    """Activity of a stage from `start` to `end` [s].

    `kind` is a kind of hpc3d.analyze.report.gantt, preceded by the index of its chunk unless it
    is 0, such as F or 1BW. `label` is the text on the span.
    """

    start: float
    end: float
    kind: str
    label: str


def spans(timeline: Iterable[Row]) -> list[list[PassSpan]]:
    """Convert the rows of a timeline of hpc3d.pipeline.timeline to the rows of a panel."""
    return [[PassSpan(start, end, *_kind(what)) for start, end, what in row] for row in timeline]


def _kind(instruction):
    op, mb, chunk = instruction
    return f"{chunk or ''}{op if mb >= 0 else op.lower()}", str(mb) if mb >= 0 else ""
