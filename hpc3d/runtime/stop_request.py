"""Why a run stops before its last step: a signal, the end of its minutes, the file STOP.

A rank requests a stop (a number), the trainer takes the largest request at the end of a step, and
so all ranks stop after the same one.
"""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hpc3d.runtime.job import Job

ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)  # what ends other processes
MINUTES, FILE = 1001, 1002  # beyond the numbers of signals


class Stop:
    """The stop requests of this rank of a job, of a run in `folder`; rank 0 looks at the clock and
    at the folder.  From now on the signals of ENDING are requests, too."""

    def __init__(self, job: Job, folder: Path, name: str, minutes: float) -> None:
        self.job, self.file = job, folder / "STOP"
        self.signals = {*ENDING, signal.Signals[f"SIG{name}"]}
        self.end = job.started + 60 * minutes if minutes else float("inf")
        job.requests = self.signals

    def request(self) -> int:
        """0 to go on; else the number of a signal, MINUTES or FILE."""
        if told := [number for number in self.job.signals if number in self.signals]:
            return told[0]
        if self.job.rank:
            return 0
        if time.monotonic() > self.end:
            return MINUTES
        return FILE if self.file.exists() else 0


def reason(request: int) -> str:
    """A request in words."""
    words = {MINUTES: "train.max_minutes have passed", FILE: "there is a file STOP in the folder"}
    return words.get(request) or f"{signal.Signals(request).name} came"


def ended_by(number: int) -> str:
    """The line of a process that a signal has ended before it could stop by itself."""
    return f"ended by {signal.Signals(number).name}"
