"""Summary tiles at the top of a report, which show the most important numbers of a run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from hpc3d.analyze.report.table_format import percent, prefixed, seconds
from hpc3d.console.sanitize import counted

if TYPE_CHECKING:
    from hpc3d.analyze.report.run_analysis import RunAnalysis


def cards(run: RunAnalysis) -> Iterator[tuple[str, str, str]]:
    """Yield the title, value and note of each summary tile."""
    tables = run.tables
    step, work = tables["step"][0], tables["efficiency"][0]
    yield "step", seconds(step["step_s_median"]), _spread(step, run.about["averages"])
    yield "tokens/s", _written(step["tokens_per_s"], prefixed), counted(step["ranks"], "rank")
    communication = _written(step["communication_share"], percent)
    yield "communication", communication, _waiting(tables["ranks"])
    for row in tables["pipeline_bubble"]:
        ideal = f"{_written(row['bubble_ideal'], percent)} in the ideal schedule"
        note = f"{ideal}; stages are idle {percent(row['idle_share'])} of the time"
        yield "pipeline bubble", _written(row["bubble"], percent), note
    yield from _imbalances(tables["imbalance"][:1])
    if tables["stragglers"]:
        yield "straggler", *_straggler(tables["stragglers"])
    if work["mfu"] is not None:
        yield "MFU", percent(work["mfu"]), f"HFU {percent(work['hfu'])}"
    else:
        yield (
            "FLOP/s",
            _written(work["recorded_flop_per_s"], prefixed),
            "matrix products and attention",
        )
    yield "memory", *_memory(tables["memory_ranks"])
    losses = {"loss": tables["loss"][-1:] if any_loss(run) else []}
    losses["validation"] = tables["evaluation"][-1:]
    for title, rows in losses.items():
        for last in rows:
            loss = _written(last["loss"], "{:.4f}".format)
            yield title, loss, f"nats per token after step {last['step']}"


def any_loss(run: RunAnalysis) -> bool:
    """Return True if a loss was recorded in any step. Simulated steps have no loss."""
    return any(row["loss"] is not None for row in run.tables["loss"])


def _imbalances(rows):
    """Yield the tiles of the compute imbalance among equal ranks, and between stages."""
    for row in rows:
        if row["imbalance"] is not None:
            note = "max / mean compute time of ranks that do the same work"
            yield "imbalance", f"{row['imbalance']:.3f}", note
        if row["stage_imbalance"] is not None:
            note = f"max / mean compute time of the stages, on stage {row['stage']}"
            yield "stage imbalance", f"{row['stage_imbalance']:.3f}", note


def _straggler(rows):
    named = [row for row in rows if row["straggler"] == "yes"]
    if all(row["straggler"] is None for row in rows):
        some = any(row["peers"] for row in rows)
        return "unknown", "too few steps to decide" if some else "no two ranks do the same work"
    if not named:
        return "none", "no rank is significantly slower than its peers"
    imposed = f"its peers wait {seconds(named[0]['imposed_s'])} per step for it"
    return f"rank {named[0]['rank']}", imposed


def _memory(rows):
    """Return the value and note of the memory tile: the highest peak of any rank.

    Older traces contain only the peak of each kind of memory. For these traces, the tile shows the
    sum of the peaks.
    """
    *ranks, total = rows
    if "all" in total:
        most = max(ranks, key=lambda row: row["all"])
        where = f"highest peak, on rank {most['rank']}" if len(ranks) > 1 else "peak"
        return f"{prefixed(most['all'])}B", where
    peaks = sum(value for key, value in total.items() if key != "rank")
    return f"{prefixed(peaks)}B", "peaks summed over all kinds and ranks"


def _written(value, write):
    return "unknown" if value is None else write(value)


def _spread(row, averages):
    if row["steps"] == 1:
        return averages
    return f"{seconds(row['step_s_min'])} to {seconds(row['step_s_max'])}"


def _mean(rows, key):
    return sum(row[key] for row in rows) / len(rows)


def _waiting(ranks):
    step = _mean(ranks, "step_s")
    outstanding = (
        f"computing while a call is outstanding {percent(_mean(ranks, 'outstanding_s') / step)}"
    )
    if not any(row["wait_s"] for row in ranks):
        return outstanding  # waits are unknown, or 0 (a single rank, or identical simulated ranks)
    return f"waiting {percent(_mean(ranks, 'wait_s') / step)}; {outstanding}"
