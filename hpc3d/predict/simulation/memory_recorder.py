"""Recorder that keeps trace rows in memory, so that they can be copied and replayed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from hpc3d.comm.mesh import WORLD
from hpc3d.trace.recorder import PHASE_NUMBER, Recorder
from hpc3d.trace.schema import CATEGORY, EVENTS, PHASE, record_type
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
    ns, with different values in `columns`. `sequences` contains the index of each row's call
    sequence, or -1 if the row does not belong to one. The sequence numbers of call sequence i are
    increased by `added[i]`, and those of all other rows by `added[-1]`.
    """

    before: int
    rows: np.ndarray
    shift: int
    columns: Mapping[str, int]
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
        self.account: Counter[tuple[str, str, str]] = Counter()
        self.since, self._part, self.pool = clock(), "other", pool
        without = float("inf")
        super().__init__(None, {"rank": rank}, every_s=without, clock=clock, most=without)
        self.replays: list[ReplayedRows] = []
        self.across: set[int] = set()  # groups across pipeline stages, whose calls wait for others
        self.comms: list[Traced] = []

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
            self.account[self._part, self.phase, "time"] += now - self.since
            self.since = now

    def charge_replay(self, account: Mapping[tuple[str, str, str], int]) -> None:
        """Add the recorded account of a pass whose replay has just ended."""
        self.account.update(account)
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
        account, part, phase = self.account, self._part, self.phase
        if category == _WAIT or group in self.across:
            account[part, phase, "idle"] += duration
        elif category in (COMM, COPY) and group >= 0:
            account[part, phase, "calls"] += duration
        if category == COMM:
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
        columns: Mapping[str, int],
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

    def all_rows(self, since: tuple[int, int] = (0, 0)) -> np.ndarray:
        """Return the recorded and the replayed rows, in order.

        If `since` is given, it is an earlier value of `mark`, and earlier rows are omitted.
        """
        count, replays = since[0], self.replays[since[1] :]
        edges = [count, *(each.before for each in replays), self.count]
        total = self.count - count + sum(len(each.rows) for each in replays)
        recorded, found, end = self.rows(count), np.empty(total, _ROWS), 0
        created = [*_created(replays), recorded[:0]]
        for (first, stop), rows in zip(pairwise(edges), created, strict=True):
            start, middle = end, end + stop - first
            end = middle + len(rows)
            found[start:middle], found[middle:end] = recorded[first - count : stop - count], rows
        return found

    def flush(self) -> None:
        """Do nothing: the rows stay in memory."""


def _created(replays: Sequence[ReplayedRows]) -> list[np.ndarray]:
    """Return the rows of each replayed pass; those of the same pass are created together."""
    found: list[Any] = [None] * len(replays)
    numbers: dict[int, list[int]] = {}
    for number, each in enumerate(replays):
        numbers.setdefault(id(each.rows), []).append(number)
    for same in numbers.values():
        passes = [replays[number] for number in same]
        first, added = passes[0], np.array([each.added for each in passes], np.int32)
        rows = np.empty((len(passes), len(first.rows)), _ROWS)
        rows[...] = first.rows
        for name in first.columns:
            rows[name] = np.array([each.columns[name] for each in passes])[:, None]
        for name in _TIMES:
            rows[name] += np.array([each.shift for each in passes])[:, None]
        rows["seq"] += added[:, first.sequences]
        for number, each in zip(same, rows, strict=True):
            found[number] = each
    return found
