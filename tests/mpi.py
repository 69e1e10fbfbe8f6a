"""Real ranks for a serial pytest: mpirun with a time limit, and nothing left behind."""

import fcntl
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parent.parent
ENVIRONMENT = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
}


NOT_STARTED = "PMIx server's listener thread failed to start"  # of the launcher, before any rank


def mpirun(*arguments, **how):
    """`launch`, again if the launcher itself did not start, as happens on a crowded machine."""
    for _ in range(3):
        done = launch(*arguments, **how)
        if NOT_STARTED not in done.stderr:
            break
    return done


@contextmanager
def one_at_a_time():
    """Two jobs would disturb each other, where several processes run the tests."""
    with (Path(tempfile.gettempdir()) / f"hpc3d-ranks-{os.getuid()}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@one_at_a_time()
def launch(ranks, *arguments, timeout=120, cwd=None, environment=None):
    """`mpirun -np ranks python ARGUMENTS`; a hang is a failure, and the whole group is killed.

    Returns a CompletedProcess with text in stdout and stderr.
    """
    beside = Path(sys.executable).with_name("mpirun")
    launcher = str(beside) if beside.exists() else shutil.which("mpirun")
    command = [launcher, "-np", str(ranks), sys.executable, *map(str, arguments)]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    settings = {**os.environ, **ENVIRONMENT, "PYTHONPATH": path, **(environment or {})}
    process = subprocess.Popen(
        command,
        cwd=cwd,
        env=settings,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGTERM)  # the launcher ends its ranks, which have own groups
        time.sleep(2)
        os.killpg(process.pid, signal.SIGKILL)
        out, err = process.communicate()
        raise AssertionError(f"{command} hung for {timeout} s\n{out}\n{err}") from None
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def checked(*arguments, **how):
    """`mpirun`, and its standard output if it exits with 0."""
    done = mpirun(*arguments, **how)
    assert done.returncode == 0, f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout
