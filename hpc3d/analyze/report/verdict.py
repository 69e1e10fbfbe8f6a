"""Verdict of a report: the step time, its largest cost, stragglers and the prediction error."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hpc3d.analyze.metrics.breakdown import DISJOINT
from hpc3d.analyze.metrics.step import mean_row
from hpc3d.analyze.report.table_format import seconds
from hpc3d.trace.schema import MESSAGES

_Rows = Sequence[Mapping[str, Any]]
# The verdict mentions only costs of at least this share of the step time, and dropped tokens above
# this share of the routed tokens.
_MENTIONED = 0.05
_ROUNDING = 1e-9  # times up to this share of the step time are treated as rounding errors
_TOLERANCE = 0.1  # maximum relative error of a prediction that is reported as "within 10%"
_WORK = {
    "gemm": "matrix products",
    "attention": "attention",
    "graph": "the CUDA graph (set train.cuda_graph = false to see its operations)",
}


def verdict(tables: Mapping[str, _Rows]) -> list[str]:
    """Return the sentences of the verdict. The first sentence is the step time breakdown.

    Parameters
    ----------
    tables
        Dict from table name to the rows of the table.
    """
    parts = mean_row(tables["ranks"], ("step_s", "exposed_s", *DISJOINT)) | _offloading(tables)
    costs = [*_largest_costs(tables, parts), *_dropped(tables["expert_cost"])]
    return [_composition(parts), *costs, *_predicted(tables["prediction"])]


def _offloading(tables: Mapping[str, _Rows]) -> dict[str, float]:
    """Return the time of offload copies and the time spent waiting for them, in s per step."""
    alone = [row for row in tables["time"] if tables["copies"] and not row["axis"]]
    return {
        key: sum(row["seconds"] for row in alone if row["category"] == category)
        for key, category in (("own_copies_s", "copy"), ("copy_wait_s", "wait"))
    }


def _composition(parts: Mapping[str, float | None]) -> str:
    step = parts["step_s"]
    offload = parts["own_copies_s"] + parts["copy_wait_s"]
    calls = parts["exposed_s"] + parts["copy_s"] - offload
    clauses = [f"{_share(parts['compute_s'], step)} of a step is computation"]
    if calls > _ROUNDING * step:
        waiting = ""
        waits = (parts["wait_s"] or 0) - parts["copy_wait_s"]
        if waits > _ROUNDING * step:  # identical ranks never wait for each other in a simulation
            waiting = f", of which {_share(waits, calls)} is waiting for other ranks"
        clauses.append(f"{_share(calls, step)} communication calls{waiting}")
    if offload > _MENTIONED * step:
        clauses.append(f"{_share(offload, step)} offload copies")
    for key, name in (("unrecorded_s", "unrecorded"), ("other_s", "other work")):
        if parts[key] > _MENTIONED * step:
            clauses.append(f"{_share(parts[key], step)} {name}")
    return f"{'; '.join(clauses)}."


def _largest_costs(
    tables: Mapping[str, _Rows], parts: Mapping[str, float | None]
) -> Iterator[str]:
    step, costs = parts["step_s"], defaultdict(float)
    for row in tables["time"]:
        if row["category"] == "compute":
            costs[_WORK.get(row["op"], "elementwise work")] += row["seconds"]
        elif row["category"] in ("comm", "wait") and row["axis"]:
            costs[_call(row)] += row["seconds"]
    if offload := parts["own_copies_s"] + parts["copy_wait_s"]:
        costs["offload copies"] = offload
    if costs:
        name = max(costs, key=costs.__getitem__)
        waits = sum(row["wait_s"] for row in tables["waits"] if _call(row) == name)
        waiting = f", of which {_share(waits, costs[name])} is waiting" if waits else ""
        yield f"Largest cost: {name}, {_share(costs[name], step)} of a step{waiting}."
    for row in tables["imbalance"][:1]:
        if (row["stage_imbalance"] or 1) > 1 + _MENTIONED:
            times = f"{row['stage_imbalance']:.2f} times as long as the mean stage"
            yield f"Stage imbalance: stage {row['stage']} computes {times}."
    late = [row for row in tables["stragglers"] if row["straggler"] == "yes"]
    if late:
        yield (
            f"Rank {late[0]['rank']} is a straggler: the ranks that do the same work wait for it"
            f" for a total of {seconds(late[0]['imposed_s'])} per step."
        )


def _dropped(rows: _Rows) -> Iterator[str]:
    for row in rows:
        if row["dropped"] > _MENTIONED:
            tokens = f"{row['dropped']:.0%} of the routed tokens exceed the capacity"
            remedy = "increase model.capacity or balance the load"
            yield f"{tokens} of their experts and are dropped; {remedy}."


def _call(row: Mapping[str, Any]) -> str:
    """Describe a communication call by its operation and mesh axis.

    The time of messages along the pipeline axis p includes the pipeline bubble.
    """
    if row["axis"] == "p" and row["op"] in MESSAGES:
        return "messages between stages (p) and the bubble"
    return f"{row['op'].replace('_', '-')} along {row['axis']}"


def _predicted(rows: _Rows) -> Iterator[str]:
    for row in rows:
        if row["quantity"] == "step_s" and row["predicted"]:
            ratio = row["measured"] / row["predicted"]
            comparison = f"{ratio:.2f} times" if ratio < 10 else f"{ratio:.0f} times"
            if abs(ratio - 1) <= _TOLERANCE:
                comparison = f"within {_TOLERANCE:.0%} of"
            predicted = f"predicted {seconds(row['predicted'])}"
            if row["machine"]:
                predicted = f"{seconds(row['predicted'])} predicted for {row['machine']}"
            yield f"A step takes {seconds(row['measured'])}, {comparison} the {predicted}."


def _share(part: float, whole: float) -> str:
    return f"{part / whole if whole else 0:.0%}"
