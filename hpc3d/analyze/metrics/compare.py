"""Comparison of runs: time differences, bytes received, and the kind of scaling."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from math import exp, hypot, pi
from typing import Any

import numpy as np

from hpc3d.analyze.metrics.breakdown import breakdown
from hpc3d.analyze.metrics.loads import load_of, setting
from hpc3d.analyze.metrics.mfu import recorded_flops
from hpc3d.analyze.metrics.parallel_layout import layout_of
from hpc3d.analyze.metrics.pipeline_step import configuration
from hpc3d.analyze.metrics.steady import Steady
from hpc3d.analyze.metrics.step import finite, means_of, ratio, slowest_seconds
from hpc3d.comm.mesh import COPIES, DATA
from hpc3d.model.families import block_weights

# Two-sided 95 % quantiles of Student's t distribution for 1, 2, ..., 30 degrees of freedom.
T95 = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
    *(2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)
MODEL = ("layers", "hidden", "heads", "sequence")
LOAD = ("batch", *MODEL, "setting")  # columns that identify the work of a step
_ALL = "all"  # placeholder in the columns `axis` and `op` of the totals row
_Z95 = 1.96  # two-sided 95 % quantile of the normal distribution
FEWEST = 3  # minimum number of steps of a run, or of runs, for an interval of a time
# The true median lies between the extremes of n samples with probability 1 - 2^(1 - n), which is
# 97 % for n = 6. Fewer samples require an assumption about their distribution.
_ORDERED = 6
CONSTANT = 0.1  # maximum relative difference in work per rank for weak scaling


# Comparison of two runs


def difference_rows(
    one: Steady, other: Steady, keys: Sequence[str] = ("category", "phase", "axis", "op")
) -> list[dict[str, Any]]:
    """Compare the times of two traces, grouped by `breakdown` keys, in seconds per rank and step.

    The first row is for the complete step. The other rows are sorted by absolute difference,
    largest first. `low` and `high` are the limits of Welch's 95 % confidence interval of the
    difference, with the degrees of freedom rounded down. Steps are treated as independent samples.
    The limits are `None` if a run has only one step.
    """
    ours, theirs = (_by_step(trace, keys) for trace in (one, other))
    rows = [dict(key) | _difference(ours[key], theirs[key]) for key in {**ours, **theirs}]
    return sorted(rows, key=lambda row: (row["category"] != "step", -abs(row["difference_s"])))


def _by_step(trace, keys):
    """Return the time in seconds of each group of events in each step, as a dict.

    The keys are the (key, name) pairs that identify a group, and the values are arrays of shape
    [steps].
    """
    columns = dict.fromkeys(("category", *keys))
    steps = np.unique(trace.steps["step"])
    found = defaultdict(lambda: np.zeros(len(steps)))
    step_key = tuple((dict.fromkeys(columns, "") | {"category": "step"}).items())
    for row in breakdown(trace, ("step", *keys)):
        index = np.searchsorted(steps, row["step"])
        for row_key in (tuple((key, row[key]) for key in columns), step_key):
            found[row_key][index] += row["seconds"]
    return found


def _difference(ours, theirs):
    difference = float(theirs.mean() - ours.mean())
    margin = half_width(ours, theirs) if min(len(ours), len(theirs)) > 1 else None
    return {
        "seconds": float(ours.mean()),
        "other_seconds": float(theirs.mean()),
        "difference_s": difference,
        "low": None if margin is None else difference - margin,
        "high": None if margin is None else difference + margin,
    }


def half_width(*samples: np.ndarray) -> float:
    """Return the half-width of the 95 % confidence interval of a mean or a difference of means.

    For a difference, this is Welch's interval. Each sample must have at least two values.
    """
    variances = np.array([sample.var(ddof=1) / len(sample) for sample in samples])
    if not variances.any():
        return 0.0
    free = variances.sum() ** 2 / sum(variances**2 / [len(sample) - 1 for sample in samples])
    index = min(max(1, int(free + 1e-9)), len(T95)) - 1
    return float(T95[index] * np.sqrt(variances.sum()))


# Comparison of several runs


def received_rows(times: Sequence[Sequence[dict[str, Any]]], timed: bool) -> list[dict[str, Any]]:
    """Compare the bytes received per rank in several runs, by axis and operation.

    The first row is the total; the others are sorted by decreasing size. For run n, counted from
    1, bytes_n is the number of bytes received by a rank per step, and seconds_n is the rank's time
    in these calls per step (`None` unless `timed`). difference_n is the change in bytes relative
    to the first run (None if the first run receives no bytes).

    Parameters
    ----------
    times
        Results of `time_rows`, one per run.
    """
    runs = [_received(time) for time in times]
    kinds = {kind: None for run in runs for kind, (received, _) in run.items() if received}
    most = {kind: max(run[kind][0] for run in runs) for kind in kinds}
    rows = []
    for axis, op in sorted(kinds, key=lambda kind: (kind[0] != _ALL, -most[kind])):
        row: dict[str, Any] = {"axis": axis, "op": op}
        first, _ = runs[0][axis, op]
        for number, run in enumerate(runs, 1):
            received, seconds = run[axis, op]
            row |= {f"bytes_{number}": received, f"seconds_{number}": seconds if timed else None}
            if number > 1:
                row[f"difference_{number}"] = ratio(received - first, first)
        rows.append(row)
    return rows


def _received(time):
    """Sum bytes and seconds by (axis, operation). The totals have the key (_ALL, _ALL)."""
    found = defaultdict(lambda: (0.0, 0.0))
    for row in time:
        if row["axis"]:
            for kind in ((row["axis"], row["op"]), (_ALL, _ALL)):
                received, seconds = found[kind]
                found[kind] = received + row["bytes"], seconds + row["seconds"]
    return found


# Scaling of several runs


def run_row(trace: Steady) -> dict[str, Any]:
    """Return the properties of a run that are required by `kind_of_scaling` and `gain_rows`.

    step_s is the median step time of the slowest rank. forward_s and backward_s are averaged over
    ranks in each step; the result is the median over steps. average_step_s, the median of
    `pass_seconds` divided by the batch size, is the "average step time" of arXiv:2105.14450.
    Unlike step_s, it excludes messages between pipeline stages, the gradient reduction over
    replicas and the optimizer. Unknown values are `None`.
    """
    config, ranks, layout = configuration(trace), trace.attrs["world_size"], layout_of(trace)
    forward, backward, passes = (
        finite(np.median(each)) for each in (*_pass_seconds(trace), pass_seconds(trace))
    )
    seconds = float(np.median(slowest_seconds(trace)))
    tokens = float(np.median(trace.steps["tokens"]))
    sizes = _sizes(config) | {
        "setting": setting(load_of(trace), trace.attrs.get("kind", "measured"))
    }
    return {
        "run": layout.label,
        "label": (config and config.run.label) or "",
        "layout": layout.kind,
        "family": layout.family,
        "ranks": ranks,
        "p": layout.sizes.get("p", 1),
        "d": layout.sizes.get(DATA, 1) * layout.sizes.get(COPIES, 1),
        **sizes,
        "forward_s": forward,
        "backward_s": backward,
        "average_step_s": ratio(passes, sizes["batch"]),
        "step_s": seconds,
        "tokens_per_s": ratio(tokens, seconds),
        "tokens_per_s_rank": ratio(tokens, seconds * ranks),
        "flop_per_s": ratio(recorded_flops(trace), seconds),
    }


def pass_seconds(trace: Steady) -> np.ndarray:
    """Return the mean time of a rank in the forward and backward passes of each step, in s."""
    return sum(_pass_seconds(trace))


def _pass_seconds(trace):
    _, step = np.unique(trace.steps["step"], return_inverse=True)
    return [means_of(step, trace.steps[name]) for name in ("forward_s", "backward_s")]


def relative_error(values: Sequence[float] | np.ndarray) -> float | None:
    """Return the standard error of log(median(values)).

    The error is computed from two order statistics (McKean and Schrader 1984; Price and Bonett
    2002): of n values, the c-th lowest and the c-th highest are z = (n + 1 - 2 c) / sqrt(n)
    standard errors away from the median. Three to five values are assumed to be log-normal: the
    error is that of their median, sqrt(pi / 2) times that of the mean, and is increased to give
    Student's interval. The result is `None` if there are fewer values, or if any value is not
    positive and finite.
    """
    count, ordered = len(values), np.sort(values)
    if count < FEWEST or not ordered[0] > 0 or not np.isfinite(ordered[-1]):
        return None
    if count < _ORDERED:
        mean_error = np.log(ordered).std(ddof=1) / count**0.5
        return float((pi / 2) ** 0.5 * mean_error * T95[count - 2] / _Z95)
    order = max(1, round((count + 1) / 2 - _Z95 * (count / 4) ** 0.5))
    errors = 2 * (count + 1 - 2 * order) / count**0.5
    return float(np.log(ordered[count - order] / ordered[order - 1]) / errors)


def interval(key: str, value: float | None, *errors: float | None) -> dict[str, float | None]:
    """Return the limits of the log-normal 95 % confidence interval of a median or a ratio."""
    if value is None or None in errors:
        return {f"{key}_low": None, f"{key}_high": None}
    factor = exp(_Z95 * hypot(*errors))
    return {f"{key}_low": value / factor, f"{key}_high": value * factor}


def _sizes(config):
    keys = ("batch", *MODEL, "recompute")
    if config is None:
        return dict.fromkeys((*keys, "block_weights"))
    if config.torch.factory:
        return dict.fromkeys((*keys, "block_weights")) | {"batch": config.train.batch}
    values = vars(config.train) | vars(config.model) | vars(config.parallel)
    return {key: values[key] for key in keys} | {
        "block_weights": block_weights(config.model).active
    }


def kind_of_scaling(run: Mapping[str, Any], first: Mapping[str, Any]) -> str:
    """Return the kind of scaling from the run `first` to another run.

    It is "strong" if the runs do the same total work. It is "weak" if the work per rank (block
    parameters times tokens) is the same within the relative tolerance CONSTANT and all other
    settings are equal. Otherwise it is "other", for example if the work is unknown or only one of
    the two runs is simulated. The runs are results of `run_row`.
    """
    if run["setting"] is None or run["setting"] != first["setting"]:
        return "other"
    if all(run[key] == first[key] for key in LOAD):
        return "strong"
    same = run["recompute"] == first["recompute"]
    return "weak" if same and abs(_work(run) / _work(first) - 1) <= CONSTANT else "other"


def _work(run):
    """Return the work per rank and step: active block parameters times tokens per rank."""
    tokens = run["batch"] * run["sequence"]
    return run["block_weights"] * tokens / run["ranks"]
