"""The launcher of the ranks on this host, and its termination if it outlives them.

When a launcher ends a job, it waits for the daemons of all hosts, even of unreachable ones.  For
example, mpirun waited for minutes after a link was lost.
"""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from pathlib import Path

from hpc3d.runtime.fork import fork_or_end

# Process names of the launchers of Open MPI and MPICH, but not of shells and batch system daemons.
_LAUNCHERS = ("mpirun", "mpiexec", "orted", "orterun", "prted", "prterun", "hydra_pmi_proxy")
HEARD = 8  # s within which a working launcher ends a job
# s between signals, since the first one does not stop an mpirun that is waiting for a host.
AGAIN = 2
_SIGNALS = (signal.SIGTERM, signal.SIGKILL)


def born(pid: int) -> str | None:
    """Return the start time of process `pid` in clock ticks, or None if it is not alive."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    state, *rest = fields.rpartition(")")[2].split()
    return None if state == "Z" else rest[18]


def launcher() -> tuple[int, str | None] | None:
    """Return process ID and start time of this process's launcher, or of its daemon on this host.

    Returns None if no launcher started this process.
    """
    pid = os.getppid()
    with suppress(OSError):
        if Path(f"/proc/{pid}/comm").read_text(encoding="utf-8").strip() in _LAUNCHERS:
            return pid, born(pid)
    return None


def end_later(found: tuple[int, str | None] | None) -> None:
    """End the launcher `found` by signals if it does not end by itself; return immediately.

    A child process sends the signals, because this process exits first.
    """
    if found is None or fork_or_end():
        return
    os.setsid()
    os.closerange(0, os.sysconf("SC_OPEN_MAX"))
    pid, start = found
    patience = HEARD
    for number in _SIGNALS:
        end = time.monotonic() + patience
        while born(pid) == start:
            if time.monotonic() > end:
                with suppress(OSError):
                    os.kill(pid, number)
                break
            time.sleep(0.1)
        patience = AGAIN
    os._exit(0)
