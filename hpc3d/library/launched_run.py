"""Launch training on MPI ranks from Python: `mpirun -np N python -m hpc3d.train`."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from signal import SIGKILL
from tempfile import TemporaryDirectory

from hpc3d.comm.cuda_aware_probe import surroundings
from hpc3d.console.exit_codes import BAD_INPUT, STOPPED
from hpc3d.console.sanitize import Problems
from hpc3d.training.run_folder import FOLDER_FILE

_MOST_SAID = 2000  # maximum number of characters of launcher output in an error message
_LEAVE = 10  # grace period in s for the ranks to exit after a signal
# Pattern of the lines that hpc3d.train prints to standard error, except progress lines. It also
# matches lines to which the launcher adds a prefix.
_SAID = re.compile(r"hpc3d\.train: (?!\d+ s: )(.*)")


def launched(ranks: int, words: list[str], launcher: Sequence[str] = ()) -> Path:
    """Run `train` with command-line arguments `words` on `ranks` processes; return the run folder.

    The ranks are started by the command `launcher`; the default is mpirun, or none for one rank.
    A run that was asked to stop early is treated as successful. Raises ValueError, with the
    messages of the command, if the command rejects the input. Raises RuntimeError, with the output
    and the exit code of the command, if training fails, for example because a rank failed or a
    check found corrupt data.
    """
    start = [*launcher, "-n", str(ranks)] if launcher else _launcher(ranks)
    command = [*start, sys.executable, "-m", "hpc3d.train", *words]
    with TemporaryDirectory(prefix="hpc3d-") as scratch:
        file = Path(scratch, "run")
        code, err = _ended(command, {FOLDER_FILE: str(file)})
        folder = Path(os.fsdecode(file.read_bytes())) if file.exists() else None
    said = _SAID.findall(err)
    if code == BAD_INPUT:
        raise Problems(said or [err.strip() or "train rejected the input"])
    if code not in (0, STOPPED) or folder is None:
        why = "; ".join(said) or err.strip()[-_MOST_SAID:]
        raise RuntimeError(f"training ended with exit code {code}: {why}")
    return folder


def _launcher(ranks: int) -> list[str]:
    """Return the command that launches `ranks` ranks, or an empty list for one rank.

    An mpirun on PATH takes precedence over one in the directory of this Python interpreter.
    """
    if not isinstance(ranks, int) or ranks < 1:
        raise ValueError(f"ranks = {ranks!r}: must be a positive integer")
    if ranks == 1:
        return []
    beside = str(Path(sys.executable).parent)
    found = shutil.which("mpirun") or shutil.which("mpirun", path=beside)
    if found is None:
        raise ValueError(
            f"ranks = {ranks}: no mpirun found; run pip install 'hpc3d[mpi]', or train on 1 rank"
        )
    return [found, "-np", str(ranks)]


def _ended(command: list[str], settings: dict[str, str]) -> tuple[int, str]:
    """Run a command with additional environment variables; terminate it if interrupted.

    Returns the exit code and the text of standard error.
    """
    process = subprocess.Popen(
        command,
        env={
            **surroundings(),
            **os.environ,
            **settings,
            "NO_COLOR": "1",  # disable the colored output that Jupyter enables
        },
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,  # do not forward a notebook's SIGINT to the ranks
    )
    try:
        _, err = process.communicate()
    except BaseException:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=_LEAVE)
        if process.poll() is None:
            os.killpg(process.pid, SIGKILL)
            process.wait()
        raise
    return process.returncode, err
