"""How a job ends: its exit codes, which README lists."""

from __future__ import annotations

FAILED = 1  # a rank failed, and the job with it
BAD_INPUT = 2
CHECK_FAILED = 3  # something that was stored or computed is wrong
NOT_FINITE = 4
STALLED = 5  # nothing moved for run.watchdog_s
STOPPED = 75  # before its last step, on request, with everything saved: sysexits' EX_TEMPFAIL
INTERRUPTED = 130  # by Ctrl-C, with what there was printed: 128 + SIGINT


# What bad input raises: a path that is too long, a number beyond NumPy's, a size beyond memory.
REFUSED = (ValueError, OSError, OverflowError, MemoryError, RecursionError)


class BadData(ValueError):
    """What was given, as a text to train on, is not what it should be: one line, with a remedy."""


class JobExit(Exception):
    """All ranks end the job with `code`; what there is to say has been said."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code
