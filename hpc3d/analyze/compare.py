"""Runs side by side: where two of them differ, and how runs scale with the ranks."""

from collections import defaultdict

import numpy as np

from hpc3d.analyze.breakdown import breakdown
from hpc3d.analyze.efficiency import recorded_flops
from hpc3d.analyze.layout import layout_of
from hpc3d.analyze.pipeline import configuration
from hpc3d.analyze.tables import finite, means_of, ratio, slowest_seconds

# Student's t, two-sided 95 %, by degrees of freedom from 1.
T95 = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
    *(2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)
MODEL = ("layers", "hidden", "heads", "sequence")
PEERS = ("ranks", "p", "d", "batch", *MODEL)
CONSTANT = 0.1  # that the work of a rank may differ by in weak scaling


# Two runs


def difference_rows(one, other, keys=("category", "phase", "axis", "op")):
    """Seconds a rank and step in two open traces by keys of `breakdown`, and how much more they
    are in the other, that of the largest size first; the first row is the whole step.

    `low` and `high` bound the difference with 95 % confidence: Welch's interval over steps, which
    are taken for independent, with the degrees of freedom rounded down; None where a run has one
    step only.  The first step of a run is left out where there are others.
    """
    ours, theirs = (_by_step(trace, keys) for trace in (one, other))
    rows = [dict(what) | _difference(ours[what], theirs[what]) for what in {**ours, **theirs}]
    return sorted(rows, key=lambda row: (row["category"] != "step", -abs(row["difference_s"])))


def _by_step(trace, keys):
    """Seconds in each step of every row, which is named by its items (key, name)."""
    columns = dict.fromkeys(("category", *keys))
    steps = np.unique(trace.steps["step"])
    steps = steps[len(steps) > 1 :]
    found = defaultdict(lambda: np.zeros(len(steps)))
    whole = tuple((dict.fromkeys(columns, "") | {"category": "step"}).items())
    for row in breakdown(trace, ("step", *keys)):
        if row["step"] >= steps[0]:
            place = np.searchsorted(steps, row["step"])
            for what in (tuple((key, row[key]) for key in columns), whole):
                found[what][place] += row["seconds"]
    return found


def _difference(ours, theirs):
    difference = float(theirs.mean() - ours.mean())
    margin = _margin(ours, theirs) if min(len(ours), len(theirs)) > 1 else None
    return {
        "seconds": float(ours.mean()),
        "other_seconds": float(theirs.mean()),
        "difference_s": difference,
        "low": None if margin is None else difference - margin,
        "high": None if margin is None else difference + margin,
    }


def _margin(*samples):
    """Half of Welch's 95 % interval of the difference of two means."""
    parts = np.array([sample.var(ddof=1) / len(sample) for sample in samples])
    if not parts.any():
        return 0.0
    free = parts.sum() ** 2 / sum(parts**2 / [len(sample) - 1 for sample in samples])
    place = min(max(1, int(free + 1e-9)), len(T95)) - 1
    return float(T95[place] * np.sqrt(parts.sum()))


# Runs of many sizes


def run_row(trace):
    """Sizes and rates of a run, a row of `scaling_rows`; None for what is not known.

    step_s is the median over steps of the slowest rank; forward_s and backward_s are medians over
    steps of the mean over ranks.  average_step_s = (forward_s + backward_s) / batch is the
    "average step time" of arXiv:2105.14450: passes only, without the messages between stages, the
    sums of gradients over replicas and the optimiser, which step_s has.
    """
    config, ranks, layout = configuration(trace), trace.attrs["world_size"], layout_of(trace)
    _, step = np.unique(trace.steps["step"], return_inverse=True)
    forward, backward = (
        finite(np.median(means_of(step, trace.steps[name])))
        for name in ("forward_s", "backward_s")
    )
    seconds = float(np.median(slowest_seconds(trace)))
    tokens = float(np.median(trace.steps["tokens"]))
    sizes = _sizes(config)
    known = None not in (forward, backward, sizes["batch"])
    return {
        "run": layout.label,
        "layout": layout.kind,
        "family": layout.family,
        "ranks": ranks,
        "p": layout.sizes.get("p", 1),
        "d": layout.sizes.get("d", 1),
        **sizes,
        "forward_s": forward,
        "backward_s": backward,
        "average_step_s": (forward + backward) / sizes["batch"] if known else None,
        "step_s": seconds,
        "tokens_per_s": ratio(tokens, seconds),
        "tokens_per_s_rank": ratio(tokens, seconds * ranks),
        "flop_per_s": ratio(recorded_flops(trace), seconds),
    }


def _sizes(config):
    keys = ("batch", *MODEL)
    if config is None:
        return dict.fromkeys(keys)
    parts = vars(config.train) | vars(config.model)
    return {key: parts[key] for key in keys}


def scaling_rows(runs):
    """The rows of `run_row` with how they scale.

    `scaling` is strong where the run does the work of the first one, weak where its ranks do as
    much each (parameters of the blocks times tokens, within CONSTANT), other where neither holds.
    speedup is its rate of FLOP/s over that of the first run, for the same work the ratio of the
    step times, and efficiency that by the ratio of the ranks.
    """
    return [{**run, **_scaling(run, runs[0])} for run in runs]


def _scaling(run, first):
    speedup = ratio(run["flop_per_s"], first["flop_per_s"])
    return {
        "scaling": _kind_of_scaling(run, first),
        "speedup": speedup,
        "efficiency": ratio(speedup, run["ranks"] / first["ranks"]),
    }


def _kind_of_scaling(run, first):
    if all(run[key] == first[key] for key in ("batch", *MODEL)):
        return "strong"
    own, theirs = _work(run), _work(first)
    weak = None not in (own, theirs) and abs(own / theirs - 1) <= CONSTANT
    return "weak" if weak else "other"


def _work(run):
    """What a rank does in a step: 12 L h^2 parameters of the blocks times tokens, None unknown."""
    if run["batch"] is None:
        return None
    tokens = run["batch"] * run["sequence"]
    return 12 * run["layers"] * run["hidden"] ** 2 * tokens / run["ranks"]


def gain_rows(runs):
    """What a scheme of tensor parallelism gains over others, of rows of `run_row`.

    over_1d and over_2d say how many times the average step time of the best 1-D or 2-D run is
    this run's (arXiv:2105.14450: 2.32 and 1.57 for 3-D on 64 ranks), step_over_1d and
    step_over_2d the same of the whole steps.  Only runs of one model and batch on as many ranks,
    stages and replicas are compared.  No rows where no two of them differ in their scheme.
    """
    rows = [run | _gains(run, runs) for run in runs if run["family"]]
    return rows if any(row[key] for row in rows for key in ("over_1d", "over_2d")) else []


def _gains(run, runs):
    """How many times the best peers of another family take what a run takes."""
    peers = [each for each in runs if all(each[key] == run[key] for key in PEERS)]
    gains = {}
    for family in ("1d", "2d"):
        others = [each for each in peers if each["family"] == family != run["family"]]
        for name, key in ((f"over_{family}", "average_step_s"), (f"step_over_{family}", "step_s")):
            times = [each[key] for each in others if each[key] is not None]
            gains[name] = ratio(min(times, default=None), run[key])
    return gains
