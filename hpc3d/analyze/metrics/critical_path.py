"""Critical path of a step: the chain of dependent operations that determines the step time.

The path is traced backward in time, starting on the rank that finishes the step last. Time inside
an event of the current rank is attributed to this event, and time between two events to the host.
If a call waited for another rank to arrive, only the time after this arrival is attributed to the
call (wait_states.py), and the path continues on the other rank. The segments are therefore
contiguous and contain no waiting. On a device, the path excludes communication streams and host
work that run concurrently with computation.
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
    """Segment of the critical path on one rank.

    Times are in seconds since the first rank started the step.
    """

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
    """Return the segments of the critical path of a step in chronological order.

    The path extends from the time when the first rank starts the step to the time when the last
    rank ends it. Only innermost events are considered, not the events that enclose them.

    Parameters
    ----------
    calls
        Result of `calls_of(trace)`.

    Raises
    ------
    ValueError
        If the trace has no events of the step, or the step was not completed.
    """
    rows = _Rows(trace, calls, step)
    first, last, rank = _extent(trace, rows, step)
    pieces = np.array([*_Walk(rows, first).back(rank, last)], "i8").reshape(-1, 4)
    rank, start, end, row = pieces[::-1].T
    times = (rank, (start - first) * 1e-9, (end - first) * 1e-9)
    parts = zip(*(column.tolist() for column in times), _described(trace, row))
    return [PathSegment(*part, **what) for *part, what in parts]


class _Rows:
    """Events of a step, grouped by rank, with times on the clock of rank 0.

    `by` is the rank that each event waited for, and `until` is the time when this rank arrived. If
    an event did not wait, `by` is the event's rank, and `until` is the event's start time.
    """

    def __init__(self, trace, calls, step):
        events, size = trace.events, len(trace.events)
        leaf, parent = np.ones(size + 1, bool), events["parent"]
        leaf[parent] = False  # the value -1 (no parent) indexes the unused last entry
        lasting = (events["step"] == step) & (own_time(trace) > 0) & ~overlapped(trace)
        self.row = rows = np.flatnonzero(leaf[:size] & lasting)
        if not len(rows):
            raise ValueError(f"{trace.path}: no events of step {step}; {recorded_steps(trace)}")
        self.rank, self.start = events["rank"][rows], events["t_global"][rows]
        self.end = self.start + events["dur"][rows]
        self.shift = self.start - events["t_start"][rows]
        self.until, self.by = self.start.copy(), self.rank.copy()
        mine, call = calls.among(rows)
        waited = calls.until[call] > self.start[mine]
        mine, call = mine[waited], call[waited]
        self.until[mine], self.by[mine] = calls.until[call], calls.by[call]
        self.of = slices(self.rank, trace.attrs["world_size"])


def _extent(trace, rows, step):
    """Return the earliest start and the latest end of a step, and the rank that finishes last.

    The times are in ns on the clock of rank 0. The clock offset of a rank is taken from its first
    event for the start and from its last event for the end.
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
    """Traversal of the critical path, backward in time.

    Each event is visited at most once, so the traversal terminates even if the clocks disagree.
    """

    def __init__(self, rows, first):
        self.rows, self.first = rows, first
        self.unused = [part.stop for part in rows.of]

    def back(self, rank, now):
        """Yield (rank, start, end, row of /events) for each segment, in reverse order.

        The row is -1 for host time between events.
        """
        rows = self.rows
        while now > self.first:
            index = self.take(rank, now)
            end = self.first if index is None else min(now, rows.end[index])
            if end < now:
                yield rank, end, now, -1
            if index is None:
                return
            now = max(self.first, rows.start[index], min(end, rows.until[index]))
            if now < end:
                yield rank, now, end, rows.row[index]
            rank = rows.by[index]

    def take(self, rank, now):
        """Return the index of a rank's last unvisited event that starts before `now`, or None."""
        begin = self.rows.of[rank].start
        index = begin - 1 + np.searchsorted(self.rows.start[begin : self.unused[rank]], now)
        self.unused[rank] = max(begin, index)
        return index if index >= begin else None


def _described(trace, rows):
    """Return the labels of the given rows of /events, as one dict per row with the keys of _HOST.

    Row -1 stands for host time between events; its labels are the values of _HOST.
    """
    columns = []
    for key, other in _HOST.items():
        names, values = labels(trace, key), event_values(trace, key, rows).tolist()
        columns.append(
            [other if row < 0 else names.get(value, value) for row, value in zip(rows, values)]
        )
    return [dict(zip(_HOST, each)) for each in zip(*columns)]


def path_rows(segments: Sequence[PathSegment], keys: Sequence[str]) -> list[dict[str, Any]]:
    """Return the total time and the share of each group of path segments, largest first.

    Segments with equal fields `keys` form a group. A share is a fraction of the time of all
    segments.
    """
    seconds, length = defaultdict(float), sum(each.seconds for each in segments)
    for each in segments:
        seconds[tuple(getattr(each, key) for key in keys)] += each.seconds
    return [
        dict(zip(keys, values)) | {"seconds": time, "share": ratio(time, length)}
        for values, time in sorted(seconds.items(), key=lambda item: -item[1])
    ]
