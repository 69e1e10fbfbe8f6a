"""Colors are used on terminals, or if the user requests them."""

import io
import os
import pty

import pytest

from hpc3d.console.sanitize import sanitized_streams
from hpc3d.runtime import colors


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self):
        return True


@pytest.fixture(autouse=True)
def bare(monkeypatch):
    monkeypatch.setattr(colors, "launcher", lambda: None)
    for name in ("FORCE_COLOR", "NO_COLOR", "TERM"):
        monkeypatch.delenv(name, raising=False)


def written(stream, style="red"):
    colors.say("a line", style, stream)
    return stream.getvalue()


def test_terminal_output_is_colored(monkeypatch):
    assert written(Terminal()) == "\x1b[31ma line\x1b[0m\n"
    assert written(Terminal(), style="") == "a line\n"
    assert written(io.StringIO()) == "a line\n"
    for name, value in (("TERM", "dumb"), ("NO_COLOR", "1")):
        monkeypatch.setenv(name, value)
        assert written(Terminal()) == "a line\n"


def test_force_color_colors_any_stream(monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert written(io.StringIO()) == "\x1b[31ma line\x1b[0m\n"
    monkeypatch.setenv("NO_COLOR", "1")
    assert written(io.StringIO()) == "a line\n"


def test_own_colors_pass_the_sanitizer_and_others_are_escaped(monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr("sys.stdout", terminal)
    with sanitized_streams():
        colors.say("a line", "bold")
        print("\x1b[1mx")
    assert terminal.getvalue() == "\x1b[1ma line\x1b[0m\n\\u001b[1mx\n"


def test_launcher_streams_decide_about_color(monkeypatch):
    """This process plays the launcher: a rank's stream is identified by its number there."""
    monkeypatch.setattr(colors, "launcher", lambda: (os.getpid(), None))
    ends = *os.pipe(), *pty.openpty()
    try:
        with open(ends[1], "w", closefd=False) as pipe, open(ends[3], "w", closefd=False) as tty:
            assert (colors.in_colour(pipe), colors.in_colour(tty)) == (False, True)
        assert not colors.in_colour(Terminal())  # no file at all
    finally:
        for end in ends:
            os.close(end)
