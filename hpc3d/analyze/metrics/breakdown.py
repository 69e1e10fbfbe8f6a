"""Where the time of a step and the memory of a rank went.

An event counts for its own time, without the events that it encloses; only events in completed
steps count.  Times are seconds, means over ranks and steps.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from hpc3d.analyze.metrics.columns import (
    CELL_KEYS,
    WORK,
    cell_values,
    cells,
    combinations,
    event_values,
    hosts,
    labelled,
    named,
    overlapped,
    own_time,
    slices,
)
from hpc3d.analyze.metrics.intervals import in_common, merged
from hpc3d.analyze.metrics.step import ratio, step_seconds
from hpc3d.trace.trace_config import one_time

if TYPE_CHECKING:
    from hpc3d.analyze.metrics.wait_states import CallInstances
    from hpc3d.trace.reader import Trace

DISJOINT = ("compute_s", "wait_s", "transfer_s", "copy_s", "other_s", "unrecorded_s")


def breakdown(trace: Trace, keys: Sequence[str]) -> list[dict[str, Any]]:
    """Seconds of a step by any of category, phase, axis, op, name, layer, chunk, microbatch, and
    by rank, stage and step.

    Rows with one rank, stage and step, as far as these are keys, are means over the ranks and
    steps that they stand for, and add up to the mean step of these, of which `share` is a part:
    one row of each has what no event accounts for, of category `unrecorded`.  Without the key
    category the others are of category `recorded`.
    """
    whole = [key for key in CELL_KEYS if key in keys]
    parts = [key for key in keys if key not in CELL_KEYS]
    columns = [cell_values(trace, key) for key in whole]
    groups, group = combinations([*columns, np.zeros(len(trace.steps), int)])
    count = np.bincount(group)
    kinds, own, seconds = _sums(trace, parts, group)
    seconds /= count[own]
    step = np.bincount(group, step_seconds(trace)) / count
    rest = step - np.bincount(own, seconds, len(groups))
    where, nothing = named(trace, whole, groups), dict.fromkeys(parts, "")
    rows = [where[place] | row for place, row in zip(own.tolist(), kinds)]
    rows += [row | nothing | {"category": "unrecorded"} for row in where]
    times = np.append(seconds, rest).tolist(), np.append(step[own], step).tolist()
    return [
        row | {"seconds": time, "share": ratio(time, of)} for row, time, of in zip(rows, *times)
    ]


def _sums(trace, keys, group):
    """The combinations of keys in each group of steps, the groups, and their seconds in all."""
    cell, duration = cells(trace), own_time(trace)
    inside = np.flatnonzero(cell >= 0)
    columns = [event_values(trace, key, inside) for key in keys]
    kinds, kind = combinations([group[cell[inside]], *columns])
    seconds = np.bincount(kind, duration[inside], len(kinds)) * 1e-9
    rows = [{"category": "recorded"} | row for row in named(trace, keys, kinds[:, 1:])]
    return rows, kinds[:, 0], seconds


def rank_rows(trace: Trace, calls: CallInstances) -> list[dict[str, Any]]:
    """What a step is made of, one row per rank; `calls` are `waits.calls_of(trace)`.

    compute_s (with the optimiser), wait_s and transfer_s (`waits`: the two parts of the time in
    which the rank is blocked in a call, together exposed_s), copy_s (calls that are waited for
    later, without those of broadcasts, which block), other_s and unrecorded_s add up to step_s.
    outstanding_s is the part of compute_s in which a call of the rank was outstanding: posted and
    not waited for yet.  The call may have been over long before, so this is an upper bound of the
    communication that computation hides.  Where ranks count their CPU time, only the sum of
    wait_s and transfer_s is known, exposed_s; each of the two is None.
    """
    spent = defaultdict(lambda: defaultdict(float))
    for row in breakdown(trace, ("rank", "stage", "category")):
        spent[row["rank"], row["stage"]][row["category"]] += row["seconds"]
    early, wait = (_in_calls(calls, time) for time in (calls.blocked * ~calls.ending, calls.wait))
    outstanding, host, known = _outstanding(trace, calls), hosts(trace), one_time(trace)
    return [
        {"rank": rank, "host": host.get(rank), "stage": stage, "step_s": sum(times.values())}
        | _parts(times, early[rank], wait[rank] if known else None)
        | {"outstanding_s": outstanding[rank]}
        for (rank, stage), times in spent.items()
    ]


def copy_rows(trace: Trace) -> list[dict[str, Any]]:
    """What is copied to where arrays are offloaded and back, by name and phase: copies, their
    bytes and seconds, and how long the rank stood still for them, exposed_s: while it copied
    itself, or waited for what its device copied beside.
    """
    events = trace.events
    alone = (events["group"] < 0) & np.isin(events["step"], trace.steps["step"])
    copies, waits = (alone & labelled(events, "category", [name]) for name in ("copy", "wait"))
    rows = np.flatnonzero(copies | waits)
    if not copies.any():
        return []
    keys = "name", "phase"
    kinds, kind = combinations([events[key][rows] for key in keys])
    seconds, copied = events["dur"][rows] * 1e-9, copies[rows]
    measures = {
        "copies": copied,
        "bytes": events["bytes"][rows] * copied,
        "seconds": seconds * copied,
        "exposed_s": seconds * ~overlapped(trace)[rows],
    }
    means = {
        key: (np.bincount(kind, values, len(kinds)) / len(trace.steps)).tolist()
        for key, values in measures.items()
    }
    found = [dict(zip(means, values)) for values in zip(*means.values())]
    return [
        what | row | {"byte_per_s": ratio(row["bytes"], row["seconds"])}
        for what, row in zip(named(trace, keys, kinds), found)
    ]


def _parts(times, early, wait):
    """The parts of a rank's step from its `times` by category, of which `early` is blocked in
    calls of category copy, and its `wait` in calls, None if that is not known."""
    compute = sum(times.pop(category, 0.0) for category in WORK)
    blocked, waited = times.pop("comm", 0.0) + early, times.pop("wait", 0.0)
    copy, unrecorded = times.pop("copy", 0.0) - early, times.pop("unrecorded")
    other = sum(times.values(), 0.0)
    split = (None, None) if wait is None else (wait + waited, blocked - wait)
    parts = compute, *split, copy, other, unrecorded
    return dict(zip(DISJOINT, parts)) | {"exposed_s": blocked + waited}


def _steps_of_ranks(trace):
    return np.bincount(trace.steps["rank"], minlength=trace.attrs["world_size"])


def _in_calls(calls, time):
    """The `time` of calls in ns as seconds a rank and step, [ranks]."""
    steps = _steps_of_ranks(calls.trace)
    total = np.bincount(calls.rank, time * calls.inside, len(steps))
    return (total / np.maximum(1, steps) * 1e-9).tolist()


def _outstanding(trace, calls):
    """Seconds a step in which each rank computes while a call of its own is outstanding, [ranks].

    Calls that are outstanding at one time count once.
    """
    events, steps = trace.events, _steps_of_ranks(trace)
    work = np.flatnonzero(labelled(events, "category", WORK) & (cells(trace) >= 0))
    start, busy = events["t_global"][work], slices(events["rank"][work], len(steps))
    end = start + events["dur"][work]
    away = np.flatnonzero(calls.inside & (calls.posted < calls.start))
    away = away[np.argsort(calls.rank[away], kind="stable")]
    posted, waited = calls.posted[away], calls.start[away]
    seconds = [
        in_common(merged(posted[there], waited[there]), merged(start[here], end[here]))
        for there, here in zip(slices(calls.rank[away], len(steps)), busy)
    ]
    return (np.array(seconds) / np.maximum(1, steps) * 1e-9).tolist()


def imbalance_rows(trace: Trace) -> list[dict[str, Any]]:
    """The load imbalance, max / mean over ranks of the time in computation (with the optimiser),
    in the whole step (phase `all`) and by phase; and the rank with the most."""
    ranks = np.unique(trace.steps["rank"])
    work = defaultdict(lambda: np.zeros(len(ranks)))
    for row in breakdown(trace, ("rank", "phase", "category")):
        if row["category"] in WORK:
            for phase in ("all", row["phase"]):
                work[phase][np.searchsorted(ranks, row["rank"])] += row["seconds"]
    return [
        {
            "phase": phase,
            "mean_s": float(seconds.mean()),
            "max_s": float(seconds.max()),
            "imbalance": ratio(float(seconds.max()), float(seconds.mean())),
            "rank": int(ranks[seconds.argmax()]),
        }
        for phase, seconds in work.items()
    ]


def memory_rows(trace: Trace) -> list[dict[str, Any]]:
    """The highest peak of each kind of memory in bytes, one row per rank; the last row, of rank
    None, has their sums over the ranks."""
    memory, kinds = trace.memory, trace.memory.labels("kind")
    (ranks, rank), (codes, kind) = (
        np.unique(memory[key], return_inverse=True) for key in ("rank", "kind")
    )
    peak = np.zeros((len(ranks), len(codes)), "i8")
    np.maximum.at(peak, (rank, kind), memory["peak"])
    names = [kinds.get(code, str(code)) for code in codes.tolist()]
    table = zip([*ranks.tolist(), None], [*peak.tolist(), peak.sum(0).tolist()])
    return [{"rank": number, **dict(zip(names, peaks))} for number, peaks in table]
