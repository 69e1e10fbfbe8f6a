"""The numbers of a report: what a step costs, by phase, mesh axis and operation.

Means are over the rows of /steps, one a rank and step; sums are over the events inside of these
steps.  An event counts for its own time, without the events that it encloses, so that times add
up to the step's.  Tables are lists of rows, rows map columns to values in SI units; a value that
is not known is None.
"""

import tomllib

import numpy as np

KEYS = ("category", "phase", "axis", "op")


def run_label(attrs):
    """Scheme and mesh of a run, such as "3d, x=4 y=4 z=4"; without a scheme the run's id."""
    try:
        scheme = tomllib.loads(attrs["config"])["parallel"]["scheme"]
    except (tomllib.TOMLDecodeError, KeyError):
        scheme = attrs["run_id"]
    sizes = zip(attrs["axes"].split(), attrs["axis_sizes"])
    mesh = " ".join(f"{axis}={size}" for axis, size in sizes if size > 1)
    return f"{scheme}, {mesh or '1 rank'}"


def time_rows(trace):
    """Seconds, share of the step, calls, bytes received and flop, a rank and step.

    The last row is the time of the steps that no event accounts for.
    """
    inside = _inside_steps(trace)
    kinds, kind = _kinds(trace, inside)
    measures = {
        "seconds": _own_time(trace) * 1e-9,
        "calls": np.ones(len(inside)),
        "bytes": trace.events["bytes"],
        "flop": trace.events["flops"],
    }
    for name, values in measures.items():
        means = np.bincount(kind, values[inside], len(kinds)) / len(trace.steps)
        for row, mean in zip(kinds, means.tolist()):
            row[name] = mean
    step = float(_step_seconds(trace).mean())
    rest = dict.fromkeys(KEYS, "") | dict.fromkeys(measures, 0.0) | {"category": "unrecorded"}
    rest["seconds"] = step - sum(row["seconds"] for row in kinds)
    return [
        row
        | {
            "share": _ratio(row["seconds"], step),
            "flop_per_s": _ratio(row["flop"], row["seconds"]),
        }
        for row in [*kinds, rest]
    ]


def _inside_steps(trace):
    """Which events lie in a completed step of their rank."""
    events, steps = (
        (table["rank"].astype("i8") << 32) + table["step"] for table in (trace.events, trace.steps)
    )
    return np.isin(events, steps)


def _own_time(trace):
    """Duration of each event without those of the events that it encloses, in ns."""
    duration, parent = trace.events["dur"], _indices(trace, "parent", len(trace.events))
    nested = parent >= 0
    return duration - np.bincount(parent[nested], duration[nested], len(duration))


def _kinds(trace, inside):
    """The combinations of category, phase, axis and op that occur, and which each event has."""
    events = trace.events
    axes, axis = np.unique([group.axis for group in trace.groups] + [""], return_inverse=True)
    labels = {key: events.labels(key) for key in ("category", "phase", "op")}
    values = {key: events[key] for key in labels}
    labels["axis"] = dict(enumerate(axes.tolist()))
    values["axis"] = axis[_indices(trace, "group", len(trace.groups))]
    sizes = [256, 256, len(axes), 256]
    code = np.ravel_multi_index([values[key][inside] for key in KEYS], sizes)
    codes, kind = np.unique(code, return_inverse=True)
    rows = np.transpose(np.unravel_index(codes, sizes)).tolist()
    return [
        {key: labels[key].get(value, str(value)) for key, value in zip(KEYS, row)} for row in rows
    ], kind


def _indices(trace, column, size):
    """A column of /events that indexes a table of a file that is not trusted; -1 is none."""
    indices = trace.events[column]
    if len(indices) and not -1 <= indices.min() <= indices.max() < size:
        raise ValueError(f"{trace.path}: events/{column} points outside of its table; merge again")
    return indices


def step_row(trace, time):
    """Time of a step (of its slowest rank), its passes, tokens/s, communication in `time`."""
    steps, step = np.unique(trace.steps["step"], return_inverse=True)
    slowest = _slowest(trace)
    median = float(np.median(slowest))
    communication = [row for row in time if row["category"] in ("comm", "wait")]
    calls = [row for row in communication if row["category"] == "comm"]
    return {
        "ranks": trace.attrs["world_size"],
        "steps": len(steps),
        "step_s_min": float(slowest.min()),
        "step_s_median": median,
        "step_s_max": float(slowest.max()),
        "forward_s": _known(np.median(_means(step, trace.steps["forward_s"]))),
        "backward_s": _known(np.median(_means(step, trace.steps["backward_s"]))),
        "tokens_per_s": _ratio(float(np.median(trace.steps["tokens"])), median),
        "communication_share": _ratio(
            sum(row["seconds"] for row in communication), sum(row["seconds"] for row in time)
        ),
        "communication_calls": sum(row["calls"] for row in calls),
        "communication_bytes": sum(row["bytes"] for row in calls),
    }


def _slowest(trace):
    """Seconds of each completed step on its slowest rank."""
    steps, step = np.unique(trace.steps["step"], return_inverse=True)
    seconds = np.zeros(len(steps))
    np.maximum.at(seconds, step, _step_seconds(trace))
    return seconds


def median_step(trace):
    """A step that took the median time of all, but for step 0 where there are others."""
    steps = np.unique(trace.steps["step"])
    order = _slowest(trace).argsort(kind="stable")
    warm = order[steps[order] > 0] if steps[-1] > 0 else order
    return int(steps[warm[(len(warm) - 1) // 2]])


def peak_rows(trace):
    """The highest peak of each kind of memory over ranks and steps, and a rank that has it."""
    memory = {name: trace.memory[name] for name in ("kind", "rank", "peak")}
    labels = trace.memory.labels("kind")
    rows = []
    for kind in np.unique(memory["kind"]).tolist():
        chosen = np.flatnonzero(memory["kind"] == kind)
        highest = chosen[memory["peak"][chosen].argmax()]
        row = {"kind": labels.get(kind, str(kind)), "peak": int(memory["peak"][highest])}
        rows.append(row | {"rank": int(memory["rank"][highest])})
    return rows


def loss_rows(trace):
    """Loss and norm of the gradient by step, means over the ranks that know them."""
    steps, step = np.unique(trace.steps["step"], return_inverse=True)
    loss, norm = (_means(step, trace.steps[name]) for name in ("loss", "grad_norm"))
    return [
        {"step": number, "loss": _known(mean), "grad_norm": _known(length)}
        for number, mean, length in zip(steps.tolist(), loss, norm)
    ]


def comparison_rows(runs):
    """A row a run: its steps, its last loss and its largest difference from the first run's."""
    return [
        {"run": run.label}
        | run.tables["step"][0]
        | {"loss": run.tables["loss"][-1]["loss"]}
        | {"loss_difference": _loss_difference(run, runs[0])}
        for run in runs
    ]


def _loss_difference(run, first):
    reference = {row["step"]: row["loss"] for row in first.tables["loss"]}
    pairs = [(row["loss"], reference.get(row["step"])) for row in run.tables["loss"]]
    return max((abs(a - b) for a, b in pairs if None not in (a, b)), default=None)


def _step_seconds(trace):
    return (trace.steps["t_end"] - trace.steps["t_start"]) * 1e-9


def _means(index, values):
    """Mean of the values of each index that are numbers, or not a number if none is."""
    number = np.isfinite(values)
    count = np.bincount(index[number], minlength=index.max() + 1)
    total = np.bincount(index[number], values[number], minlength=index.max() + 1)
    return np.divide(total, count, out=np.full(len(count), np.nan), where=count > 0)


def _known(value):
    return float(value) if np.isfinite(value) else None


def _ratio(part, whole):
    return part / whole if whole else None
