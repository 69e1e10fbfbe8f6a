"""Progress display: shows the latest log record if an operation takes longer than two seconds.

On a terminal, the display is one status line; otherwise, a line is printed every 30 s.  All
modules log their progress with `logging`, at almost no cost.  Records are displayed only inside
the context manager `progress`, which commands use.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from typing import TextIO

from hpc3d.console.sanitize import Controls, sanitized

FIRST = 2  # seconds until the first progress line
# Intervals in s: between printed lines, and between updates of a status line.
_EVERY, _REDRAWN = 30, 0.5
_ERASED = "\r\x1b[K"


class Newest(logging.Handler):
    """Log handler that keeps the newest record."""

    record = None

    def emit(self, record: logging.LogRecord) -> None:
        self.record = record

    def text(self) -> str:
        return self.record.getMessage() if self.record else "loading"


class StatusLine:
    """Status line at the bottom of a terminal, erased while other output is printed."""

    def __init__(self, terminal: TextIO) -> None:
        self.terminal, self.lock = terminal, threading.RLock()
        self.shown = self.begun = False

    def show(self, text: str) -> None:
        """Show a text in the status line unless the cursor is in the middle of other output."""
        encoding = self.terminal.encoding or "utf-8"
        visible = text.encode(encoding, "backslashreplace").decode(encoding)
        with self.lock:
            if not self.begun:
                self._write(_ERASED + visible[: _columns(self.terminal) - 1])
                self.shown = True

    def erase(self) -> None:
        with self.lock:
            if self.shown:
                self._write(_ERASED)
                self.shown = False

    def close(self) -> None:
        """Erase the status line and disable it."""
        with self.lock:
            self.erase()
            self.begun = True

    def _write(self, text: str) -> None:
        self.terminal.write(Controls(text))
        self.terminal.flush()


class Above:
    """Output stream to a terminal that erases the status line before each write."""

    def __init__(self, stream: TextIO, status: StatusLine) -> None:
        self.stream, self.status = stream, status

    def __getattr__(self, name):
        return getattr(self.stream, name)

    def write(self, text: str) -> int:
        with self.status.lock:
            self.status.erase()
            if text:
                self.status.begun = not text.endswith(("\n", "\r"))
            return self.stream.write(text)


@contextmanager
def progress(
    name: str, doing: object = "", first: float | None = None, since: float | None = None
) -> Iterator[None]:
    """Print progress lines to stderr while the block runs: `hpc3d.NAME: 40 s: PROGRESS`.

    PROGRESS is the text that `doing` has at this time, or the newest log record.  A nested call
    only logs `doing`.  The first line is printed after `first` seconds.  Printed times are
    relative to `since`, a value of `time.monotonic` (None: now).
    """
    log, begin = logging.getLogger("hpc3d"), time.monotonic() if since is None else since
    inside = any(isinstance(handler, Newest) for handler in log.handlers)
    log.setLevel(logging.INFO)
    newest, over = Newest(logging.INFO), threading.Event()
    if not inside:
        log.addHandler(newest)
    if doing:
        log.info(doing)
    if inside:
        yield
        return
    with _speaking() as (say, every):

        def speak():
            wait = FIRST if first is None else first
            with suppress(ValueError):  # stderr is closed
                while not over.wait(wait):
                    passed, wait = time.monotonic() - begin, every
                    say(sanitized(f"hpc3d.{name}: {passed:.0f} s: {newest.text()}"))

        threading.Thread(target=speak, daemon=True).start()
        try:
            yield
        finally:
            over.set()
            log.removeHandler(newest)


@contextmanager
def _speaking() -> Iterator[tuple[Callable[[str], object], float]]:
    """Yield a function that prints a progress line to stderr, and the interval in s between lines.

    On a terminal, each progress line replaces the previous one and stays at the bottom.
    """
    stdout, stderr = sys.stdout, sys.stderr
    if not stderr.isatty() or os.environ.get("TERM") == "dumb":
        yield lambda line: print(line, file=stderr, flush=True), _EVERY
        return
    status = StatusLine(stderr)
    out = Above(stdout, status) if stdout.isatty() else stdout
    with redirect_stdout(out), redirect_stderr(Above(stderr, status)):
        try:
            yield status.show, _REDRAWN
        finally:
            status.close()


def _columns(terminal: TextIO) -> int:
    with suppress(OSError, ValueError):
        return os.get_terminal_size(terminal.fileno()).columns or 80
    return 80
