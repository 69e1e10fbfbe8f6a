"""Access to the columns of the trace tables /events and /steps, and grouping by column values.

Tables are grouped by keys. The keys rank, stage and step are properties of a cell, which is one
rank in one step (a row of /steps). All other keys are properties of an event: the columns of
/events, and the mesh axis of its group.

Concurrent activities of a rank are counted only once. On a device, communication streams run
concurrently with computation, so their events are not assigned to a cell. The host time excludes
the time during which the device computes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from hpc3d.analyze.metrics.intervals import before, merged
from hpc3d.comm.mesh import EXPERTS
from hpc3d.trace.locate import NEWEST
from hpc3d.trace.previous_attempts import earlier_traces, latest_with_steps
from hpc3d.trace.reader import Trace
from hpc3d.trace.schema import STREAM
from hpc3d.trace.table import Table

if TYPE_CHECKING:
    from hpc3d.analyze.metrics.steady import Steady

_HOST, _COMPUTATION, COMMUNICATION, *_ = range(len(STREAM))
WORK = ("compute", "optimizer")
STAGES = "p"  # mesh axis of the pipeline stages
CELL_KEYS = ("rank", "stage", "step")


def recorded_steps(trace: Trace) -> str:
    """Return an error message clause that states the first and the last step of a trace.

    If earlier attempts of the run have their own traces, their steps are stated, too.
    """
    numbers = trace.steps["step"]
    text = "no steps" if not len(numbers) else f"steps {numbers.min()} to {numbers.max()}"
    parts = [f"the trace has {text}"]
    for path in earlier_traces(trace.path.parent) if trace.path.name == NEWEST else ():
        with suppress(ValueError), Trace(path) as earlier:
            if len(numbers := earlier.steps["step"]):
                parts.append(f"{path} has steps {numbers.min()} to {numbers.max()}")
    return "; ".join(parts)


def require_steps(trace: Trace) -> None:
    """Raise ValueError if the trace has no completed step.

    If an earlier attempt at this run completed a step, the error message recommends using the
    trace of that attempt.
    """
    if len(trace.steps):
        return
    before = latest_with_steps(trace.path.parent)
    remedy = f"use the trace of an earlier attempt, {before}" if before else "train for more steps"
    raise ValueError(f"{trace.path}: no step was completed; {remedy}")


def cells(trace: Trace) -> np.ndarray:
    """For each event, return the index of its row in /steps, or -1.

    The index is -1 for events outside completed steps and for events on communication streams.
    """
    require_steps(trace)
    steps, events = (
        (table["rank"].astype("i8") << 32) + table["step"] for table in (trace.steps, trace.events)
    )
    order = np.argsort(steps)
    row = np.searchsorted(steps[order], events)
    row = order[np.minimum(row, len(steps) - 1)]
    return np.where((steps[row] == events) & ~overlapped(trace), row, -1)


def overlapped(trace: Trace) -> np.ndarray:
    """Return a mask of the events on device streams that run concurrently with computation."""
    return trace.events["stream"] >= COMMUNICATION


def cell_values(trace: Trace, key: str) -> np.ndarray:
    """Return the value of a key (rank, stage or step) for each row of /steps.

    The stage of a rank is the highest stage in its events, because events before its first pass
    have stage 0.
    """
    if key != "stage":
        return trace.steps[key].astype("i8")
    ranks, steps = trace.events["rank"], trace.steps["rank"]
    stage = np.full(1 + max(ranks.max(initial=0), steps.max(initial=0)), -1)
    np.maximum.at(stage, ranks, trace.events["stage"])
    return stage[steps]


def event_values(trace: Trace, key: str, rows: slice | np.ndarray = slice(None)) -> np.ndarray:
    """Return the integer values of an event key in the given rows of /events."""
    if key != "axis":
        return trace.events[key][rows]
    numbers = {axis: number for number, axis in enumerate(_axes(trace))}
    axis = np.array([numbers[group.axis] for group in trace.groups] + [numbers[""]])
    return axis[trace.events["group"][rows]]


def own_time(trace: Trace) -> np.ndarray:
    """Return the exclusive time of each event in ns: its duration excluding nested events.

    For a host event, the time during which the device's compute stream computes or waits for data
    (a received block or an offloaded array) is also excluded.
    """
    duration, parent = trace.events["dur"], trace.events["parent"]
    nested = parent >= 0
    own = duration - np.bincount(parent[nested], duration[nested], len(duration))
    return own - _hidden(trace) if trace.events["stream"].any() else own


def _hidden(trace):
    """For each host event, return how long the device computes during the event, in ns."""
    events, hidden = trace.events, np.zeros(len(trace.events), "i8")
    start, end = events["t_start"], events["t_start"] + events["dur"]
    for rows in slices(events["rank"], trace.attrs["world_size"]):
        stream = events["stream"][rows]
        host, device = (rows.start + np.flatnonzero(stream == n) for n in (_HOST, _COMPUTATION))
        busy = merged(start[device], end[device])
        hidden[host] = before(busy, end[host]) - before(busy, start[host])
    return hidden


def labels(trace: Trace, key: str) -> dict[int, str | None]:
    """Return a dict from each code of the column `key` to its name (empty for numeric columns)."""
    if key == "axis":
        return dict(enumerate(_axes(trace)))
    return dict(enumerate(trace.strings)) if key == "name" else trace.events.labels(key)


def _axes(trace):
    return sorted({group.axis for group in trace.groups} | {""})


def with_label(events: Table, column: str, names: Iterable[str]) -> np.ndarray:
    """Return a mask of the events whose value in an enumerated column is one of `names`."""
    codes = [code for code, name in events.labels(column).items() if name in names]
    return np.isin(events[column], codes)


def named(trace: Trace, keys: Sequence[str], values: np.ndarray) -> list[dict[str, Any]]:
    """Convert each row of `values`, shape [rows, keys], to a dict from key to the value's name."""
    names = [labels(trace, key) for key in keys]
    return [
        {key: name.get(value, value) for key, name, value in zip(keys, names, row)}
        for row in values.tolist()
    ]


def rows_of(columns: Mapping[str, np.ndarray]) -> list[dict[str, Any]]:
    """Convert a table from a dict of columns to a list of rows with Python scalars."""
    lists = (column.tolist() for column in columns.values())
    return [dict(zip(columns, row)) for row in zip(*lists)]


def mean_rows(
    trace: Trace, keys: Sequence[str], rows: np.ndarray, measures: Mapping[str, np.ndarray]
) -> list[dict[str, Any]]:
    """Group events by `keys`, and return one row per group with means per rank and step.

    Parameters
    ----------
    rows
        Rows of /events.
    measures
        Dict from column to an array with one value per event in `rows`.
    """
    kinds, kind = combinations([event_values(trace, key, rows) for key in keys])
    means = {
        name: np.bincount(kind, values, len(kinds)) / len(trace.steps)
        for name, values in measures.items()
    }
    return [names | row for names, row in zip(named(trace, keys, kinds), rows_of(means))]


def combinations(columns: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Find the distinct rows of a table that consists of integer columns.

    Returns
    -------
    combinations
        Sorted distinct rows, shape [combinations, columns].
    index
        Index in `combinations` of each row of the table, shape [rows].
    """
    lowest = [int(column.min(initial=0)) for column in columns]
    sizes = [1 + int(column.max(initial=low)) - low for column, low in zip(columns, lowest)]
    shifted = [_shifted(*each) for each in zip(columns, lowest, sizes)]
    codes, which = np.unique(np.ravel_multi_index(shifted, sizes), return_inverse=True)
    return np.transpose(np.unravel_index(codes, sizes)) + lowest, which


def _shifted(column, low, size):
    """Subtract the minimum `low` from a column. The result has values from 0 to `size` - 1."""
    shifted = column.astype("i8") - low
    return shifted.astype("u4") if size <= 1 << 32 else shifted


def slices(ranks: np.ndarray, count: int) -> list[slice]:
    """For each of `count` ranks, return the slice of its rows in the sorted column `ranks`."""
    bounds = np.searchsorted(ranks, np.arange(count + 1))
    return [slice(*edge) for edge in pairwise(bounds.tolist())]


def coordinates(trace: Trace | Steady, axes: Sequence[str]) -> np.ndarray:
    """Return the mesh coordinates of each rank along `axes`, shape [ranks, len(axes)].

    The coordinate along an axis that the mesh lacks is 0.
    """
    ranks, sizes = trace.attrs["world_size"], trace.attrs["axis_sizes"]
    is_mesh = prod(sizes) == ranks  # not in a damaged trace
    found = np.unravel_index(np.arange(ranks), sizes) if is_mesh else ()
    columns = dict(zip(trace.attrs["axes"].split(), found))
    return np.stack([columns.get(axis, np.zeros(ranks, int)) for axis in axes], axis=1)


def peers(trace: Trace | Steady) -> np.ndarray:
    """Return a group number for each rank, shape [ranks]. The ranks of a group do the same work.

    These ranks have the same pipeline stage and the same share of the experts.
    """
    _, group = np.unique(coordinates(trace, (STAGES, EXPERTS)), axis=0, return_inverse=True)
    return group.reshape(-1)


def hosts(trace: Trace) -> dict[int, str | None]:
    """Return a dict from rank to host name. Unknown host names are `None`."""
    names, ranks = trace.strings, trace.ranks
    pairs = zip(ranks["rank"].tolist(), ranks["host_id"].tolist())
    return {rank: names[host] or None if 0 <= host < len(names) else None for rank, host in pairs}
