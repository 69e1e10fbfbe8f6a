"""Run external commands with a timeout, and look up versions of installed packages."""

from __future__ import annotations

import importlib.metadata as metadata
import os
import re
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from subprocess import Popen


def outcome(
    command: Sequence[object], seconds: float, **environment: str
) -> tuple[int | None, str]:
    """Run a command with a timeout of `seconds`; return its exit code and its output.

    After a timeout, the process group of the command is killed, and the exit code is `None`.  The
    output goes to a temporary file instead of a pipe, because child processes could keep the pipe
    open.
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
    """Send SIGTERM to a process, wait up to 2 s for it to end, and kill its process group."""
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(2)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def installed(name: str) -> str | None:
    """Return the version of a package, or None if it is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def release(version: str) -> list[int]:
    """Return the numeric components of a version without trailing zeros: [2] for 2.0.0rc1."""
    numbers = re.match(r"[\d.]*", version)[0].strip(".").split(".")
    while len(numbers) > 1 and not int(numbers[-1]):
        numbers.pop()
    return [int(number or 0) for number in numbers]
