"""What started the ranks of this host, and its end where it outlives them.

A launcher that is asked to end a job waits for the daemons of all hosts, also for one that it does
not reach any more: mpirun was seen to wait for minutes after a link was lost.
"""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from pathlib import Path

from hpc3d.runtime.fork import fork_or_end

# Open MPI's and MPICH's, as /proc names them; never a shell, nor a batch system's own.
_LAUNCHERS = ("mpirun", "mpiexec", "orted", "orterun", "prted", "prterun", "hydra_pmi_proxy")
HEARD = 8  # seconds in which a launcher ends a job that it can end
AGAIN = 2  # seconds between signals: an mpirun that waits for a host waits on after the first
_SIGNALS = (signal.SIGTERM, signal.SIGKILL)


def born(pid: int) -> str | None:
    """When process `pid` was started, in ticks; None if it is not alive."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    state, *rest = fields.rpartition(")")[2].split()
    return None if state == "Z" else rest[18]


def launcher() -> tuple[int, str | None] | None:
    """The process id of the launcher that started this process, or of its daemon on this host,
    and when that was started; None where something else did."""
    pid = os.getppid()
    with suppress(OSError):
        if Path(f"/proc/{pid}/comm").read_text(encoding="utf-8").strip() in _LAUNCHERS:
            return pid, born(pid)
    return None


def end_later(found: tuple[int, str | None] | None) -> None:
    """End the launcher `found` by signals if it does not end by itself; returns at once.

    A process of its own does so, for this one ends before.
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
