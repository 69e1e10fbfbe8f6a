"""What can be asked of this machine from outside of the program: commands and packages."""

from __future__ import annotations

import importlib.metadata as metadata
import os
import re
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from subprocess import Popen


def outcome(
    command: Sequence[object], seconds: float, **environment: str
) -> tuple[int | None, str]:
    """The exit code of a command and what it printed; None for one that took too long.

    It is ended with all of its process group.  Its output goes to a file: a pipe might be held
    open by what it started.
    """
    with tempfile.TemporaryFile("w+", errors="replace") as printed:
        process = subprocess.Popen(
            [str(word) for word in command],
            stdin=subprocess.DEVNULL,
            stdout=printed,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, **environment},
        )
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            if process.poll() is None:
                _end(process)
        printed.seek(0)
        return code, printed.read()


def _end(process: Popen) -> None:
    """End a process, which gets the time to end its ranks, then the rest of its group."""
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(2)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def installed(name: str) -> str | None:
    """The version of a package, or None."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def release(version: str) -> list[int]:
    """A version's numbers, without zeros at the end: 2.0.0rc1 is as good as 2."""
    numbers = re.match(r"[\d.]*", version)[0].strip(".").split(".")
    while len(numbers) > 1 and not int(numbers[-1]):
        numbers.pop()
    return [int(number or 0) for number in numbers]
