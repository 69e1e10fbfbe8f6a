"""Breakdown of the step time, and memory peaks of each rank.

Times are exclusive: the time of an event excludes nested events. Only events in completed steps
are included. Times are means over ranks and steps, in seconds.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from hpc3d.analyze.metrics.columns import (
    CELL_KEYS,
    STAGES,
    WORK,
    cell_values,
    cells,
    combinations,
    coordinates,
    event_values,
    hosts,
    mean_rows,
    named,
    overlapped,
    own_time,
    peers,
    slices,
    with_label,
)
from hpc3d.analyze.metrics.intervals import in_common, merged
from hpc3d.analyze.metrics.step import ratio, step_seconds
from hpc3d.trace.trace_config import one_time

if TYPE_CHECKING:
    from hpc3d.analyze.metrics.wait_states import CallInstances
    from hpc3d.trace.reader import Trace

_ROUNDING_S = 1e-13  # bound on the rounding errors of step times, in s
DISJOINT = ("compute_s", "wait_s", "transfer_s", "copy_s", "other_s", "unrecorded_s")


def breakdown(trace: Trace, keys: Sequence[str]) -> list[dict[str, Any]]:
    """Break down the step time by `keys`.

    The valid keys are category, phase, axis, op, name, layer, chunk, microbatch, rank, stage and
    step. The keys rank, stage and step, if present, divide the steps of all ranks into groups;
    otherwise, all steps form a single group. The times in a group add up to its mean step time,
    and `share` is relative to this mean. One result row per group has category `unrecorded`, for
    the time that is not covered by any event. If category is not a key, the other result rows have
    category `recorded`.
    """
    of_cells = [key for key in CELL_KEYS if key in keys]
    of_events = [key for key in keys if key not in CELL_KEYS]
    columns = [cell_values(trace, key) for key in of_cells]
    groups, group = combinations([*columns, np.zeros(len(trace.steps), int)])
    count = np.bincount(group)
    kinds, group_of_kind, seconds = _totals(trace, of_events, group)
    seconds /= count[group_of_kind]
    step = np.bincount(group, step_seconds(trace)) / count
    rest = step - np.bincount(group_of_kind, seconds, len(groups))
    cell_rows, no_keys = named(trace, of_cells, groups), dict.fromkeys(of_events, "")
    rows = [cell_rows[index] | row for index, row in zip(group_of_kind.tolist(), kinds)]
    rows += [row | no_keys | {"category": "unrecorded"} for row in cell_rows]
    times = np.append(seconds, rest).tolist(), np.append(step[group_of_kind], step).tolist()
    return [
        row | {"seconds": time, "share": ratio(time, of)} for row, time, of in zip(rows, *times)
    ]


def _totals(trace, keys, group):
    """Sum the event times for each combination of group and key values.

    Returns the table rows, the group index of each row, and the times in seconds.
    """
    cell, duration = cells(trace), own_time(trace)
    inside = np.flatnonzero(cell >= 0)
    columns = [event_values(trace, key, inside) for key in keys]
    kinds, kind = combinations([group[cell[inside]], *columns])
    seconds = np.bincount(kind, duration[inside], len(kinds)) * 1e-9
    rows = [{"category": "recorded"} | row for row in named(trace, keys, kinds[:, 1:])]
    return rows, kinds[:, 0], seconds


def rank_rows(trace: Trace, calls: CallInstances) -> list[dict[str, Any]]:
    """Return the breakdown of the mean step time of each rank.

    compute_s (including the optimizer), wait_s, transfer_s, copy_s, other_s and unrecorded_s add
    up to step_s. exposed_s = wait_s + transfer_s is the time during which the rank is blocked in
    calls (see wait_states.py). copy_s is the time that the rank needs to start nonblocking calls
    (calls with a deferred wait). Broadcasts are excluded, because starting a broadcast blocks the
    rank.

    outstanding_s is the portion of compute_s during which a call of the rank was outstanding:
    posted, but not yet waited for. It is an upper bound on the communication overlapped with
    computation, because the call may have completed earlier.

    If the trace contains CPU times, only exposed_s is known; wait_s and transfer_s are `None`.

    Parameters
    ----------
    calls
        Result of `calls_of(trace)`.
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
    """Return the count, bytes, time and exposed time of offload copies, by name and phase.

    Times are in seconds per rank and step. exposed_s is the time during which the rank is blocked,
    because the CPU performs the copy or waits for the device to complete it.
    """
    events = trace.events
    local = (events["group"] < 0) & np.isin(events["step"], trace.steps["step"])
    copies, waits = (local & with_label(events, "category", [name]) for name in ("copy", "wait"))
    rows = np.flatnonzero(copies | waits)
    if not copies.any():
        return []
    seconds, copied = events["dur"][rows] * 1e-9, copies[rows]
    measures = {
        "copies": copied,
        "bytes": events["bytes"][rows] * copied,
        "seconds": seconds * copied,
        "exposed_s": seconds * ~overlapped(trace)[rows],
    }
    return [
        row | {"byte_per_s": ratio(row["bytes"], row["seconds"])}
        for row in mean_rows(trace, ("name", "phase"), rows, measures)
    ]


def _parts(times, early, wait):
    """Break down the step time of a rank into the columns of `DISJOINT` and exposed_s.

    Parameters
    ----------
    times
        Dict from category to seconds.
    early
        Seconds during which the rank is blocked in calls that start broadcasts, excluding the
        later waits for the results. In `times`, the category copy includes these calls.
    wait
        Seconds spent in calls before the last member arrives, or None if unknown.
    """
    compute = sum(times.pop(category, 0.0) for category in WORK)
    blocked, waited = times.pop("comm", 0.0) + early, times.pop("wait", 0.0)
    copy, unrecorded = times.pop("copy", 0.0) - early, times.pop("unrecorded")
    other = sum(times.values(), 0.0)
    split = (None, None) if wait is None else (wait + waited, blocked - wait)
    parts = map(_clipped, (compute, *split, copy, other, unrecorded))
    return dict(zip(DISJOINT, parts)) | {"exposed_s": blocked + waited}


def _clipped(seconds):
    """Return `seconds`, or 0 if it is only a rounding error: the clock's resolution is 1 ns."""
    return 0.0 if seconds is not None and abs(seconds) < _ROUNDING_S else seconds


def _steps_of_ranks(trace):
    return np.bincount(trace.steps["rank"], minlength=trace.attrs["world_size"])


def _in_calls(calls, time):
    """Return the sum of `time` (in ns, one value per call) for each rank, in seconds per step."""
    steps = _steps_of_ranks(calls.trace)
    total = np.bincount(calls.rank, time * calls.inside, len(steps))
    return (total / np.maximum(1, steps) * 1e-9).tolist()


def _outstanding(trace, calls):
    """Return the compute time of each rank during which at least one of its calls is outstanding.

    The result is a list with one value per rank, in seconds per step.
    """
    events, steps = trace.events, _steps_of_ranks(trace)
    work = np.flatnonzero(with_label(events, "category", WORK) & (cells(trace) >= 0))
    start, busy = events["t_global"][work], slices(events["rank"][work], len(steps))
    end = start + events["dur"][work]
    pending = np.flatnonzero(calls.inside & (calls.posted < calls.start))
    pending = pending[np.argsort(calls.rank[pending], kind="stable")]
    posted, waited = calls.posted[pending], calls.start[pending]
    seconds = [
        in_common(merged(posted[sent], waited[sent]), merged(start[computed], end[computed]))
        for sent, computed in zip(slices(calls.rank[pending], len(steps)), busy)
    ]
    return (np.array(seconds) / np.maximum(1, steps) * 1e-9).tolist()


def imbalance_rows(trace: Trace) -> list[dict[str, Any]]:
    """Return the compute imbalance of the full step (phase `all`) and of each phase.

    The imbalance is the maximum over the ranks that do the same work divided by their mean, for
    the group of ranks in which it is largest; `rank` is the rank with this maximum. Without two
    ranks that do the same work, it is `None`, and `rank` has the longest compute time.
    stage_imbalance is the mean time of a rank of the slowest pipeline stage, `stage`, divided by
    the mean over the stages, or `None` if there is only one stage. Compute time includes the
    optimizer.
    """
    ranks = np.unique(trace.steps["rank"])
    group, stage = peers(trace)[ranks], coordinates(trace, (STAGES,))[ranks, 0]
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
            **_imbalance(ranks, seconds, group),
            **_stage_imbalance(seconds, stage),
        }
        for phase, seconds in work.items()
    ]


def _imbalance(ranks, seconds, group):
    count = np.bincount(group)[group]
    mean = np.bincount(group, seconds)[group] / count
    share = np.divide(seconds, mean, out=np.ones(len(ranks)), where=mean > 0)
    index = int((share if count.max() > 1 else seconds).argmax())
    known = count.max() > 1 and seconds.any()
    return {"imbalance": float(share[index]) if known else None, "rank": int(ranks[index])}


def _stage_imbalance(seconds, stage):
    stages, index = np.unique(stage, return_inverse=True)
    means = np.bincount(index, seconds) / np.bincount(index)
    if len(stages) < 2:
        return {"stage_imbalance": None, "stage": None}
    imbalance = ratio(float(means.max()), float(means.mean()))
    return {"stage_imbalance": imbalance, "stage": int(stages[means.argmax()])}


def memory_rows(trace: Trace) -> list[dict[str, Any]]:
    """Return one row per rank with its peak memory of each kind, in bytes.

    The last row, with rank None, is the sum over ranks.
    """
    memory, kinds = trace.memory, trace.memory.labels("kind")
    (ranks, rank), (codes, kind) = (
        np.unique(memory[key], return_inverse=True) for key in ("rank", "kind")
    )
    peak = np.zeros((len(ranks), len(codes)), "i8")
    np.maximum.at(peak, (rank, kind), memory["peak"])
    names = [kinds.get(code, str(code)) for code in codes.tolist()]
    table = zip([*ranks.tolist(), None], [*peak.tolist(), peak.sum(0).tolist()])
    return [{"rank": number, **dict(zip(names, peaks))} for number, peaks in table]
