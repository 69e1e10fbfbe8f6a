"""Consistency checks of a trace, one rank at a time.

Events of a stream must not overlap unless they are nested, and each event must lie within its
parent and its step.
Invariants that involve several ranks are checked in hpc3d.trace.checks_across_ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from hpc3d.console.sanitize import counted
from hpc3d.trace.checks_across_ranks import Violation, collectives, labeled, messages
from hpc3d.trace.schema import LAYOUT, STREAM

if TYPE_CHECKING:
    from hpc3d.trace.reader import Trace

_COMMUNICATION = STREAM.index("communication")
# Attributes of a trace that are not instances of Table.
_REFERENCES = ("strings", "groups", "rank_ptr", "calibration")
_TABLES = ("ranks", "events", "steps", "memory", "evaluation", "validation", "experts", "routers")
# Tables whose path in the file differs from their attribute name.
_PATHS = {"clock_samples": "clock/samples", "clock_model": "clock/model"}


def violations(trace: Trace) -> list[str]:
    """Return one line for each violated invariant of an open trace.

    Each line states the number of affected rows and the first one. Missing data of an incomplete
    trace is not a violation. Times of different hosts are compared on corrected clocks, so a
    message may appear to arrive too early, by at most the clock uncertainty.
    """
    of_ranks = order, overlap, _nesting, inside, _steps, memory, _together, _evaluations, _loads
    return [*_damages(trace)] or [
        f"/{table}: {what}: {_where(getattr(trace, table), rows)}"
        for check in (*of_ranks, collectives, messages)
        for table, what, rows in check(trace)
        if len(rows)
    ]


def _damages(trace):
    """Yield a line for each table or column that is unreadable or has values below the minimum.

    Such data would break the other checks, which are then skipped.
    """
    for name in (*_REFERENCES, *_TABLES, *_PATHS, "prediction"):
        try:
            table = getattr(trace, name)
        except ValueError as error:
            yield str(error)
            continue
        columns = () if name in _REFERENCES else LAYOUT[_PATHS.get(name, name)].columns
        for column in columns:
            if column.name not in table:
                continue
            try:
                values = table[column.name]
            except ValueError as error:
                yield str(error)
                continue
            if column.least is not None and (values < column.least).any():
                low = np.nonzero(values < column.least)[0]
                what = f"{column.name} is less than {column.least}"
                yield f"/{name}: {what}: {_where(table, low)}"


def _where(table, rows):
    first = int(rows.min())
    keys = [name for name in ("rank", "step") if name in table]
    values = ", ".join(f"{name} {table[name, first : first + 1][0]}" for name in keys)
    return f"{counted(len(rows), 'row')}, the first is {first} ({values})"


def order(trace: Trace) -> Iterator[Violation]:
    """Check that events are sorted by rank and start time, and match /index/rank_ptr."""
    rank, start = trace.events["rank"], trace.events["t_start"]
    same = rank[1:] == rank[:-1]
    unsorted = np.where(same, start[1:] < start[:-1], rank[1:] < rank[:-1])
    yield "events", "rows are not sorted by rank and t_start", 1 + np.flatnonzero(unsorted)
    size = np.diff(trace.rank_ptr)
    elsewhere = np.flatnonzero(rank != np.repeat(np.arange(len(size)), size))
    yield "events", "the row is not in the range of its rank in /index/rank_ptr", elsewhere
    wrong = np.flatnonzero(trace.ranks["n_events"] != size)
    yield "ranks", "n_events is not the event count", wrong


def overlap(trace: Trace) -> Iterator[Violation]:
    """Check that no two events with the same rank, stream and parent overlap."""
    lasting = np.flatnonzero(trace.events["dur"] > 0)
    names = "rank", "stream", "parent", "t_start", "dur"
    columns = {name: trace.events[name][lasting] for name in names}
    line = np.lexsort([columns[name] for name in ("parent", "stream", "rank")])
    columns = {name: values[line] for name, values in columns.items()}
    together = np.all([np.diff(columns[name]) == 0 for name in names[:3]], axis=0)
    start, end = columns["t_start"], columns["t_start"] + columns["dur"]
    early = together & (start[1:] < end[:-1])
    yield "events", "the event begins before the previous event ends", lasting[line[1:][early]]


def _nesting(trace: Trace) -> Iterator[Violation]:
    """Check that each event follows its parent and lies within it, on the same rank and stream."""
    parent = trace.events["parent"]
    child = np.flatnonzero(parent >= 0)
    parent = parent[child]
    wrong = parent >= child
    for name in ("rank", "stream"):
        values = trace.events[name]
        wrong |= values[child] != values[parent]
    start, end = _interval(trace.events)
    wrong |= (start[child] < start[parent]) | (end[child] > end[parent])
    yield "events", "the event is not inside its parent", child[wrong]


def _interval(events):
    start = events["t_start"]
    return start, start + events["dur"]


def inside(trace: Trace) -> Iterator[Violation]:
    """Check that events lie within their steps, and that no stream is busy for longer than a step.

    Communication streams are exempt, because a communication call on a GPU may outlast its step.
    """
    events, step = trace.events, trace.steps
    cell = _cells(trace)
    known = np.flatnonzero(cell >= 0)
    cell, (start, end) = cell[known], (values[known] for values in _interval(events))
    outside = (start < step["t_start"][cell]) | (end > step["t_end"][cell])
    outside &= events["stream"][known] < _COMMUNICATION
    yield "events", "the event is not inside its step", known[outside]
    posted = events["posted"] > events["t_start"]
    yield "events", "the wait begins before the call is posted", np.flatnonzero(posted)
    stream, duration = events["stream"][known], end - start
    duration[events["parent"][known] >= 0] = 0
    length = step["t_end"] - step["t_start"]
    for number in np.unique(stream[stream < _COMMUNICATION]):
        busy = np.bincount(cell, duration * (stream == number), len(length))
        yield "steps", "the step is shorter than its events", np.flatnonzero(busy > length)


def _cells(trace):
    """For each event, return the index of its row in /steps, or -1 if it is outside any step."""
    events, steps = (
        (table["rank"].astype("i8") << 32) + table["step"] for table in (trace.events, trace.steps)
    )
    line = np.append(np.argsort(steps), -1)
    index = line[np.searchsorted(steps, events, sorter=line[:-1])]
    return np.where(np.append(steps, -1)[index] == events, index, -1)


def _steps(trace: Trace) -> Iterator[Violation]:
    """Check that a rank's steps do not overlap and, in a complete trace, exist on all ranks."""
    rank, number = trace.steps["rank"], trace.steps["step"]
    start, end = trace.steps["t_start"], trace.steps["t_end"]
    yield "steps", "the step ends before it begins", np.flatnonzero(end < start)
    line = np.lexsort((number, rank))
    together = np.diff(rank[line]) == 0
    early = start[line][1:] < end[line][:-1]
    yield "steps", "the step begins before the previous step ends", line[1:][together & early]
    if trace.attrs["complete"]:
        _, which, ranks = np.unique(number, return_inverse=True, return_counts=True)
        yield "steps", "some ranks lack the step", np.flatnonzero(ranks[which] != len(trace.ranks))


def memory(trace: Trace) -> Iterator[Violation]:
    """Check that the peak memory of each step is at least the memory in use at its end."""
    low = trace.memory["peak"] < trace.memory["bytes"]
    yield "memory", "the peak is less than the bytes at the end of the step", np.flatnonzero(low)


def _evaluations(trace: Trace) -> Iterator[Violation]:
    """Check that evaluations have increasing step numbers and that their events have step -1."""
    steps = trace.evaluation["step"]
    early = 1 + np.flatnonzero(np.diff(steps) <= 0)
    yield "evaluation", "the step is not greater than in the previous row", early
    lost = np.flatnonzero(~np.isin(trace.validation["step"], steps))
    yield "validation", "the evaluation of the step is missing", lost
    inside = labeled(trace.events, "phase", "evaluation") & (trace.events["step"] >= 0)
    yield "events", "an event of an evaluation belongs to a step", np.flatnonzero(inside)


def _loads(trace: Trace) -> Iterator[Violation]:
    """Check that no expert processes more tokens than were routed to it."""
    table = trace.experts
    yield (
        "experts",
        "the expert processes more tokens than were routed to it (kept > chosen)",
        np.flatnonzero(table["kept"] > table["chosen"]),
    )


def _together(trace: Trace) -> Iterator[Violation]:
    """Check that the memory kind `all` is consistent with the kinds that it includes.

    At the end of a step, the bytes of `all` must equal the sum over the included kinds. The peak
    of `all` must lie between the largest peak of an included kind and the sum of their peaks.
    """
    table = trace.memory
    keys = (table["rank"].astype("i8") << 32) + table["step"]
    cells, cell = np.unique(keys, return_inverse=True)
    whole, live, peak = labeled(table, "kind", "all"), table["bytes"], table["peak"]
    summed = ~whole & ~labeled(table, "kind", "offloaded")
    sums, peaks, highest = np.zeros((3, len(cells)), "i8")
    np.add.at(sums, cell[summed], live[summed])
    np.add.at(peaks, cell[summed], peak[summed])
    np.maximum.at(highest, cell[summed], peak[summed])
    low, high = peak < highest[cell], peak > peaks[cell]
    wrong = whole & (low | high | (live != sums[cell]))
    yield "memory", "the kind all is inconsistent with the other kinds", np.flatnonzero(wrong)
