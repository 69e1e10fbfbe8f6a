"""Recorder that keeps trace rows in memory, so that they can be copied and replayed."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from hpc3d.trace.recorder import ROW, Recorder
from hpc3d.trace.schema import EVENTS, record_type

_ROWS = record_type(EVENTS)


class MemoryRecorder(Recorder):
    """In-memory recorder of a rank, which writes no file; `clock()` returns the time in ns."""

    def __init__(self, rank: int, clock: Callable[[], int]) -> None:
        without = float("inf")
        super().__init__(None, {"rank": rank}, every_s=without, clock=clock, most=without)

    def rows(self, first: int = 0) -> np.ndarray:
        """Return a copy of the rows with index `first` or higher."""
        return np.frombuffer(self.table, _ROWS, self.count)[first:].copy()

    def add(self, rows: np.ndarray, now: int) -> None:
        """Append the trace rows of a replayed pass, which ends at time `now` (in ns)."""
        end = self.count + len(rows)
        while end > self.capacity:
            self.grow()
        self.table[self.count * ROW.size : end * ROW.size] = rows.tobytes()
        self.count, self.latest = end, now

    def flush(self) -> None:
        """Do nothing: the rows stay in memory."""
