"""A word from what takes long: the newest record of what goes on, after some seconds and then by
and by.

The parts of the program tell where they are as records of `logging`, as often as they like, which
costs next to nothing; only a command that has a `Patience` shows any of them.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

FIRST, _EVERY = 10, 30  # seconds of silence before the first line and between others


class Newest(logging.Handler):
    """Keeps the newest record."""

    record = None

    def emit(self, record: logging.LogRecord) -> None:
        self.record = record

    def text(self) -> str:
        return self.record.getMessage() if self.record else "at work"


@contextmanager
def patience(name: str, first: float | None = None) -> Iterator[None]:
    """Lines on stderr, `hpc3d.NAME: 40 s: what goes on`, as long as the block lasts."""
    newest, over = Newest(logging.INFO), threading.Event()
    log, begin = logging.getLogger("hpc3d"), time.monotonic()
    log.setLevel(logging.INFO)
    log.addHandler(newest)

    def speak():
        wait = FIRST if first is None else first
        while not over.wait(wait):
            passed, wait = time.monotonic() - begin, _EVERY
            print(f"hpc3d.{name}: {passed:.0f} s: {newest.text()}", file=sys.stderr, flush=True)

    threading.Thread(target=speak, daemon=True).start()
    try:
        yield
    finally:
        over.set()
        log.removeHandler(newest)
