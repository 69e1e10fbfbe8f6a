"""A report in a dozen lines, for a terminal."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from hpc3d.analyze.metrics.run_summary import TURNS
from hpc3d.analyze.report.cards import cards
from hpc3d.analyze.report.verdict import verdict

if TYPE_CHECKING:
    from hpc3d.analyze.report.run_analysis import Report, RunAnalysis

_MOST = 12  # lines
_KEYS = 6  # that are named in a line
_OF_SEVERAL = "step", "tokens/s", "communication", "memory", "loss"


def lines(report: Report) -> list[str]:
    """What to know of one run, or a line for each of several."""
    found = [*_several(report)] if len(report.runs) > 1 else [*_one(report.runs[0])]
    return found if len(found) <= _MOST else [*found[: _MOST - 1], "more is in the report"]


def _one(run: RunAnalysis) -> Iterator[str]:
    yield run.label
    yield from verdict(run.tables)
    for title, value, note in cards(run):
        if title not in ("communication", "imbalance", "straggler"):
            yield f"{title}: {value}, {note}"
    yield from _doubts(run)


def _several(report: Report) -> Iterator[str]:
    for line in report.notes[:2]:
        yield f"compare with care: {line}"
    for group, keys in report.differing.items():
        if keys:
            more = f" and {len(keys) - _KEYS} more" if len(keys) > _KEYS else ""
            yield f"{group} differs: {', '.join([*keys][:_KEYS])}{more}"
    yield from report.curves[:2]
    for run in report.runs:
        values = {title: value for title, value, _ in cards(run)}
        numbers = ", ".join(f"{key} {values[key]}" for key in _OF_SEVERAL if key in values)
        yield f"{run.label}: {numbers}"


def _doubts(run: RunAnalysis) -> Iterator[str]:
    if (cores := run.about.get("cores", "")).endswith(TURNS):
        yield f"cores: {cores}"
    for title, found in (("missing", run.missing), ("contradicts itself", run.violations)):
        if found:
            more = f", and {len(found) - 1} more" if len(found) > 1 else ""
            yield f"the trace, {title}: {found[0]}{more}"
