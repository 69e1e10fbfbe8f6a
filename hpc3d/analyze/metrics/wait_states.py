"""How long ranks wait for each other, and for whom.

What ranks do together is a call instance: a collective, which (group, number) names, or a message
with its two ends, which (group, sender, receiver, number) names.  A member arrives when it makes
its call, and is blocked from when it waits for the result until it has it.  Of this time

    wait       lies before the last arrival: max(0, min(end, last arrival) - start)
    transfer   is the rest

on the clock of rank 0: wait at N x N, late sender and late receiver of Scalasca (Geimer et al.
2010).  A broadcast blocks when it is called, too: how much is coming goes ahead of the block.  So
the row of its call, where it has one of its own (category copy), belongs to the instance as well.

A send, a broadcast and a reduction may end before the last arrival.  Then the call did
not wait for it, but for what it needs: a block that is broadcast for its root, the others for
nobody.  A call that ended before an arrival that it needs is a violation: the clocks disagree, by
the time between the two at least.
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
    labelled,
    named,
)
from hpc3d.trace.schema import MESSAGES

if TYPE_CHECKING:
    from hpc3d.analyze.metrics.steady import Steady
    from hpc3d.trace.reader import Trace

_UNBOUND = ("send", "broadcast", "reduce")  # may end before all have arrived
_EARLY = ("broadcast",)  # may wait when they are called


@dataclass(frozen=True)
class CallInstances:
    """The calls of a trace, those of one instance next to each other.

    Times are ns on rank 0's clock.  Of each call: its `row` in /events, whether this is where it
    ends (`ending`) or the call of a broadcast that is waited for later, whether it is `inside` of
    a completed step, its `rank`, when it was `posted`, when the rank began to wait (`start`) and
    had the result (`end`), its `instance`, and the arrival that it waited for: when (`until`) and
    of which rank (`by`).  Of each instance: its `first` call, the `last` arrival, and the rank
    that was `late`.
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
        """By how much each call ended before an arrival that it needs, 0 for most."""
        return np.maximum(0, self.until - self.end)

    @property
    def known(self) -> np.ndarray:
        """How many calls of each instance the trace has."""
        return np.add.reduceat(self.ending, self.first, dtype=int)

    @property
    def members(self) -> np.ndarray:
        """How many each instance had."""
        sizes = np.array([len(group.members) for group in self.trace.groups], int)
        row, events = self.row[self.first], self.trace.events
        message = labelled(events, "op", MESSAGES)[row]
        return np.where(message, 2, sizes[events["group"][row]])


def calls_of(trace: Trace | Steady) -> CallInstances:
    """The CallInstances of an open trace: all rows of category comm that have a number, and those
    of category copy that are the calls of broadcasts."""
    row, instance = _call_instances(trace)
    start, end, posted = _times(trace, row)
    rank = trace.events["rank"][row]
    first = np.flatnonzero(np.diff(instance, prepend=-1))
    last = np.maximum.reduceat(posted, first)
    latest = _first_where(posted == last[instance], first)
    source = _reason(trace, row, instance, first, latest, end <= last[instance])
    return CallInstances(
        trace=trace,
        row=row,
        ending=trace.events["seq"][row] >= 0,
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
    """The rows of /events that are calls, in the order of their instances, and these."""
    events, ranks = trace.events, trace.attrs["world_size"]
    counted = (events["group"] >= 0) & (events["seq"] >= 0)
    row = np.flatnonzero(labelled(events, "category", ["comm"]) & counted)
    group, rank, peer = (events[name][row].astype("i8") for name in ("group", "rank", "peer"))
    sends, receives = (labelled(events, "op", [name])[row] for name in MESSAGES)
    sender = np.where(sends, rank, np.where(receives, peer, -1))
    receiver = np.where(sends, peer, np.where(receives, rank, -1))
    channel = (group * (ranks + 1) + sender + 1) * (ranks + 1) + receiver + 1
    number = events["seq"][row]
    early, place = _early(events, row)
    row, channel, number = (
        np.concatenate(parts)
        for parts in ((early, row), (channel[place], channel), (number[place], number))
    )
    order = np.lexsort((number, channel))
    new = np.diff(channel[order], prepend=-1) | np.diff(number[order], prepend=-1)
    return row[order], np.cumsum(new != 0) - 1


def _early(events, row):
    """The rows of category copy that are calls of _EARLY operations, and the places in `row` of
    the waits that end them: those of the rank and group whose call began when the row does."""
    kind = labelled(events, "op", _EARLY)
    calls = labelled(events, "category", ["copy"]) & kind & (events["seq"] < 0)
    calls &= events["stream"] < COMMUNICATION
    called = np.flatnonzero(calls)
    place = np.flatnonzero(kind[row] & (events["posted"] < events["t_start"])[row])
    both = np.concatenate([called, row[place]])
    times = np.concatenate([events["t_start"][called], events["posted"][row[place]]])
    # Numbers of the times, for the times themselves are too large to be combined.
    _, when = np.unique(times, return_inverse=True)
    _, key = combinations([events["rank"][both], events["group"][both], when])
    _, call, end = np.intersect1d(key[: len(called)], key[len(called) :], return_indices=True)
    return called[call], place[end]


def _times(trace, row):
    """Start, end and posting of calls, in ns on rank 0's clock."""
    events = trace.events
    start = events["t_global"][row]
    shift = start - events["t_start"][row]
    return start, start + events["dur"][row], events["posted"][row] + shift


def _first_where(true, first):
    """The first call of each instance for which it is true, the number of calls if none."""
    place = np.where(true, np.arange(len(true)), len(true))
    return np.minimum.reduceat(place, first)


def _reason(trace, row, instance, first, latest, early):
    """The call whose arrival each call waited for: the last one's, but for _UNBOUND calls that
    ended `early`, not after it."""
    events, place = trace.events, np.arange(len(row))
    at_root = (events["rank"] == events["peer"])[row]
    reduces, broadcasts, unbound = (
        labelled(events, "op", ops)[row] for ops in (["reduce"], ["broadcast"], _UNBOUND)
    )
    root = _first_where(at_root & broadcasts, first)[instance]
    own = np.where(root < len(row), root, place)
    return np.where(early & unbound & ~(reduces & at_root), own, latest[instance])


# Tables


def wait_rows(calls: CallInstances, keys: Sequence[str] = ("axis", "op")) -> list[dict[str, Any]]:
    """Calls, and seconds blocked = wait + transfer, a rank and step, by any keys of an event; and
    the violations: calls in all, and the worst in seconds."""
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
    values = zip(*(column.tolist() for column in columns.values()))
    what = named(calls.trace, keys, kinds)
    return [names | dict(zip(columns, each)) for names, each in zip(what, values)]


def incomplete(calls: CallInstances) -> int:
    """How many instances lack the call of a member, so that their last arrival is not certain."""
    return int((calls.known < calls.members).sum())
