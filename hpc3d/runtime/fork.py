"""Fork with a timeout, because a fork may deadlock while other threads are in BLAS calls."""

from __future__ import annotations

import faulthandler
import os
from pathlib import Path

_COPIED = 5  # timeout in s, far above the duration of a fork that does not deadlock


def fork_or_end() -> int:
    """Call `os.fork()`, and end this process if the call does not return in time.

    OpenBLAS stops its worker threads before a fork.  If another thread is in a BLAS call that
    waits for these workers, the process deadlocks.
    """
    with Path(os.devnull).open("w") as nowhere:
        faulthandler.dump_traceback_later(_COPIED, exit=True, file=nowhere)
        if child := os.fork():
            faulthandler.cancel_dump_traceback_later()
    return child
