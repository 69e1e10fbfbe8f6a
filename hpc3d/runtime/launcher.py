"""Find the MPI launcher on this host, and terminate it if it keeps running after its ranks exit.

When a launcher ends a job, it waits for its daemons on all hosts, even on unreachable hosts.  For
example, mpirun waited for minutes after a network link had failed.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path

from hpc3d.runtime.fork import fork_or_end

# Process names of Open MPI's and MPICH's launchers.  Shells and batch systems are excluded.
_LAUNCHERS = ("mpirun", "mpiexec", "orted", "orterun", "prted", "prterun", "hydra_pmi_proxy")
HEARD = 8  # time in s after which a launcher that has not ended the job is terminated
# Seconds between two signals. A single signal does not stop mpirun while it is waiting for a host.
AGAIN = 2
# Time in s that `keep_open` keeps a descriptor open: upper limit, and without a known launcher.
_MOST_KEPT, _KEPT = 60, 2


def born(pid: int) -> str | None:
    """Return the start time of process `pid` in clock ticks, or `None` if it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    state, *rest = fields.rpartition(")")[2].split()
    return None if state == "Z" else rest[18]


def launcher() -> tuple[int, str | None] | None:
    """Return the process ID and start time of the launcher that started this process, or `None`.

    On a remote host, these are the process ID and start time of the launcher's daemon.
    """
    pid = os.getppid()
    with suppress(OSError):
        if Path(f"/proc/{pid}/comm").read_text(encoding="utf-8").strip() in _LAUNCHERS:
            return pid, born(pid)
    return None


def end_later(found: tuple[int, str | None] | None) -> None:
    """Start a child process that terminates the launcher if it does not exit by itself.

    This process cannot do so, because it exits before the launcher.  `found` is the result of
    `launcher()`.
    """
    if found is None or fork_or_end():
        return
    os.setsid()
    os.closerange(0, os.sysconf("SC_OPEN_MAX"))
    pid, start = found
    for number, patience in ((signal.SIGTERM, HEARD), (signal.SIGKILL, AGAIN)):
        end = time.monotonic() + patience
        while born(pid) == start:
            if time.monotonic() > end:
                with suppress(OSError):
                    os.kill(pid, number)
                break
            time.sleep(0.1)
    os._exit(0)


def keep_open(descriptor: int, found: tuple[int, str | None] | None) -> None:
    """Start a child process that keeps a file descriptor open until the launcher `found` ends.

    The child executes programs, because a plain fork of this process could deadlock if other
    threads are busy.
    """
    command = ["sleep", str(_KEPT)]
    if found:
        loop = 'while kill -0 "$0"; do sleep 0.1; done'
        command = ["timeout", str(_MOST_KEPT), "sh", "-c", loop, str(found[0])]
    quiet = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
    with suppress(OSError):
        subprocess.Popen(command, pass_fds=[descriptor], start_new_session=True, **quiet)
