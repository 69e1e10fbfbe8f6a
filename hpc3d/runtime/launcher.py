"""Find the launcher of the ranks on this host, and terminate it if it outlives the ranks.

When a launcher ends a job, it waits for its daemons on all hosts, even on unreachable hosts.  For
example, mpirun waited for minutes after a network link had failed.
"""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from pathlib import Path

from hpc3d.runtime.fork import fork_or_end

# Process names of Open MPI's and MPICH's launchers.  Shells and batch systems are excluded.
_LAUNCHERS = ("mpirun", "mpiexec", "orted", "orterun", "prted", "prterun", "hydra_pmi_proxy")
HEARD = 8  # maximum time in s for a launcher to end a job by itself
# Seconds between two signals. A single signal does not stop mpirun while it is waiting for a host.
AGAIN = 2
_SIGNALS = (signal.SIGTERM, signal.SIGKILL)


def born(pid: int) -> str | None:
    """Return the start time of process `pid` in clock ticks, or `None` if it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    state, *rest = fields.rpartition(")")[2].split()
    return None if state == "Z" else rest[18]


def launcher() -> tuple[int, str | None] | None:
    """Return the process ID and the start time of the launcher of this process.

    On a remote host, the launcher's daemon is returned instead.  Returns None if no launcher
    started this process.
    """
    pid = os.getppid()
    with suppress(OSError):
        if Path(f"/proc/{pid}/comm").read_text(encoding="utf-8").strip() in _LAUNCHERS:
            return pid, born(pid)
    return None


def end_later(found: tuple[int, str | None] | None) -> None:
    """Arrange for a launcher to be terminated later if it does not end by itself.

    A child process sends the signals, because this process exits before the launcher.  `found` is
    the result of `launcher()`.
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
