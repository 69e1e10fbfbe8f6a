"""Colored output on terminals."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TextIO

from hpc3d.console.sanitize import Controls
from hpc3d.runtime.launcher import launcher

# Parameters of SGR (Select Graphic Rendition) escape sequences; see ECMA-48, 8.3.117.
_STYLES = {"faint": "2", "bold": "1", "red": "31", "green": "32", "yellow": "33"}
_TERMINALS = ("/dev/pts/", "/dev/tty", "/dev/console")


def say(line: str, style: str = "", stream: TextIO | None = None) -> None:
    """Print a line to a stream (None: standard output), colored if the stream supports colors.

    `style` is "faint", "bold", "red", "green", "yellow", or "" for plain text.
    """
    stream = sys.stdout if stream is None else stream
    if style and in_colour(stream):
        line = Controls(f"\x1b[{_STYLES[style]}m{line}\x1b[0m")
    stream.write(line)
    stream.write("\n")
    stream.flush()


def in_colour(stream: TextIO) -> bool:
    """Return True if output to a stream should be colored.

    NO_COLOR disables colors (no-color.org).  FORCE_COLOR enables them for any stream
    (force-color.org).  Otherwise, output is colored only on a terminal.
    """
    if os.environ.get("NO_COLOR"):
        return False
    if os.environ.get("FORCE_COLOR"):
        return True
    return os.environ.get("TERM") != "dumb" and _on_terminal(stream)


def _on_terminal(stream: TextIO) -> bool:
    """Return True if a stream is connected to a terminal.

    Open MPI always connects ranks to a pseudo-terminal.  If a launcher started this process, the
    launcher's own stream is therefore inspected instead.
    """
    started = launcher()
    if started is None:
        return stream.isatty()
    try:
        number = stream.fileno()
        end = Path(f"/proc/{started[0]}/fd/{number}").readlink()
    except (OSError, ValueError):
        return False
    return str(end).startswith(_TERMINALS)
