"""What takes long says where it is, and what does not is silent."""

import io
import logging
import sys
import time
from pathlib import Path

import pytest

import hpc3d
from hpc3d.patience import patience
from tests.runs import wait_for

log = logging.getLogger("hpc3d.somewhere")


def test_the_newest_record_is_said_after_a_while(capsys):
    with patience("plan", first=0.2):
        for number in range(1000):
            log.info("%d of 1000", number)
        deadline = time.monotonic() + 20
        while (said := capsys.readouterr().err).count("\n") < 1 and time.monotonic() < deadline:
            time.sleep(0.05)
    assert said.splitlines()[0] == "hpc3d.plan: 0 s: 999 of 1000"


def test_what_is_quick_is_silent(capsys):
    with patience("plan", first=0.2):
        log.info("begun")
    time.sleep(0.4)
    assert capsys.readouterr() == ("", "")
    assert not logging.getLogger("hpc3d").handlers


def test_an_error_goes_on():
    with pytest.raises(ValueError, match="bad"), patience("plan"):
        raise ValueError("bad")


def test_inside_of_another_it_only_tells_what_it_does(capsys):
    with patience("train", "8 ranks start", first=0.1), patience("train", "reading", first=0):
        deadline = time.monotonic() + 20
        while not (said := capsys.readouterr().err) and time.monotonic() < deadline:
            time.sleep(0.02)
    assert said == "hpc3d.train: 0 s: reading\n"
    assert not logging.getLogger("hpc3d").handlers


class Terminal(io.StringIO):
    encoding = "ascii"

    def isatty(self):
        return True

    def shown(self):
        """What stands on it, line by line."""
        return [line.rpartition("\r\x1b[K")[2] for line in self.getvalue().split("\n")]


def test_on_a_terminal_one_line_is_rewritten_below_what_is_printed(monkeypatch):
    terminal = Terminal()
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, terminal)
    with patience("plan", "größer\x1b", first=0):
        wait_for(lambda: terminal.shown()[-1])
        assert terminal.shown() == [r"hpc3d.plan: 0 s: gr\xf6\xdfer\u001b"]
        print("a table")
        wait_for(lambda: len(terminal.shown()) == 2 and terminal.shown()[-1])
        assert terminal.shown()[0] == "a table"
        print("no end", end="")
        assert terminal.shown()[-1] == "no end"
        time.sleep(0.6)
        assert terminal.shown()[-1] == "no end"
        print(" of a line")
    assert terminal.shown() == ["a table", "no end of a line", ""]


def test_only_a_terminal_is_written_to_twice(monkeypatch):
    terminal, file = Terminal(), io.StringIO()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(sys, "stdout", file)
    with patience("plan", first=0):
        wait_for(lambda: terminal.shown()[-1])
        print("a table")
        assert terminal.shown()[-1] and file.getvalue() == "a table\n"
    assert terminal.shown() == [""]


def test_what_a_command_tells_is_told_by_its_module_name():
    """Run as a command a module is called __main__, to which nobody listens."""
    folder = Path(hpc3d.__file__).parent
    commands = [path for path in folder.rglob("*.py") if "__main__" in path.read_text()]
    assert len(commands) > 10
    for path in commands:
        assert "getLogger(__name__)" not in path.read_text(), path
