"""Copies of this process, which other threads of it may keep from being made."""

from __future__ import annotations

import faulthandler
import os
from pathlib import Path

_COPIED = 5  # seconds until a process has been copied, where nothing is in the way


def fork_or_end() -> int:
    """`os.fork()`, or the end of this process where that does not come back: OpenBLAS ends its
    threads before, and a product on another thread, which waits for them, waits for ever."""
    with Path(os.devnull).open("w") as nowhere:
        faulthandler.dump_traceback_later(_COPIED, exit=True, file=nowhere)
        if child := os.fork():
            faulthandler.cancel_dump_traceback_later()
    return child
