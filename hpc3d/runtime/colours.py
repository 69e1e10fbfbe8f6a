"""Lines in colours, where a terminal shows them."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TextIO

from hpc3d.plain import Controls
from hpc3d.runtime.launcher import launcher

# What SGR calls them (ECMA-48, 8.3.117).
_STYLES = {"faint": "2", "bold": "1", "red": "31", "green": "32", "yellow": "33"}
_TERMINALS = ("/dev/pts/", "/dev/tty", "/dev/console")


def say(line: str, style: str = "", stream: TextIO | None = None) -> None:
    """Print a line to standard output, or another stream; in a style (faint, bold, red, green,
    yellow) if it ends on a terminal."""
    stream = sys.stdout if stream is None else stream
    if style and in_colour(stream):
        line = Controls(f"\x1b[{_STYLES[style]}m{line}\x1b[0m")
    stream.write(line)
    stream.write("\n")
    stream.flush()


def in_colour(stream: TextIO) -> bool:
    """Whether what is written there is shown in colours: on a terminal, and with FORCE_COLOR
    (force-color.org) anywhere, unless NO_COLOR is set (no-color.org)."""
    if os.environ.get("NO_COLOR"):
        return False
    if os.environ.get("FORCE_COLOR"):
        return True
    return os.environ.get("TERM") != "dumb" and _on_terminal(stream)


def _on_terminal(stream: TextIO) -> bool:
    """Whether a stream ends on a terminal.  Open MPI gives ranks one of its own, whatever it does
    with what they write there; then its launcher's streams say so."""
    started = launcher()
    if started is None:
        return stream.isatty()
    try:
        number = stream.fileno()
        end = Path(f"/proc/{started[0]}/fd/{number}").readlink()
    except (OSError, ValueError):
        return False
    return str(end).startswith(_TERMINALS)
