"""Peak memory of the processes that a benchmark starts, read from /proc (Linux)."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event, Thread

_INTERVAL = 0.2  # s between two samples
_PEAK = re.compile(r"^VmHWM:\s+(\d+) kB$", re.MULTILINE)


@contextmanager
def sampled() -> Iterator[dict[int, int]]:
    """Sample the peak resident memory, in bytes, of all Python processes that this one starts.

    Compilers and MPI's launcher are not included. The yielded dict maps process ids to the peak in
    the last sample of each process. The peak never decreases, unless a process resets it, so a
    sample misses only growth just before the end of a process.
    """
    peaks: dict[int, int] = {}
    python = os.readlink("/proc/self/exe")
    stop = Event()

    def sample():
        while not stop.wait(_INTERVAL):
            for number in _descendants(os.getpid()):
                with suppress(OSError):  # the process has ended
                    if os.readlink(f"/proc/{number}/exe") == python:
                        peaks[number] = _of_process(number)

    thread = Thread(target=sample, daemon=True)
    thread.start()
    try:
        yield peaks
    finally:
        stop.set()
        thread.join()


def _descendants(number: int) -> Iterator[int]:
    for path in Path(f"/proc/{number}/task").glob("*/children"):
        with suppress(OSError):  # the thread has ended
            for child in map(int, path.read_text("ascii").split()):
                yield child
                yield from _descendants(child)


def _of_process(number: int | str = "self") -> int:
    """Return the peak resident memory of a process in bytes. Raises OSError if it has ended."""
    found = _PEAK.search(Path(f"/proc/{number}/status").read_text("utf-8", "replace"))
    if not found:
        raise ProcessLookupError(f"process {number} has ended")
    return int(found[1]) * 1024


def of_import(*modules: str) -> int:
    """Return the peak resident memory, in bytes, of a process that only imports `modules`."""
    lines = [*(f"import {name}" for name in modules), f"from {__name__} import _of_process"]
    code = "; ".join([*lines, "print(_of_process())"])
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    return int(done.stdout)
