"""Consistency checks of a trace across ranks, for collective calls and point-to-point messages.

Rows are matched by sequence number (`seq`), not by time.  Incomplete traces are not checked for
missing rows.  Times are not compared between ranks whose clocks were not synchronized.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from hpc3d.comm.communicator import EXCHANGES, received_bytes
from hpc3d.trace.schema import MESSAGES, item_sizes
from hpc3d.trace.trace_config import one_time

if TYPE_CHECKING:
    from hpc3d.trace.reader import Trace
    from hpc3d.trace.table import Table

_COLLECTIVES = (*EXCHANGES, "broadcast", "reduce")
_COLUMNS = ("group", "seq", "rank", "peer", "op", "step", "count", "dtype", "bytes")

# Table name, description of a violated invariant, and indices of the affected rows.
Violation = tuple[str, str, np.ndarray]


def collectives(trace: Trace) -> list[Violation]:
    """Check that group members make the same calls, and no call ends before all have posted it."""
    calls = GroupCalls(trace)
    wrong = {
        "the rank is not in the group of the call": calls.member < 0,
        "the rank makes the same call twice": calls.repeated(),
        "some group members do not make the call": calls.partial() & trace.attrs["complete"],
        "the op differs between the members of the call": calls.unlike("op"),
        "the step differs between the members of the call": calls.unlike("step"),
        "the dtype differs between the members of the call": calls.unlike("dtype"),
        "the count differs between the members of the call": (
            calls.unlike("count") & ~calls.of("broadcast")
        ),
        "the bytes do not match the count": calls.miscounted(),
        "the call ends before all members have posted it": calls.early(),
    }
    return [("events", what, calls.rows[rows]) for what, rows in wrong.items()]


def messages(trace: Trace) -> Iterator[Violation]:
    """Check that every send has a receive of equal size that ends after the send was posted."""
    events, rows = trace.events, _calls(trace, MESSAGES)
    receives = labeled(events, "op", "recv")[rows]
    group, number, here, there = (events[name][rows] for name in ("group", "seq", "rank", "peer"))
    ends = np.where(receives, (there, here), (here, there))  # sender, receiver
    line = np.lexsort((receives, number, *ends, group))
    rows, receives = rows[line], receives[line]
    same = np.all([np.diff(key[line]) == 0 for key in (group, *ends, number)], axis=0)
    first = np.flatnonzero(same & ~receives[:-1] & receives[1:])
    lone = np.delete(rows, np.append(first, first + 1))
    sent, received = rows[first], rows[first + 1]
    unequal = events["bytes"][sent] != events["bytes"][received]
    early = _times(trace, received)[1] < _times(trace, sent)[0]
    early &= _comparable(trace, sent) & _comparable(trace, received)
    lone = lone[: len(lone) * trace.attrs["complete"]]
    yield "events", "send or receive without counterpart", lone
    yield "events", "the bytes of the receive differ from the bytes of the send", received[unequal]
    yield "events", "the receive ends before the send is posted", received[early]


def _calls(trace, ops):
    """Return the /events row indices of communication calls whose operation is in `ops`."""
    comm = labeled(trace.events, "category", "comm")
    return np.flatnonzero(comm & labeled(trace.events, "op", *ops))


def labeled(events: Table, column: str, *names: str) -> np.ndarray:
    codes = [code for code, name in events.labels(column).items() if name in names]
    return np.isin(events[column], codes)


def _times(trace, rows):
    """Return the times at which calls were posted and completed, on rank 0's clock."""
    names = "t_global", "t_start", "posted", "dur"
    begin, start, posted, duration = (trace.events[name][rows] for name in names)
    return posted + (begin - start), begin + duration


def _comparable(trace, rows):
    """Return a mask of the rows of ranks whose clock was synchronized with rank 0's clock."""
    if trace.attrs.get("kind") == "simulated":
        return np.ones(len(rows), bool)
    host = trace.ranks["host_id"]
    compared = [*host[:1], *host[trace.clock_samples["rank"]]]
    known = np.isin(host, compared) & one_time(trace)
    return known[trace.events["rank"][rows]]


class GroupCalls:
    """Collective calls of a trace.

    `rows` are row indices in /events, sorted by group, sequence number and rank.  For each row,
    `columns` holds the column values, `size` the group size, `member` the rank's index in the
    group, and `call` the zero-based index of the call.  `first` holds the position of each call's
    first row.
    """

    def __init__(self, trace: Trace) -> None:
        self.trace, self.rows = trace, _calls(trace, _COLLECTIVES)
        self.world = np.int64(len(trace.ranks))
        columns = {name: trace.events[name][self.rows] for name in _COLUMNS}
        line = np.lexsort([columns[name] for name in ("rank", "seq", "group")])
        self.rows, self.columns = self.rows[line], {n: v[line] for n, v in columns.items()}
        new = self.changes("group") | self.changes("seq")
        self.first, self.call = np.flatnonzero(new), np.cumsum(new) - 1
        sizes = [len(group.members) for group in trace.groups]
        self.size = np.array([*sizes, 1])[self.columns["group"]]
        self.member = self._index_in_group(self.columns["rank"])

    def changes(self, name: str) -> np.ndarray:
        """Return a mask of the rows that differ from the previous row in column `name`."""
        values = self.columns[name]
        return np.append(np.ones(len(values[:1]), bool), values[1:] != values[:-1])

    def _index_in_group(self, ranks: np.ndarray) -> np.ndarray:
        """Return the index of each rank within the group of its row.

        `ranks` contains one rank per row.  The index is -1 if the rank is not a member.
        """
        members = [np.array(group.members, int) for group in self.trace.groups]
        keys = (group * self.world + ranks for group, ranks in enumerate(members))
        known = np.concatenate([*keys, [-1]])
        index = np.concatenate([*map(np.arange, map(len, members)), [-1]])
        line = np.argsort(known)
        wanted = self.columns["group"] * self.world + ranks
        found = line[np.searchsorted(known, wanted, "right", sorter=line) - 1]
        return np.where(known[found] == wanted, index[found], -1)

    def of(self, *ops: str) -> np.ndarray:
        return labeled(self.trace.events, "op", *ops)[self.rows]

    def repeated(self) -> np.ndarray:
        """Return a mask of the rows that repeat an earlier call of the same rank."""
        return ~(self.changes("group") | self.changes("seq") | self.changes("rank"))

    def partial(self) -> np.ndarray:
        """Return a mask of the rows whose call was not made by all members of its group."""
        return np.bincount(self.call)[self.call] < self.size

    def unlike(self, name: str) -> np.ndarray:
        """Return a mask of the rows that differ from their call's first row in column `name`."""
        values = self.columns[name]
        return values != values[self.first][self.call]

    def _highest(self, values: np.ndarray) -> np.ndarray:
        """For each row, return the maximum of `values` over all rows of the same call."""
        return np.maximum.reduceat(values, self.first)[self.call] if len(values) else values

    def early(self) -> np.ndarray:
        """Return a mask of the rows that end before all members of the group have posted the call.

        Only EXCHANGES are checked: the collectives in which every member waits for all others.
        """
        posted, ended = _times(self.trace, self.rows)
        known = _comparable(self.trace, self.rows)
        last = self._highest(np.where(known, posted, posted.min(initial=0)))
        return self.of(*EXCHANGES) & (self.columns["bytes"] > 0) & known & (ended < last)

    def miscounted(self) -> np.ndarray:
        """Return a mask of the rows whose received bytes do not match the input block size."""
        item = item_sizes(self.trace.events.labels("dtype"))[self.columns["dtype"]]
        block = self.columns["count"] * item
        root = self._index_in_group(self.columns["peer"])
        wrong = np.zeros(len(block), bool)
        for op in _COLLECTIVES:
            sent = self._highest(block) if op == "broadcast" else block
            expected = received_bytes(op, sent, self.size, self.member, root)
            wrong |= self.of(op) & (self.columns["bytes"] != expected)
        return wrong & (self._highest(item) > 0) & ~self.partial()
