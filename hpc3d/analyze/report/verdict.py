"""What a report comes to, in a few sentences: what a step is made of, what would help most, and
whether it went as predicted."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hpc3d.analyze.metrics.breakdown import DISJOINT
from hpc3d.analyze.report.table_format import seconds
from hpc3d.trace.schema import MESSAGES

_Rows = Sequence[Mapping[str, Any]]
_LEAST = 0.05  # smallest share of a step that the verdict mentions
_NOTHING = 1e-9  # the share of a step that rounding may leave
_NEAR = 0.1  # by which a measured step may differ from its prediction and be as predicted
_WORK = {
    "gemm": "products",
    "attention": "attention",
    "graph": "the CUDA graph (train.cuda_graph = false tells its parts)",
}


def verdict(tables: Mapping[str, _Rows]) -> list[str]:
    """Sentences about a run, the first one what a step is, from the tables of its report."""
    parts = _means(tables["ranks"]) | _offloading(tables)
    return [_made_of(parts), *_lever(tables, parts), *_predicted(tables["prediction"])]


def _means(ranks: _Rows) -> dict[str, float | None]:
    """The parts of a step, means over ranks; None for those that are not known."""
    return {
        key: None if ranks[0][key] is None else sum(row[key] for row in ranks) / len(ranks)
        for key in ("step_s", "exposed_s", *DISJOINT)
    }


def _offloading(tables: Mapping[str, _Rows]) -> dict[str, float]:
    """Time in which ranks copied what is offloaded, and in which they waited for such copies."""
    alone = [row for row in tables["time"] if tables["copies"] and not row["axis"]]
    return {
        key: sum(row["seconds"] for row in alone if row["category"] == category)
        for key, category in (("own_copies_s", "copy"), ("copy_wait_s", "wait"))
    }


def _made_of(parts: Mapping[str, float | None]) -> str:
    """Computation, communication and its waiting, and what no event accounts for."""
    step = parts["step_s"]
    offload = parts["own_copies_s"] + parts["copy_wait_s"]
    calls = parts["exposed_s"] + parts["copy_s"] - offload
    said = [f"{_share(parts['compute_s'], step)} of a step is computation"]
    if calls > _NOTHING * step:
        waiting = ""
        waits = (parts["wait_s"] or 0) - parts["copy_wait_s"]
        if waits > _NOTHING * step:  # not where ranks are alike in a simulated step
            waiting = f", {_share(waits, calls)} of it waiting for others"
        said.append(f"{_share(calls, step)} communication{waiting}")
    if offload > _LEAST * step:
        said.append(f"{_share(offload, step)} copies of what is offloaded")
    for key, name in (("unrecorded_s", "between events"), ("other_s", "other work")):
        if parts[key] > _LEAST * step:
            said.append(f"{_share(parts[key], step)} {name}")
    return f"{'; '.join(said)}."


def _lever(tables: Mapping[str, _Rows], parts: Mapping[str, float | None]) -> Iterator[str]:
    """The largest part that one could do something about, and the rank that is late."""
    step, levers = parts["step_s"], defaultdict(float)
    for row in tables["time"]:
        if row["category"] == "compute":
            levers[_WORK.get(row["op"], "elementwise work")] += row["seconds"]
        elif row["category"] in ("comm", "wait") and row["axis"]:
            levers[_call(row)] += row["seconds"]
    if offload := parts["own_copies_s"] + parts["copy_wait_s"]:
        levers["copies of what is offloaded"] = offload
    if levers:
        name = max(levers, key=levers.__getitem__)
        waits = sum(row["wait_s"] for row in tables["waits"] if _call(row) == name)
        of_it = f", {_share(waits, levers[name])} of that waiting" if waits else ""
        yield f"The largest lever: {name}, {_share(levers[name], step)} of a step{of_it}."
    late = [row for row in tables["stragglers"] if row["straggler"] == "yes"]
    if late:
        yield (
            f"Rank {late[0]['rank']} is slower than chance explains: others wait "
            f"{seconds(late[0]['imposed_s'])} of a step for it."
        )


def _call(row: Mapping[str, Any]) -> str:
    """A kind of call in words; what a stage waits for on p is the pipeline's bubble, too."""
    if row["axis"] == "p" and row["op"] in MESSAGES:
        return "messages between stages (p) and the bubble"
    return f"{row['op'].replace('_', '-')} along {row['axis']}"


def _predicted(rows: _Rows) -> Iterator[str]:
    for row in rows:
        if row["quantity"] == "step_s" and row["predicted"]:
            ratio = row["measured"] / row["predicted"]
            how = f"{_times(ratio)} the predicted {seconds(row['predicted'])}"
            if abs(ratio - 1) <= _NEAR:
                how = f"within {_NEAR:.0%} of the predicted {seconds(row['predicted'])}"
            yield f"A step takes {seconds(row['measured'])}, {how}."


def _times(ratio: float) -> str:
    return f"{ratio:.2f} times" if ratio < 10 else f"{ratio:.0f} times"


def _share(part: float, whole: float) -> str:
    return f"{part / whole if whole else 0:.0%}"
