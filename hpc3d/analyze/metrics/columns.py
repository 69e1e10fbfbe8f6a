"""The columns of /events as analyses want them: by step, by name, in combinations.

Tables are made by keys.  The keys rank, stage and step belong to a cell, which is a rank in a
step, a row of /steps; the others, columns of /events or the axis of a group, belong to an event.

A rank's time counts once.  Where it computes on a device, calls run beside what it computes: they
belong to no cell.  The host's time is what is left of it while the device computes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from hpc3d.analyze.metrics.intervals import before, merged
from hpc3d.trace.schema import STREAM

if TYPE_CHECKING:
    from hpc3d.trace.reader import Trace
    from hpc3d.trace.table import Table

_HOST, _COMPUTATION, COMMUNICATION, *_ = range(len(STREAM))
WORK = ("compute", "optimizer")
CELL_KEYS = ("rank", "stage", "step")


def recorded_steps(trace: Trace) -> str:
    """The steps that a trace has, in words."""
    numbers = trace.steps["step"]
    if not len(numbers):
        return "it has no step"
    return f"it has steps {numbers.min()} to {numbers.max()}"


def cells(trace: Trace) -> np.ndarray:
    """The row of /steps in which each event lies, -1 for those in no completed step, and those
    that run beside."""
    if not len(trace.steps):
        raise ValueError(f"{trace.path}: no step was completed; train for more steps")
    steps, events = (
        (table["rank"].astype("i8") << 32) + table["step"] for table in (trace.steps, trace.events)
    )
    order = np.argsort(steps)
    place = np.searchsorted(steps[order], events)
    place = order[np.minimum(place, len(steps) - 1)]
    return np.where((steps[place] == events) & ~overlapped(trace), place, -1)


def overlapped(trace: Trace) -> np.ndarray:
    """Which events are calls as they run on a device, beside what it computes."""
    return trace.events["stream"] >= COMMUNICATION


def cell_values(trace: Trace, key: str) -> np.ndarray:
    """The value of a cell's key in each row of /steps.

    The stage of a rank is the highest that its events name: until the first pass they name 0.
    """
    if key != "stage":
        return trace.steps[key].astype("i8")
    ranks, steps = trace.events["rank"], trace.steps["rank"]
    stage = np.full(1 + max(ranks.max(initial=0), steps.max(initial=0)), -1)
    np.maximum.at(stage, ranks, trace.events["stage"])
    return stage[steps]


def event_values(trace: Trace, key: str, rows: slice | np.ndarray = slice(None)) -> np.ndarray:
    """The value of an event's key in the given rows of /events, a whole number."""
    if key != "axis":
        return trace.events[key][rows]
    numbers = {axis: number for number, axis in enumerate(_axes(trace))}
    axis = np.array([numbers[group.axis] for group in trace.groups] + [numbers[""]])
    return axis[trace.events["group"][rows]]


def own_time(trace: Trace) -> np.ndarray:
    """Duration of each event without those of the events that it encloses, in ns; of the host's
    without the time in which its device computes, or waits for a block."""
    duration, parent = trace.events["dur"], trace.events["parent"]
    nested = parent >= 0
    own = duration - np.bincount(parent[nested], duration[nested], len(duration))
    return own - _hidden(trace) if trace.events["stream"].any() else own


def _hidden(trace):
    """How much of each event of the host lies in those of computation on its device, in ns."""
    events, hidden = trace.events, np.zeros(len(trace.events), "i8")
    start, end = events["t_start"], events["t_start"] + events["dur"]
    for rows in slices(events["rank"], trace.attrs["world_size"]):
        stream = events["stream"][rows]
        host, device = (rows.start + np.flatnonzero(stream == n) for n in (_HOST, _COMPUTATION))
        busy = merged(start[device], end[device])
        hidden[host] = before(busy, end[host]) - before(busy, start[host])
    return hidden


def labels(trace: Trace, key: str) -> dict[int, str | None]:
    """{value: name} of a key; empty for a key whose values are numbers."""
    if key == "axis":
        return dict(enumerate(_axes(trace)))
    return dict(enumerate(trace.strings)) if key == "name" else trace.events.labels(key)


def _axes(trace):
    return sorted({group.axis for group in trace.groups} | {""})


def labelled(events: Table, column: str, names: Iterable[str]) -> np.ndarray:
    """Which events have one of these names in an enumerated column."""
    codes = [code for code, name in events.labels(column).items() if name in names]
    return np.isin(events[column], codes)


def named(trace: Trace, keys: Sequence[str], values: np.ndarray) -> list[dict[str, Any]]:
    """A row {key: name} for each row of `values` [rows, keys]."""
    names = [labels(trace, key) for key in keys]
    return [
        {key: name.get(value, value) for key, name, value in zip(keys, names, row)}
        for row in values.tolist()
    ]


def combinations(columns: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """The combinations of whole numbers that occur in the columns, [combinations, columns], in
    order; and the number of the one that each row has."""
    lowest = [int(column.min(initial=0)) for column in columns]
    sizes = [1 + int(column.max(initial=low)) - low for column, low in zip(columns, lowest)]
    shifted = [_shifted(*each) for each in zip(columns, lowest, sizes)]
    codes, which = np.unique(np.ravel_multi_index(shifted, sizes), return_inverse=True)
    return np.transpose(np.unravel_index(codes, sizes)) + lowest, which


def _shifted(column, low, size):
    """A column from 0 on, in a type that holds `size` values."""
    shifted = column.astype("i8") - low
    return shifted.astype("u4") if size <= 1 << 32 else shifted


def slices(ranks: np.ndarray, count: int) -> list[slice]:
    """The rows of each of `count` ranks in a sorted column of ranks."""
    bounds = np.searchsorted(ranks, np.arange(count + 1))
    return [slice(*edge) for edge in pairwise(bounds.tolist())]


def hosts(trace: Trace) -> dict[int, str | None]:
    """{rank: name of its host}, None where it is not known."""
    names, ranks = trace.strings, trace.ranks
    pairs = zip(ranks["rank"].tolist(), ranks["host_id"].tolist())
    return {rank: names[host] or None if 0 <= host < len(names) else None for rank, host in pairs}
