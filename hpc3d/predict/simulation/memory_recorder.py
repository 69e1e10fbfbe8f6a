"""Recorder that keeps trace rows in memory, so that they can be copied and replayed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from hpc3d.trace.recorder import Recorder
from hpc3d.trace.schema import EVENTS, record_type

_ROWS = record_type(EVENTS)
_TIMES = "t_start", "t_global", "posted"  # columns of times from the start of the run


class ReplayedRows(NamedTuple):
    """Trace rows of a replayed pass, which are only created when they are needed.

    They follow the first `before` recorded rows. They are copies of `rows`, `shift` ns later and
    with other values in `columns`. Each row belongs to the call sequence with the index in
    `sequences`; `added` is what is added to the sequence numbers of each call sequence, and last
    to those of rows that belong to none (-1).
    """

    before: int
    rows: np.ndarray
    shift: int
    columns: Mapping[str, int]
    sequences: np.ndarray
    added: Sequence[int]


class MemoryRecorder(Recorder):
    """In-memory recorder of a rank, which writes no file; `clock()` returns the time in ns."""

    def __init__(self, rank: int, clock: Callable[[], int]) -> None:
        without = float("inf")
        super().__init__(None, {"rank": rank}, every_s=without, clock=clock, most=without)
        self.replays: list[ReplayedRows] = []

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
        """Append the trace rows of a replayed pass, which ends now.

        The arguments are the fields of ReplayedRows; `numbers` contains `sequences` and `added`.
        """
        self.replays.append(ReplayedRows(self.count, rows, shift, columns, *numbers))
        self.latest = self.clock()

    def clear(self) -> None:
        """Discard all rows."""
        self.replays, self.count = [], 0

    def all_rows(self, since: tuple[int, int] = (0, 0)) -> np.ndarray:
        """Return the recorded and the replayed rows, in order.

        If `since` is given, it is an earlier value of `mark`, and earlier rows are omitted.
        """
        count, replays = since[0], self.replays[since[1] :]
        edges = [count, *(each.before for each in replays), self.count]
        total = self.count - count + sum(len(each.rows) for each in replays)
        recorded, found, shifts = self.rows(count), np.empty(total, _ROWS), np.zeros(total, int)
        end = 0
        for (first, stop), replayed in zip(pairwise(edges), [*replays, None], strict=True):
            start, end = end, end + stop - first
            found[start:end] = recorded[first - count : stop - count]
            if replayed:
                start, end = end, end + len(replayed.rows)
                shifts[start:end] = replayed.shift
                _copy(replayed, found[start:end])
        for name in _TIMES:
            found[name] += shifts
        return found

    def flush(self) -> None:
        """Do nothing: the rows stay in memory."""


def _copy(replayed: ReplayedRows, out: np.ndarray) -> None:
    """Write the rows of a replayed pass to `out`, except for the shift of their times."""
    out[...] = replayed.rows
    for name, value in replayed.columns.items():
        out[name] = value
    out["seq"] += np.array(replayed.added, np.int32)[replayed.sequences]
