"""Short report for the terminal, with about a dozen lines."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from hpc3d.analyze.metrics.run_summary import CORES_SHARED
from hpc3d.analyze.report.cards import cards
from hpc3d.analyze.report.verdict import verdict

if TYPE_CHECKING:
    from hpc3d.analyze.report.run_analysis import Report, RunAnalysis

_MAX_LINES = 12
_MAX_KEYS = 6  # maximum number of configuration keys listed in a line
_COMPARED = "step", "tokens/s", "communication", "memory", "loss"


def lines(report: Report) -> list[str]:
    """Return the lines of the report: the summary of a single run, or a comparison of runs."""
    found = [*_several(report)] if len(report.runs) > 1 else [*_one(report.runs[0])]
    if len(found) > _MAX_LINES:
        found = [*found[: _MAX_LINES - 1], "see the report for more"]
    return found


def _one(run: RunAnalysis) -> Iterator[str]:
    yield run.label
    yield from verdict(run.tables)
    for title, value, note in cards(run):
        if title not in ("communication", "imbalance", "stage imbalance", "straggler"):
            yield f"{title}: {value}, {note}"
    if attempts := run.tables["attempts"]:
        last = attempts[-1]
        yield f"attempts: {len(attempts)}, the last from step {last['first']} on; losses cover all"
    if other := run.about.get("other layout"):
        yield f"other layout: {other}"
    yield from _warnings(run)


def _several(report: Report) -> Iterator[str]:
    yield from report.verdict[:4]
    for line in report.notes[:5]:
        yield f"compare with care: {line}"
    for group, keys in report.differing.items():
        if keys:
            more = f" and {len(keys) - _MAX_KEYS} more" if len(keys) > _MAX_KEYS else ""
            yield f"{group} differs: {', '.join([*keys][:_MAX_KEYS])}{more}"
    for run in report.runs:
        values = {title: value for title, value, _ in cards(run)}
        numbers = ", ".join(f"{key} {values[key]}" for key in _COMPARED if key in values)
        yield f"{run.label}: {numbers}"


def _warnings(run: RunAnalysis) -> Iterator[str]:
    if (cores := run.about.get("cores", "")).endswith(CORES_SHARED):
        yield f"cores: {cores}"
    yield from run.problems()
