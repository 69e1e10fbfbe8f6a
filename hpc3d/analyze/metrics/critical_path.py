"""The critical path of a step: what would have to be faster for the step to be faster.

The path is walked back from the last end of any rank.  Time in a row of the rank that it is on
counts for this row, and time between two rows for the host.  A row in which the rank is blocked in
a call counts, as communication, from the arrival that the call waited for (wait_states.py);
at this arrival the path goes on with the rank that arrived.  So the pieces lie end to end, and no
wait is among them.  On a device the path keeps to what it computes: calls that run beside, and
what the host does meanwhile, are not on it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from hpc3d.analyze.metrics.columns import (
    event_values,
    labels,
    overlapped,
    own_time,
    recorded_steps,
    slices,
)
from hpc3d.analyze.metrics.step import ratio

if TYPE_CHECKING:
    from hpc3d.analyze.metrics.wait_states import CallInstances
    from hpc3d.trace.reader import Trace

_HOST = {"category": "host", "axis": "", "layer": -1, "phase": "other", "op": "none", "name": ""}


class PathSegment(NamedTuple):
    """A piece of the path: what `rank` does from `start` to `end`, in seconds from the first begin
    of the step on any rank."""

    rank: int
    start: float
    end: float
    category: str
    axis: str
    layer: int
    phase: str
    op: str
    name: str

    @property
    def seconds(self) -> float:
        return self.end - self.start


def critical_path(trace: Trace, calls: CallInstances, step: int) -> list[PathSegment]:
    """The PathSegments of a step, in order, from the first begin to the last end of any rank.

    `calls` are `waits.calls_of(trace)`.  Of events that enclose others only these are seen.
    ValueError if the trace has no events of the step.
    """
    rows = _Rows(trace, calls, step)
    first, last, rank = _extent(trace, rows, step)
    pieces = np.array([*_Walk(rows, first).back(rank, last)], "i8").reshape(-1, 4)
    rank, start, end, row = pieces[::-1].T
    times = (rank, (start - first) * 1e-9, (end - first) * 1e-9)
    parts = zip(*(column.tolist() for column in times), _described(trace, row))
    return [PathSegment(*part, **what) for *part, what in parts]


class _Rows:
    """The rows of a step, by rank, on rank 0's clock, and for each the arrival that it waited for
    and of which rank: its own start if it waited for none."""

    def __init__(self, trace, calls, step):
        events, size = trace.events, len(trace.events)
        leaf, parent = np.ones(size + 1, bool), events["parent"]
        leaf[parent] = False  # parent -1 is the entry after the last event
        lasting = (events["step"] == step) & (own_time(trace) > 0) & ~overlapped(trace)
        self.row = rows = np.flatnonzero(leaf[:size] & lasting)
        if not len(rows):
            raise ValueError(f"{trace.path}: no events of step {step}; {recorded_steps(trace)}")
        self.rank, self.start = events["rank"][rows], events["t_global"][rows]
        self.end = self.start + events["dur"][rows]
        self.shift = self.start - events["t_start"][rows]
        self.until, self.by = self.start.copy(), self.rank.copy()
        place = np.full(size, -1)
        place[calls.row] = np.arange(len(calls.row))
        mine = np.flatnonzero(place[rows] >= 0)
        call = place[rows[mine]]
        waited = calls.until[call] > self.start[mine]
        mine, call = mine[waited], call[waited]
        self.until[mine], self.by[mine] = calls.until[call], calls.by[call]
        self.of = slices(self.rank, trace.attrs["world_size"])


def _extent(trace, rows, step):
    """First begin and last end of a step on rank 0's clock, and the rank that ends last.

    A begin is moved to that clock as the rank's first event is, an end as its last one.
    """
    steps = trace.steps
    columns = [steps[key][steps["step"] == step] for key in ("rank", "t_start", "t_end")]
    begins, ends = [], []
    for rank, start, end in zip(*(column.tolist() for column in columns)):
        shift = rows.shift[rows.of[rank]]
        if len(shift):
            begins.append(start + int(shift[0]))
            ends.append((end + int(shift[-1]), rank))
    if not ends:
        raise ValueError(f"{trace.path}: step {step} was not completed; {recorded_steps(trace)}")
    return min(begins), *max(ends)


class _Walk:
    """The way back.  It uses every row once at most, so it ends also where clocks disagree."""

    def __init__(self, rows, first):
        self.rows, self.first = rows, first
        self.unused = [part.stop for part in rows.of]

    def back(self, rank, now):
        """(rank, start, end, row of /events) of each piece, the last one first; row -1 is the
        host."""
        rows = self.rows
        while now > self.first:
            place = self.take(rank, now)
            end = self.first if place is None else min(now, rows.end[place])
            if end < now:
                yield rank, end, now, -1
            if place is None:
                return
            now = max(self.first, rows.start[place], min(end, rows.until[place]))
            if now < end:
                yield rank, now, end, rows.row[place]
            rank = rows.by[place]

    def take(self, rank, now):
        """The last unused row of a rank that starts before now, or None."""
        begin = self.rows.of[rank].start
        place = begin - 1 + np.searchsorted(self.rows.start[begin : self.unused[rank]], now)
        self.unused[rank] = max(begin, place)
        return place if place >= begin else None


def _described(trace, rows):
    """What the fields of _HOST are for each row of /events; those of _HOST for row -1."""
    columns = []
    for key, other in _HOST.items():
        names, values = labels(trace, key), event_values(trace, key, rows).tolist()
        columns.append(
            [other if row < 0 else names.get(value, value) for row, value in zip(rows, values)]
        )
    return [dict(zip(_HOST, each)) for each in zip(*columns)]


def path_rows(segments: Sequence[PathSegment], keys: Sequence[str]) -> list[dict[str, Any]]:
    """Seconds and share of a critical path by any fields of its PathSegments, the largest
    first."""
    seconds, whole = defaultdict(float), sum(each.seconds for each in segments)
    for each in segments:
        seconds[tuple(getattr(each, key) for key in keys)] += each.seconds
    return [
        dict(zip(keys, values)) | {"seconds": time, "share": ratio(time, whole)}
        for values, time in sorted(seconds.items(), key=lambda item: -item[1])
    ]
