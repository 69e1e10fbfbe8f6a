"""Recorder that keeps trace rows in memory, so that they can be copied and replayed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from hpc3d.comm.mesh import WORLD
from hpc3d.trace.recorder import PHASE_NUMBER, Recorder
from hpc3d.trace.schema import CATEGORY, EVENTS, PHASE, SEND, record_type
from hpc3d.trace.traced_communicator import COMM, COPY, Traced

if TYPE_CHECKING:
    from hpc3d.arrays.abstract import AbstractPool
    from hpc3d.comm.communicator import Communicator

_ROWS = record_type(EVENTS)
_WAIT = CATEGORY.index("wait")
_TIMES = "t_start", "t_global", "posted"  # columns of times from the start of the run


class ReplayedRows(NamedTuple):
    """Description of the trace rows of a replayed pass, which are created on demand.

    The rows follow the first `before` recorded rows. They are copies of `rows`, shifted by `shift`
    ns, with different values in `columns`: one value, or one per row. `sequences` contains the
    index of each row's call sequence, or -1 if the row does not belong to one. The sequence
    numbers of call sequence i are increased by `added[i]`, and those of all other rows by
    `added[-1]`.
    """

    before: int
    rows: np.ndarray
    shift: int
    columns: Mapping[str, Any]
    sequences: np.ndarray
    added: Sequence[int]


class MemoryRecorder(Recorder):
    """In-memory recorder of a rank, which writes no file; `clock()` returns the time in ns.

    `account` contains statistics of the current step. It maps (part of the model, phase, quantity)
    to a value. The quantities are the total time ("time"), the time spent in calls within the
    stage ("calls"), the time spent in calls between stages and in waits for copies ("idle"), the
    received bytes ("bytes") and the FLOPs ("flop"). Times are in ns. If `pool` is given, its
    attribute `part` is set to the part of the model that is being executed.
    """

    phase_number = PHASE_NUMBER["other"]

    def __init__(
        self, rank: int, clock: Callable[[], int], pool: AbstractPool | None = None
    ) -> None:
        self._account: Counter[tuple[str, str, str]] = Counter()
        self._charged: list[Mapping[tuple[str, str, str], int]] = []  # not yet in `_account`
        self.since, self._part, self.pool = clock(), "other", pool
        without = float("inf")
        super().__init__(None, {"rank": rank}, every_s=without, clock=clock, most=without)
        self.replays: list[ReplayedRows] = []
        self.across: set[int] = set()  # groups across pipeline stages, whose calls wait for others
        self.comms: list[Traced] = []

    @property
    def account(self) -> Counter[tuple[str, str, str]]:
        """Statistics of the current step, including those of all replayed passes."""
        passes = {id(each): each for each in self._charged}
        for number, times in Counter(map(id, self._charged)).items():
            for key, value in passes[number].items():
                self._account[key] += times * value
        self._charged.clear()
        return self._account

    @property
    def phase(self) -> str:
        return PHASE[self.phase_number]

    @phase.setter
    def phase(self, name: str) -> None:
        self.charge()
        self.phase_number = PHASE_NUMBER[name]

    @property
    def part(self) -> str:
        return self._part

    @part.setter
    def part(self, name: str) -> None:
        self.charge()
        self._part = name
        if self.pool:
            self.pool.part = name

    def charge(self) -> None:
        """Add the time since the last call to the account, for the current part and phase."""
        now = self.clock()
        if now != self.since:
            self._account[self._part, self.phase, "time"] += now - self.since
            self.since = now

    def charge_replay(self, account: Mapping[tuple[str, str, str], int]) -> None:
        """Add the recorded account of a pass whose replay has just ended."""
        self._charged.append(account)
        self.since = self.clock()

    def begin_step(self, number: int) -> None:
        super().begin_step(number)
        self.account.clear()
        self.since = self.started

    def end_step(self, *results: Any) -> None:
        self.charge()
        super().end_step(*results)

    def put(
        self,
        start: int,
        duration: int,
        name: int,
        category: int,
        op: int,
        context: Any,
        group: int = -1,
        **columns: Any,
    ) -> None:
        super().put(start, duration, name, category, op, context, group, **columns)
        account, part, phase = self._account, self._part, self.phase
        if category == _WAIT or group in self.across:
            account[part, phase, "idle"] += duration
        elif category in (COMM, COPY) and group >= 0:
            account[part, phase, "calls"] += duration
        if category == COMM and op != SEND:
            account[part, phase, "bytes"] += columns.get("received", 0)
        if flops := columns.get("flops"):
            account[part, phase, "flop"] += int(flops)

    def wrap(self, comm: Communicator, axis: str) -> Traced:
        traced = super().wrap(comm, axis)
        self.comms.append(traced)
        axes = [group["axis"] for group in self.header["groups"]]
        idle = {"p", WORLD} if "p" in axes else {"p"}
        self.across = {number for number, each in enumerate(axes) if each in idle}
        return traced

    def rows(self, first: int = 0) -> np.ndarray:
        """Return a copy of the recorded rows with index `first` or higher."""
        return np.frombuffer(self.table, _ROWS, self.count)[first:].copy()

    @property
    def mark(self) -> tuple[int, int]:
        """Numbers of recorded rows and of replayed passes."""
        return self.count, len(self.replays)

    def add(
        self,
        rows: np.ndarray,
        shift: int,
        columns: Mapping[str, Any],
        numbers: tuple[np.ndarray, Sequence[int]],
    ) -> None:
        """Append the trace rows of a pass whose replay has just ended.

        The arguments are the fields of ReplayedRows; `numbers` contains `sequences` and `added`.
        """
        self.replays.append(ReplayedRows(self.count, rows, shift, columns, *numbers))
        self.latest = self.clock()

    def clear(self) -> None:
        """Discard all rows, and number the following calls from 0."""
        self.replays, self.count = [], 0
        for comm in self.comms:
            comm.sequence.clear()

    def restore(self, account: Counter, mark: tuple[int, int]) -> None:
        """Restore earlier values of `account` and `mark`, and discard the rows recorded since."""
        self._account, self._charged, self.since = Counter(account), [], self.clock()
        self.count, replays = mark
        del self.replays[replays:]

    def trace_rows(self, since: tuple[int, int] = (0, 0)) -> TraceRows:
        """Return the recorded and the replayed rows.

        If `since` is given, it is an earlier value of `mark`, and earlier rows are omitted.
        """
        count, replays = since
        return TraceRows(self.rows(count), self.replays[replays:], count)

    def flush(self) -> None:
        """Do nothing: the rows stay in memory."""


class TraceRows:
    """Recorded and replayed rows of the trace table /events.

    `recorded` contains the recorded rows from index `first` on. The rows of the passes in
    `replays` are created on demand.
    """

    def __init__(self, recorded: np.ndarray, replays: Sequence[ReplayedRows], first: int) -> None:
        self.recorded, self.replays, self.first = recorded, replays, first

    @property
    def kinds(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """Pairs (rows, time shifts in ns) of the recorded rows and of each kind of replayed pass.

        Each replay of a pass has the same rows, shifted by one of the times.
        """
        replayed = [
            (passes[0].rows, np.array([each.shift for each in passes]))
            for passes in self._passes_by_kind().values()
        ]
        return [(self.recorded, np.zeros(1, np.int64)), *replayed]

    def __len__(self) -> int:
        return len(self.recorded) + sum(len(each.rows) for each in self.replays)

    def _passes_by_kind(self) -> dict[int, list[ReplayedRows]]:
        found: dict[int, list[ReplayedRows]] = {}
        for each in self.replays:
            found.setdefault(id(each.rows), []).append(each)
        return found

    @cached_property
    def all(self) -> np.ndarray:
        """All rows, in order."""
        edges = [0, *(each.before - self.first for each in self.replays), len(self.recorded)]
        created = {kind: iter(_created(same)) for kind, same in self._passes_by_kind().items()}
        rows = [*(next(created[id(each.rows)]) for each in self.replays), self.recorded[:0]]
        found, end = np.empty(len(self), _ROWS), 0
        for (first, stop), replayed in zip(pairwise(edges), rows, strict=True):
            start, middle = end, end + stop - first
            end = middle + len(replayed)
            found[start:middle], found[middle:end] = self.recorded[first:stop], replayed
        return found


def _created(passes: Sequence[ReplayedRows]) -> np.ndarray:
    """Return the rows of replays of the same pass, as an array of shape [passes, rows]."""
    first, added = passes[0], np.array([each.added for each in passes], np.int32)
    rows = np.empty((len(passes), len(first.rows)), _ROWS)
    rows[...] = first.rows
    for name in first.columns:
        values = np.array([each.columns[name] for each in passes])
        rows[name] = values.reshape(len(passes), -1)
    for name in _TIMES:
        rows[name] += np.array([each.shift for each in passes])[:, None]
    rows["seq"] += added[:, first.sequences]
    return rows
