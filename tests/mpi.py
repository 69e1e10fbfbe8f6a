"""Starts real ranks from a serial pytest: mpirun with a time limit and a clean-up."""

import fcntl
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).parent.parent
ENVIRONMENT = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": "slot:oversubscribe",
}
SESSIONS = tempfile.TemporaryDirectory(prefix="hpc3d-mpirun-", ignore_cleanup_errors=True)

NOT_STARTED = "PMIx server's listener thread failed to start"  # of the launcher, before any rank


def surroundings():
    """The environment of a job, with a folder of its own for its launcher: over what a killed one
    leaves behind, a later one with the same process id does not start."""
    return {**ENVIRONMENT, "PRTE_MCA_prte_tmpdir_base": tempfile.mkdtemp(dir=SESSIONS.name)}


class JobLock:
    """Lock that lets one test process at a time start MPI jobs: two would disturb each other.
    A test may start a job beside its own."""

    def __init__(self):
        self.mutex, self.jobs = threading.Lock(), 0
        self.path = Path(tempfile.gettempdir()) / f"hpc3d-ranks-{os.getuid()}.lock"

    def __enter__(self):
        with self.mutex:
            if not self.jobs:
                self.file = self.path.open("w")
                fcntl.flock(self.file, fcntl.LOCK_EX)
            self.jobs += 1

    def __exit__(self, *_):
        with self.mutex:
            self.jobs -= 1
            if not self.jobs:
                self.file.close()


JOB_LOCK = JobLock()


def mpirun(*arguments, meanwhile=lambda: None, **how):
    """`launch`, again if the launcher itself did not start, as happens on a crowded machine.

    `meanwhile()` runs beside the job, in a thread; what it raises is raised here.
    """
    with JOB_LOCK, ThreadPoolExecutor(1) as pool:
        beside = pool.submit(meanwhile)
        try:
            for _ in range(3):
                done = launch(*arguments, **how)
                if NOT_STARTED not in done.stderr:
                    break
        finally:
            beside.result()
    return done


def launch(ranks, *arguments, timeout=250, cwd=None, environment=None, program=sys.executable):
    """`mpirun -np ranks python ARGUMENTS`, or another `program` than python; a hang is a failure,
    and the whole group is killed.

    Returns a CompletedProcess with text in stdout and stderr, and `seconds`.
    """
    begin = time.monotonic()
    process = started(ranks, *arguments, cwd=cwd, environment=environment, program=program)
    command = process.args
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        out, err = end(process)
        raise AssertionError(f"{command} hung for {timeout} s\n{out}\n{err}") from None
    except BaseException:
        end(process)
        raise
    done = subprocess.CompletedProcess(command, process.returncode, out, err)
    done.seconds = time.monotonic() - begin
    return done


def end(process):
    """End a launcher, which ends its ranks: they have groups of their own.  Returns its output."""
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(10)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    return process.communicate()


def started(ranks, *arguments, cwd=None, environment=None, program=sys.executable):
    """The launcher of such a job, a Popen in a session of its own."""
    command = [launcher(), "-np", str(ranks), str(program), *map(str, arguments)]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    settings = {**os.environ, **surroundings(), "PYTHONPATH": path, **(environment or {})}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    how = {"cwd": cwd, "env": settings, "text": True, "start_new_session": True}
    return subprocess.Popen(command, **pipes, **how)


def launcher():
    """The path of mpirun: that of this Python's environment, otherwise the first one on PATH."""
    beside = Path(sys.executable).with_name("mpirun")
    return str(beside) if beside.exists() else shutil.which("mpirun")


def checked(*arguments, **how):
    """`mpirun`, and its standard output if it exits with 0."""
    done = mpirun(*arguments, **how)
    assert done.returncode == 0, f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout
