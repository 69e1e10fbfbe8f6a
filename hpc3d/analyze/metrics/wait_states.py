"""Wait states: how long each rank waits in calls, and for which other rank.

A call instance is a collective, identified by (group, number), or a message with its send and
receive, identified by (group, sender, receiver, number). A member arrives when it makes its call.
The member is blocked from the start of its wait for the result until it has the result. The
blocked time is split into two components, on the clock of rank 0:

    wait       time before the last arrival: max(0, min(end, last arrival) - start)
    transfer   remaining time

The wait corresponds to the Scalasca patterns "wait at NxN", "late sender" and "late receiver"
(Geimer et al. 2010). Starting a broadcast also blocks, because the size of the block is sent
before the block itself. If the start of a broadcast was recorded as a separate event (category
copy), the call instance includes this event.

A send, broadcast or reduction may end before the last arrival, because it does not depend on all
members: a receiver of a broadcast only waits for the root, and a sender does not wait for any
rank. If a call ended before the arrival of a rank on which it depends, the clocks of the two ranks
disagree. Such a call is a violation, and the time difference is a lower bound on the clock error.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from hpc3d.analyze.metrics.columns import (
    COMMUNICATION,
    cells,
    combinations,
    event_values,
    named,
    rows_of,
    with_label,
)
from hpc3d.trace.schema import MESSAGES

if TYPE_CHECKING:
    from hpc3d.analyze.metrics.steady import Steady
    from hpc3d.trace.reader import Trace

# Operations that may complete on a rank before all members have made their calls.
_UNBOUND = ("send", "broadcast", "reduce")


@dataclass(frozen=True)
class CallInstances:
    """Calls of a trace, grouped by call instance. Times are in ns on the clock of rank 0.

    Attributes
    ----------
    row
        Row of each call in /events.
    ending
        True for the event that completes a call; false for the separate event that records the
        start of a broadcast.
    inside
        True if the call is in a completed step.
    rank
        Rank of each call.
    posted, start, end
        Time when the call was made, start of its wait, and end of its wait.
    instance
        Index of the call instance of each call.
    until, by
        Arrival time and number of the rank that each call waited for.
    first, last, late
        For each call instance: index of the first call, time of the last arrival, and rank that
        arrived last.
    """

    trace: Trace | Steady
    row: np.ndarray
    ending: np.ndarray
    inside: np.ndarray
    rank: np.ndarray
    posted: np.ndarray
    start: np.ndarray
    end: np.ndarray
    instance: np.ndarray
    until: np.ndarray
    by: np.ndarray
    first: np.ndarray
    last: np.ndarray
    late: np.ndarray

    @property
    def blocked(self) -> np.ndarray:
        return self.end - self.start

    @property
    def wait(self) -> np.ndarray:
        return np.maximum(0, np.minimum(self.end, self.until) - self.start)

    @property
    def violation(self) -> np.ndarray:
        """Return the violation of each call in ns: the time from its end to a later arrival.

        This is the arrival of the rank that the call waited for. If the call ended after the
        arrival, the violation is 0.
        """
        return np.maximum(0, self.until - self.end)

    def among(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Find the events in the given rows of /events that are calls.

        Returns
        -------
        position
            Position in `rows` of each event that is a call.
        call
            Index of the call that each of these events belongs to.
        """
        call_of_row = np.full(len(self.trace.events), -1)
        call_of_row[self.row] = np.arange(len(self.row))
        position = np.flatnonzero(call_of_row[rows] >= 0)
        return position, call_of_row[rows[position]]

    @property
    def known(self) -> np.ndarray:
        """For each call instance, return the number of recorded calls."""
        return np.add.reduceat(self.ending, self.first, dtype=int)

    @property
    def members(self) -> np.ndarray:
        """For each call instance, return the number of participating ranks."""
        sizes = np.array([len(group.members) for group in self.trace.groups], int)
        row, events = self.row[self.first], self.trace.events
        message = with_label(events, "op", MESSAGES)[row]
        return np.where(message, 2, sizes[events["group"][row]])


def calls_of(trace: Trace | Steady) -> CallInstances:
    """Group the calls of an open trace by call instance.

    The calls are the events of category comm with a sequence number, and the events of category
    copy that start a broadcast.
    """
    row, instance = _call_instances(trace)
    events, start = trace.events, trace.events["t_global"][row]
    end, rank = start + events["dur"][row], events["rank"][row]
    posted = events["posted"][row] + start - events["t_start"][row]
    first = np.flatnonzero(np.diff(instance, prepend=-1))
    last = np.maximum.reduceat(posted, first)
    latest = _first_where(posted == last[instance], first)
    source = _awaited_call(trace, row, instance, first, latest, end <= last[instance])
    return CallInstances(
        trace=trace,
        row=row,
        ending=events["seq"][row] >= 0,
        inside=cells(trace)[row] >= 0,
        rank=rank,
        posted=posted,
        start=start,
        end=end,
        instance=instance,
        until=posted[source],
        by=rank[source],
        first=first,
        last=last,
        late=rank[latest],
    )


def _call_instances(trace):
    """Return the rows of /events that are calls, and the index of each row's call instance.

    The rows are sorted by call instance.
    """
    events, ranks = trace.events, trace.attrs["world_size"]
    counted = (events["group"] >= 0) & (events["seq"] >= 0)
    row = np.flatnonzero(with_label(events, "category", ["comm"]) & counted)
    group, rank, peer = (events[name][row].astype("i8") for name in ("group", "rank", "peer"))
    sends, receives = (with_label(events, "op", [name])[row] for name in MESSAGES)
    sender = np.where(sends, rank, np.where(receives, peer, -1))
    receiver = np.where(sends, peer, np.where(receives, rank, -1))
    channel = (group * (ranks + 1) + sender + 1) * (ranks + 1) + receiver + 1
    number = events["seq"][row]
    early, index = _broadcast_calls(events, row)
    row, channel, number = (
        np.concatenate(parts)
        for parts in ((early, row), (channel[index], channel), (number[index], number))
    )
    order = np.lexsort((number, channel))
    new = np.diff(channel[order], prepend=-1) | np.diff(number[order], prepend=-1)
    return row[order], np.cumsum(new != 0) - 1


def _broadcast_calls(events, row):
    """Return the events that start broadcasts, and the indices in `row` of the matching waits.

    These events have the category copy. The wait of such an event has the same rank and group, and
    its `posted` time is the start of the event.
    """
    kind = with_label(events, "op", ["broadcast"])
    calls = with_label(events, "category", ["copy"]) & kind & (events["seq"] < 0)
    calls &= events["stream"] < COMMUNICATION
    called = np.flatnonzero(calls)
    waits = np.flatnonzero(kind[row] & (events["posted"] < events["t_start"])[row])
    both = np.concatenate([called, row[waits]])
    times = np.concatenate([events["t_start"][called], events["posted"][row[waits]]])
    # `combinations` requires small integers, so replace each time with its position in sorted
    # order.
    _, when = np.unique(times, return_inverse=True)
    _, key = combinations([events["rank"][both], events["group"][both], when])
    _, call, end = np.intersect1d(key[: len(called)], key[len(called) :], return_indices=True)
    return called[call], waits[end]


def _first_where(true, first):
    """For each call instance, return the index of the first call selected by the mask `true`.

    If the mask selects no call of an instance, the index is the total number of calls.
    """
    index = np.where(true, np.arange(len(true)), len(true))
    return np.minimum.reduceat(index, first)


def _awaited_call(trace, row, instance, first, latest, early):
    """Return the index of the call that each call waited for.

    A call normally waits for the last call of its instance. If a call of an _UNBOUND operation
    ended before that last call was made (`early`), the result is the index of the root's call for
    a broadcast, or the index of the call itself for any other operation. The root of a reduction
    always waits for the last call.
    """
    events, index = trace.events, np.arange(len(row))
    at_root = (events["rank"] == events["peer"])[row]
    reduces, broadcasts, unbound = (
        with_label(events, "op", ops)[row] for ops in (["reduce"], ["broadcast"], _UNBOUND)
    )
    root = _first_where(at_root & broadcasts, first)[instance]
    own = np.where(root < len(row), root, index)
    return np.where(early & unbound & ~(reduces & at_root), own, latest[instance])


# Tables of a report


def wait_rows(calls: CallInstances, keys: Sequence[str] = ("axis", "op")) -> list[dict[str, Any]]:
    """Return the number and total time of calls, per rank and step, grouped by `keys`.

    blocked_s = wait_s + transfer_s is the time in calls. `violations` is the total number of calls
    that, according to the synchronized clocks, ended before an arrival on which they depend.
    `worst_s` is the largest violation in seconds.
    """
    row = calls.row[calls.inside]
    columns = [event_values(calls.trace, key, row) for key in keys]
    kinds, kind = combinations([*columns, np.zeros(len(row), int)])
    blocked, wait, violation = (
        getattr(calls, name)[calls.inside] for name in ("blocked", "wait", "violation")
    )
    worst = np.zeros(len(kinds), "i8")
    np.maximum.at(worst, kind, violation)
    per = 1 / len(calls.trace.steps)
    columns = {
        "calls": np.bincount(kind, calls.ending[calls.inside], len(kinds)) * per,
        "blocked_s": np.bincount(kind, blocked, len(kinds)) * per * 1e-9,
        "wait_s": np.bincount(kind, wait, len(kinds)) * per * 1e-9,
        "transfer_s": np.bincount(kind, blocked - wait, len(kinds)) * per * 1e-9,
        "violations": np.bincount(kind, violation > 0, len(kinds)).astype(int),
        "worst_s": worst * 1e-9,
    }
    return [names | row for names, row in zip(named(calls.trace, keys, kinds), rows_of(columns))]


def incomplete(calls: CallInstances) -> int:
    """Return the number of call instances in which a member's call was not recorded.

    The last arrival of such an instance is uncertain.
    """
    return int((calls.known < calls.members).sum())
