"""Tables of step time, loss and memory peaks, by phase, mesh axis and operation.

Means are over the rows of /steps, one per rank and step. Totals are over the events in these
steps. Times are exclusive: the time of an event excludes nested events, so that times add up to
the step time. A table is a list of rows. Each row is a dict from column to value in SI units, with
`None` for unknown values.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from hpc3d.analyze.metrics.columns import (
    cells,
    combinations,
    event_values,
    mean_rows,
    named,
    overlapped,
    own_time,
    rows_of,
    with_label,
)
from hpc3d.data.validation import text_names
from hpc3d.trace.trace_config import configured, one_time

if TYPE_CHECKING:
    from hpc3d.analyze.metrics.steady import Steady
    from hpc3d.trace.reader import Trace

_KEYS = ("category", "phase", "axis", "op")


def time_rows(trace: Trace) -> list[dict[str, Any]]:
    """Return the time, share of the step time, calls, bytes received and FLOP per rank and step.

    There is one row per category, phase, axis and operation. The bytes of sends are not counted.
    The last row contains the time that is not covered by any event.
    """
    inside = np.flatnonzero(cells(trace) >= 0)
    measures = {
        "seconds": own_time(trace)[inside] * 1e-9,
        "calls": np.ones(len(inside)),
        "bytes": (trace.events["bytes"] * ~with_label(trace.events, "op", ["send"]))[inside],
        "flop": trace.events["flops"][inside],
    }
    rows = mean_rows(trace, _KEYS, inside, measures)
    step = float(step_seconds(trace).mean())
    rest = dict.fromkeys(_KEYS, "") | dict.fromkeys(measures, 0.0) | {"category": "unrecorded"}
    rest["seconds"] = step - sum(row["seconds"] for row in rows)
    rows.append(rest)
    for row in rows:
        row["share"] = ratio(row["seconds"], step)
        row["flop_per_s"] = ratio(row["flop"], row["seconds"])
    return rows


def between_rows(trace: Trace) -> list[dict[str, Any]]:
    """Return one row per kind of activity between training steps, except evaluations.

    A row contains the number of activities per rank, their mean and maximum duration, and their
    total time per rank. Times are in seconds.
    """
    evaluation = with_label(trace.events, "phase", ["evaluation"])
    between = np.flatnonzero((trace.events["step"] < 0) & ~evaluation & ~overlapped(trace))
    if not len(between):
        return []
    keys, ranks = ("name", "category"), trace.attrs["world_size"]
    kinds, kind = combinations([event_values(trace, key, between) for key in keys])
    seconds, longest = own_time(trace)[between] * 1e-9, np.zeros(len(kinds))
    np.maximum.at(longest, kind, seconds)
    count, total = np.bincount(kind), np.bincount(kind, seconds)
    measures = {
        "times": count / ranks,
        "mean_s": total / count,
        "longest_s": longest,
        "seconds": total / ranks,
    }
    return [names | row for names, row in zip(named(trace, keys, kinds), rows_of(measures))]


def step_row(trace: Trace, time: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return a run's step time quartiles, pass times, tokens/s and communication share.

    The step time is the time of the slowest rank. communication_share is the share of the step
    time spent in calls and their waits, including calls of category copy. `time` is the result of
    `time_rows`. If the trace contains CPU times, tokens/s is `None`, because it depends on the
    wall-clock time.
    """
    steps, step = np.unique(trace.steps["step"], return_inverse=True)
    quantiles = np.percentile(slowest_seconds(trace), (0, 25, 50, 75, 100)).tolist()
    names = "step_s_min", "step_s_25", "step_s_median", "step_s_75", "step_s_max"
    tokens = float(np.median(trace.steps["tokens"]))
    communication = [row for row in time if row["category"] in ("comm", "wait") or row["axis"]]
    calls = [row for row in communication if row["category"] == "comm"]
    return {
        "ranks": trace.attrs["world_size"],
        "steps": len(steps),
        "first": int(steps[0]),
        "last": int(steps[-1]),
        **dict(zip(names, quantiles)),
        "forward_s": finite(np.median(means_of(step, trace.steps["forward_s"]))),
        "backward_s": finite(np.median(means_of(step, trace.steps["backward_s"]))),
        "tokens_per_s": rate(trace, tokens, quantiles[2]),
        "communication_share": ratio(
            sum(row["seconds"] for row in communication), sum(row["seconds"] for row in time)
        ),
        "communication_calls": sum(row["calls"] for row in calls),
        "communication_bytes": sum(row["bytes"] for row in calls),
    }


def slowest_seconds(trace: Trace) -> np.ndarray:
    """Return the time of each completed step on its slowest rank, in seconds."""
    steps, step = np.unique(trace.steps["step"], return_inverse=True)
    seconds = np.zeros(len(steps))
    np.maximum.at(seconds, step, step_seconds(trace))
    return seconds


def median_step(trace: Trace | Steady) -> int:
    """Return the number of the step with the median step time (or the lower median)."""
    order = slowest_seconds(trace).argsort(kind="stable")
    return int(np.unique(trace.steps["step"])[order[(len(order) - 1) // 2]])


def peak_rows(trace: Trace) -> list[dict[str, Any]]:
    """For each kind of memory, return the highest peak in bytes and the rank that reached it."""
    memory = {name: trace.memory[name] for name in ("kind", "rank", "peak")}
    labels = trace.memory.labels("kind")
    rows = []
    for kind in np.unique(memory["kind"]).tolist():
        chosen = np.flatnonzero(memory["kind"] == kind)
        highest = chosen[memory["peak"][chosen].argmax()]
        row = {"kind": labels.get(kind, str(kind)), "peak": int(memory["peak"][highest])}
        rows.append(row | {"rank": int(memory["rank"][highest])})
    return rows


def loss_rows(trace: Trace) -> list[dict[str, Any]]:
    """Return the loss and gradient norm of each step, averaged over the ranks that record them.

    `seconds` is the step time of the slowest rank, or None if the trace contains CPU times.
    """
    steps, step = np.unique(trace.steps["step"], return_inverse=True)
    loss, norm = (means_of(step, trace.steps[name]) for name in ("loss", "grad_norm"))
    seconds = slowest_seconds(trace).tolist() if one_time(trace) else [None] * len(steps)
    return [
        {"step": number, "loss": finite(mean), "grad_norm": finite(length), "seconds": time}
        for number, mean, length, time in zip(steps.tolist(), loss, norm, seconds)
    ]


def evaluation_rows(trace: Trace) -> list[dict[str, Any]]:
    """Return one row per evaluation.

    `texts` contains a row for each of several validation texts. The perplexity is the exponential
    of the loss. It is unknown if the accuracy is unknown, as for PyTorch modules, whose loss may
    be any function.
    """
    keys = ("step", "loss", "accuracy", "tokens", "seconds")
    rows = _evaluation_rows({key: trace.evaluation[key] for key in keys})
    columns = {key: trace.validation[key] for key in ("text", *keys[:-1])}
    texts, names = _evaluation_rows(columns), _validation_names(trace)
    for row in texts:
        row["text"] = names.get(row["text"], str(row["text"]))
    for row in rows:
        row["texts"] = [each for each in texts if each["step"] == row["step"]]
    return rows


def _validation_names(trace: Trace) -> dict[int, str]:
    """Return the short name of each validation text, by its index."""
    texts = configured(trace.attrs["config"], "data", "validation")
    return dict(enumerate(text_names(texts))) if isinstance(texts, list) else {}


def _evaluation_rows(columns: dict[str, np.ndarray]) -> list[dict[str, Any]]:
    """Return rows with their perplexity; values that are not finite are `None`."""
    rows = rows_of(columns)
    with np.errstate(over="ignore"):
        for row in rows:
            row |= {key: finite(row[key]) for key in ("loss", "accuracy")}
            row["perplexity"] = (
                finite(np.exp(row["loss"])) if row["accuracy"] is not None else None
            )
    return rows


def comparison_rows(
    runs: Sequence[Any], references: Mapping[int, int | None]
) -> list[dict[str, Any]]:
    """Return one row per run with its step times, loss, memory peaks and validation losses.

    `loss` is the training loss after `loss_step`, the last step that all runs have in common.
    `validation_loss` is that of `validation_step`, the last step up to `loss_step` after which all
    runs with evaluations were evaluated, and `validation_best` the lowest one up to this step.
    `loss_difference` is the maximum absolute difference from the loss of another run: the run
    `references[index]` for the run `index`, or no run. It includes all steps that these two runs
    have in common, up to `difference_step`.
    """
    losses = [{row["step"]: row["loss"] for row in run.tables["loss"]} for run in runs]
    step = max(set.intersection(*map(set, losses)), default=None)
    if all(loss is None for own in losses for loss in own.values()):
        step = None  # simulated steps have no losses
    last = _last_evaluation(runs, step)
    return [
        {"run": run.label}
        | run.tables["step"][0]
        | {"loss_step": step, "loss": own.get(step)}
        | _largest_difference(own, losses, references[index])
        | _peaks(run.tables["memory_ranks"])
        | _evaluated(run.tables["evaluation"], last)
        for index, (run, own) in enumerate(zip(runs, losses))
    ]


def _peaks(rows):
    ranks = [row for row in rows if row["rank"] is not None]
    peaks = {"peak_bytes": "all", "offloaded_bytes": "offloaded"}
    return {
        name: max((row.get(key) or 0 for row in ranks), default=0) or None
        for name, key in peaks.items()
    }


def _last_evaluation(runs, step):
    """Return the last step up to `step` after which all runs with evaluations were evaluated."""
    steps = [{row["step"] for row in run.tables["evaluation"]} for run in runs]
    known = [each for each in steps if each]
    common = set.intersection(*known) if known else ()
    return max((each for each in common if step is None or each <= step), default=None)


def _evaluated(rows, last):
    losses = {row["step"]: row["loss"] for row in rows if last is not None and row["step"] <= last}
    known = [loss for loss in losses.values() if loss is not None]
    best = min(known, default=None)
    return {"validation_step": last, "validation_loss": losses.get(last), "validation_best": best}


def _largest_difference(own, losses, reference):
    """Return the maximum absolute difference between the loss curves of a run and its reference.

    `own` and losses[reference] are dicts from step to loss. Only common steps are compared, the
    last of which is `difference_step`. The values are `None` if no common step has two known
    losses, or if there is no reference.
    """
    others = {} if reference is None else losses[reference]
    pairs = {step: (loss, others.get(step)) for step, loss in own.items()}
    far = {step: abs(pair[0] - pair[1]) for step, pair in pairs.items() if None not in pair}
    return {
        "loss_difference": max(far.values(), default=None),
        "difference_step": max(far, default=None),
    }


def step_seconds(trace: Trace) -> np.ndarray:
    """Return the step time in seconds for each row of /steps (one row per rank and step)."""
    return (trace.steps["t_end"] - trace.steps["t_start"]) * 1e-9


def means_of(index: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Return the mean of the finite `values` of each `index` (NaN if it has no finite values)."""
    number = np.isfinite(values)
    count = np.bincount(index[number], minlength=index.max() + 1)
    total = np.bincount(index[number], values[number], minlength=index.max() + 1)
    return np.divide(total, count, out=np.full(len(count), np.nan), where=count > 0)


def mean_row(rows: Sequence[Mapping[str, Any]], keys: Iterable[str]) -> dict[str, float | None]:
    """Return the mean of each column in `keys` over all rows, or None for unknown columns."""
    return {
        key: None if rows[0][key] is None else sum(row[key] for row in rows) / len(rows)
        for key in keys
    }


def finite(value: float) -> float | None:
    """Return `value` as a float, or None if `value` is not finite."""
    return float(value) if np.isfinite(value) else None


def rate(trace: Trace, amount: float, seconds: float) -> float | None:
    """Return amount / seconds, or None if a value is unknown or the trace contains CPU times."""
    return ratio(amount, seconds) if one_time(trace) else None


def ratio(part: float | None, total: float | None) -> float | None:
    """Return part / total, or None if the part is unknown or the total is 0 or unknown."""
    return part / total if total and part is not None else None
