"""A word from what takes long: the newest record of what goes on, after two seconds and from then
on: on a terminal in one line that is written anew, elsewhere as a line every half minute.

The parts of the program tell where they are as records of `logging`, as often as they like, which
costs next to nothing; only a command that has a `Patience` shows any of them.
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

from hpc3d.plain import Controls, plain

FIRST = 2  # seconds of silence before the first word
_EVERY, _REDRAWN = 30, 0.5  # seconds from one line to the next, and of a line on a terminal
_ERASED = "\r\x1b[K"


class Newest(logging.Handler):
    """Keeps the newest record."""

    record = None

    def emit(self, record: logging.LogRecord) -> None:
        self.record = record

    def text(self) -> str:
        return self.record.getMessage() if self.record else "loading"


class StatusLine:
    """The last line of a terminal, which is gone while anything else is printed."""

    def __init__(self, terminal: TextIO) -> None:
        self.terminal, self.lock = terminal, threading.RLock()
        self.shown = self.begun = False

    def show(self, text: str) -> None:
        """Show a text, unless somebody else's line has no end yet."""
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
        """Erase it, and show no more."""
        with self.lock:
            self.erase()
            self.begun = True

    def _write(self, text: str) -> None:
        self.terminal.write(Controls(text))
        self.terminal.flush()


class Above:
    """A stream to the terminal that has a StatusLine."""

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
def patience(
    name: str, doing: str = "", first: float | None = None, since: float | None = None
) -> Iterator[None]:
    """Lines on stderr, `hpc3d.NAME: 40 s: what goes on`, as long as the block lasts: at first
    `doing`.  Inside of another one it only tells that one what it does.  The seconds count from
    the time `since` (None: now)."""
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
                    say(plain(f"hpc3d.{name}: {passed:.0f} s: {newest.text()}"))

        threading.Thread(target=speak, daemon=True).start()
        try:
            yield
        finally:
            over.set()
            log.removeHandler(newest)


@contextmanager
def _speaking() -> Iterator[tuple[Callable[[str], object], float]]:
    """What says a line on stderr, and how often.  On a terminal the line is rewritten, and stays
    below all that is printed meanwhile."""
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
