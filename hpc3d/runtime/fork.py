"""Fork with a timeout, since other threads of this process may block a fork."""

from __future__ import annotations

import faulthandler
import os
from pathlib import Path

_COPIED = 5  # s, upper limit on the duration of a fork that is not blocked


def fork_or_end() -> int:
    """Call `os.fork()`, and end this process if the call does not return.

    OpenBLAS stops its threads before a fork.  A BLAS call on another thread that waits for them
    then deadlocks.
    """
    with Path(os.devnull).open("w") as nowhere:
        faulthandler.dump_traceback_later(_COPIED, exit=True, file=nowhere)
        if child := os.fork():
            faulthandler.cancel_dump_traceback_later()
    return child
