"""Exit codes of commands and jobs. The README explains them."""

from __future__ import annotations

FAILED = 1  # a rank failed, so the job was aborted
BAD_INPUT = 2
CHECK_FAILED = 3  # a check found corrupt data in a file or in a computed result
NOT_FINITE = 4
STALLED = 5  # no progress for run.watchdog_s seconds
STOPPED = 75  # saved a checkpoint and stopped early, as requested (EX_TEMPFAIL)
INTERRUPTED = 130  # interrupted by Ctrl-C after printing partial results (128 + SIGINT)


# Exceptions that invalid input can cause, for example OSError for a path that is too long,
# OverflowError for a number too large for NumPy's integer types, or MemoryError for an array that
# does not fit in memory.
REFUSED = (ValueError, OSError, OverflowError, MemoryError, RecursionError)


class BadData(ValueError):
    """Exception for an invalid data file. The message is one line and suggests a fix."""


class JobExit(Exception):
    """Exception that ends the job on all ranks with exit code `code`, without a message."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code
