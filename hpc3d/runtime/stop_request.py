"""Requests to stop a run early: a signal, the time limit, or the file STOP.

Each rank encodes its request as a number.  At the end of each step, the trainer takes the maximum
over ranks, so that all ranks stop after the same step.
"""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hpc3d.runtime.job import Job

ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)  # signals that end a process by default
MINUTES, FILE = 1001, 1002  # codes of the other stop requests, larger than any signal number


class Stop:
    """Detects stop requests that this rank has received.

    On every rank, the signals in ENDING and the signal SIG`name` are stop requests.  Rank 0 also
    checks the time limit of `minutes` (0: no limit) and the file STOP in the run's `folder`.
    """

    def __init__(self, job: Job, folder: Path, name: str, minutes: float) -> None:
        self.job, self.file = job, folder / "STOP"
        self.signals = {*ENDING, signal.Signals[f"SIG{name}"]}
        self.end = job.started + 60 * minutes if minutes else float("inf")
        job.requests = self.signals

    def request(self) -> int:
        """Return the stop request (a signal number, MINUTES or FILE), or 0 if there is none."""
        if told := [number for number in self.job.signals if number in self.signals]:
            return told[0]
        if self.job.rank:
            return 0
        if time.monotonic() > self.end:
            return MINUTES
        return FILE if self.file.exists() else 0


def reason(request: int) -> str:
    """Return the message that explains a stop request."""
    words = {
        MINUTES: "reached train.max_minutes, which also limits a resumed run; set "
        "--train.max_minutes 0 to resume without a limit",
        FILE: "found the file STOP in the run folder",
    }
    return words.get(request) or f"received {signal.Signals(request).name}"


def ended_by(number: int) -> str:
    """Return the message for a process that was terminated by signal `number`."""
    return f"ended by {signal.Signals(number).name}"
