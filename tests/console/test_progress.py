"""Slow commands report their progress, and fast commands print nothing."""

import io
import logging
import os
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

import hpc3d
from hpc3d.console.progress import FIRST, progress
from hpc3d.console.sanitize import sanitized_streams

log = logging.getLogger("hpc3d.somewhere")
REDRAWN, EVERY = 0.5, 30  # seconds between status lines, on a terminal and elsewhere


class Time:
    """Time of hpc3d.console.progress, which advances only if a test advances it.

    It is also the event that the threads of progress wait for.
    """

    def __init__(self):
        self.now, self.due, self.over, self.waits = 0, 0, False, []
        self.changed = threading.Condition()

    def monotonic(self):
        return self.now

    def wait(self, seconds):
        with self.changed:
            self.waits.append(seconds)
            self.due = self.now + seconds
            self.changed.notify_all()
            assert self.changed.wait_for(lambda: self.over or self.now >= self.due, 120)
            return self.over

    def set(self):
        with self.changed:
            self.over = True
            self.changed.notify_all()

    def skip(self, seconds):
        """Advance the time until all due messages are printed."""
        with self.changed:
            self.now += seconds
            self.changed.notify_all()
            assert self.changed.wait_for(lambda: self.due > self.now, 120)


@pytest.fixture
def clock(monkeypatch):
    """Test time; no thread remains after the test."""
    clock, threads = Time(), []

    def thread(*arguments, **how):
        threads.append(threading.Thread(*arguments, **how))
        return threads[-1]

    own = {"Event": lambda: clock, "Thread": thread, "RLock": threading.RLock}
    monkeypatch.setattr("hpc3d.console.progress.threading", SimpleNamespace(**own))
    monkeypatch.setattr("hpc3d.console.progress.time", clock)
    monkeypatch.setattr("hpc3d.console.progress.FIRST", FIRST)  # not that of tests/conftest.py
    yield clock
    for each in threads:
        each.join(120)
        assert not each.is_alive()
    assert not logging.getLogger("hpc3d").handlers


def test_latest_log_record_is_printed_after_a_delay(clock, capsys):
    with progress("plan"):
        for number in range(1000):
            log.info("%d of 1000", number)
        clock.skip(FIRST - 0.1)
        assert capsys.readouterr() == ("", "")
        clock.skip(0.1)
        assert capsys.readouterr().err == "hpc3d.plan: 2 s: 999 of 1000\n"
        log.info("all")
        clock.skip(EVERY)
        assert capsys.readouterr().err == "hpc3d.plan: 32 s: all\n"
    assert clock.waits == [FIRST, EVERY, EVERY]


def test_seconds_count_from_the_start_of_the_command(clock, capsys):
    with progress("train", since=-40):
        clock.skip(FIRST)
    assert capsys.readouterr().err == "hpc3d.train: 42 s: loading\n"


def test_quick_command_prints_no_progress(clock, capsys):
    with progress("plan"):
        log.info("begun")
        clock.skip(0)
    assert capsys.readouterr() == ("", "")
    assert clock.over and clock.waits == [FIRST]


def test_progress_context_propagates_exceptions():
    with pytest.raises(ValueError, match="bad"), progress("plan"):
        raise ValueError("bad")


def test_nested_progress_context_only_changes_the_text(clock, capsys):
    with progress("train", "8 ranks start"), progress("train", "reading", first=0):
        clock.skip(FIRST)
    assert capsys.readouterr().err == "hpc3d.train: 2 s: reading\n"
    assert clock.waits == [FIRST, EVERY], "of the outer one"


class Terminal(io.StringIO):
    encoding = "ascii"

    def isatty(self):
        return True

    def shown(self):
        """Return the lines shown on the terminal."""
        return [line.rpartition("\r\x1b[K")[2] for line in self.getvalue().split("\n")]


def test_terminal_status_line_is_redrawn_below_the_output(clock, monkeypatch):
    terminal = Terminal()
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, terminal)
    with progress("plan", "größer\x1b", first=0):
        clock.skip(0)
        assert terminal.shown() == [r"hpc3d.plan: 0 s: gr\xf6\xdfer\u001b"]
        print("a table")
        clock.skip(2 * REDRAWN)
        assert terminal.shown() == ["a table", r"hpc3d.plan: 1 s: gr\xf6\xdfer\u001b"]
        print("no end", end="")
        assert terminal.shown()[-1] == "no end"
        clock.skip(REDRAWN)
        assert terminal.shown()[-1] == "no end"
        print(" of a line")
    assert terminal.shown() == ["a table", "no end of a line", ""]
    assert clock.waits == [0, REDRAWN, REDRAWN, REDRAWN]


def test_closed_terminal_is_no_error(clock, monkeypatch):
    end, start = os.pipe()
    os.close(end)
    with open(start, "w") as terminal:
        monkeypatch.setattr(terminal, "isatty", lambda: True)
        monkeypatch.setattr(sys, "stderr", terminal)
        with sanitized_streams(), progress("plan", first=0):
            clock.skip(0)
            assert sys.stderr.unread


def test_status_line_is_cleared_only_on_the_terminal_stream(clock, monkeypatch):
    terminal, file = Terminal(), io.StringIO()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(sys, "stdout", file)
    with progress("plan", first=0):
        clock.skip(0)
        print("a table")
        assert terminal.shown()[-1] and file.getvalue() == "a table\n"
    assert terminal.shown() == [""]


def test_commands_do_not_log_under_the_name_main():
    """The module of a command is named __main__, a logger that nobody configures."""
    folder = Path(hpc3d.__file__).parent
    commands = [path for path in folder.rglob("*.py") if "__main__" in path.read_text()]
    assert len(commands) > 10
    for path in commands:
        assert "getLogger(__name__)" not in path.read_text(), path
