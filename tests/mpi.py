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
    """Return the environment of a job, with a separate folder for its launcher, because files of a
    killed launcher prevent a later one with the same process id from starting."""
    return {**ENVIRONMENT, "PRTE_MCA_prte_tmpdir_base": tempfile.mkdtemp(dir=SESSIONS.name)}


class JobLock:
    """Lock that lets one test process at a time start MPI jobs, as two would disturb each other.
    A test may start several jobs."""

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
    """Call `launch`, again if the launcher itself did not start, as happens on a busy machine.

    `meanwhile()` runs in a thread during the job; its exceptions are raised here.
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


def launching(*arguments):
    """Run `python ARGUMENTS`, whose option --launch starts ranks; return a CompletedProcess."""
    command = [sys.executable, *map(str, arguments)]
    how = {"env": os.environ | surroundings(), "capture_output": True, "text": True}
    with JOB_LOCK:
        return subprocess.run(command, cwd=ROOT, check=False, timeout=250, **how)


def launch(ranks, *arguments, timeout=250, cwd=None, environment=None, program=sys.executable):
    """Run `mpirun -np ranks python ARGUMENTS`, or another `program`. A hang is a failure, and the
    process group is killed.

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
    """End a launcher, which ends its ranks in their own process groups. Returns its output."""
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(10)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    return process.communicate()


def started(ranks, *arguments, cwd=None, environment=None, program=sys.executable):
    """Start the launcher of a job, a Popen in its own session."""
    command = [launcher(), "-np", str(ranks), str(program), *map(str, arguments)]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    settings = {**os.environ, **surroundings(), "PYTHONPATH": path, **(environment or {})}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    how = {"cwd": cwd, "env": settings, "text": True, "start_new_session": True}
    return subprocess.Popen(command, **pipes, **how)


def launcher():
    """Return the path of mpirun: in this Python's environment, otherwise the first one on PATH."""
    beside = Path(sys.executable).with_name("mpirun")
    return str(beside) if beside.exists() else shutil.which("mpirun")


def checked(*arguments, **how):
    """Call `mpirun`, and return its standard output; it must exit with 0."""
    done = mpirun(*arguments, **how)
    assert done.returncode == 0, f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout
