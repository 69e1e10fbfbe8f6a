"""What the stages of a pipeline do over time, as spans with a kind and a label."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from hpc3d.pipeline.timeline import Row


class PassSpan(NamedTuple):
    """What a stage does from `start` to `end` [s]: a kind of `KINDS`, after the number of its
    chunk unless it is 0, such as F or 1BW, and the text on it."""

    start: float
    end: float
    kind: str
    label: str


def spans(timeline: Iterable[Row]) -> list[list[PassSpan]]:
    """The rows of a timeline of `hpc3d.pipeline.timeline` as those of a panel."""
    return [[PassSpan(start, end, *_kind(what)) for start, end, what in row] for row in timeline]


def _kind(instruction):
    op, mb, chunk = instruction
    return f"{chunk or ''}{op if mb >= 0 else op.lower()}", str(mb) if mb >= 0 else ""
