"""Launch training on MPI ranks from Python: `mpirun -np N python -m hpc3d.train`."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from signal import SIGKILL
from tempfile import TemporaryDirectory

from hpc3d.console.exit_codes import BAD_INPUT, STOPPED
from hpc3d.console.sanitize import Problems
from hpc3d.runtime.mpi_launcher import SAID, launch_command, launch_settings
from hpc3d.training.run_folder import FOLDER_FILE

_MOST_SAID = 2000  # maximum number of characters of launcher output in an error message
_LEAVE = 10  # grace period in s for the ranks to exit after a signal


def launched(
    ranks: int, words: list[str], launcher: Sequence[str] = (), quiet: bool = True
) -> Path:
    """Run `train` with command-line arguments `words` on `ranks` processes; return the run folder.

    The ranks are started by the command `launcher`; the default is mpirun, or none for one rank.
    Unless `quiet` is true, the log of the run is printed while it runs.
    A run that was asked to stop early is treated as successful. Raises ValueError, with the
    messages of the command, if the command rejects the input. Raises RuntimeError, with the output
    and the exit code of the command, if training fails, for example because a rank failed or a
    check found corrupt data.
    """
    start = [*launcher, "-n", str(ranks)] if launcher else launch_command(ranks)
    command = [*start, sys.executable, "-m", "hpc3d.train", *words]
    with TemporaryDirectory(prefix="hpc3d-") as scratch:
        file = Path(scratch, "run")
        code, err = _ended(command, {FOLDER_FILE: str(file)}, quiet)
        folder = Path(os.fsdecode(file.read_bytes())) if file.exists() else None
    said = SAID.findall(err)
    if code == BAD_INPUT:
        raise Problems(said or [err.strip() or "train rejected the input"])
    if code not in (0, STOPPED) or folder is None:
        why = "; ".join(said) or err.strip()[-_MOST_SAID:] or f"{command[0]} started no run"
        raise RuntimeError(f"training ended with exit code {code}: {why}")
    return folder


def _ended(command: list[str], settings: dict[str, str], quiet: bool) -> tuple[int, str]:
    """Run a command with additional environment variables; terminate it if interrupted.

    Unless `quiet` is true, its standard output is printed. Returns the exit code and the text of
    standard error.
    """
    process = subprocess.Popen(
        command,
        env=launch_settings() | os.environ | settings | {"NO_COLOR": "1"},  # Jupyter sets colors
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,  # do not forward a notebook's SIGINT to the ranks
    )
    with process:
        assert process.stdout and process.stderr
        said: list[str] = []
        reader = threading.Thread(target=said.extend, args=[process.stderr], daemon=True)
        reader.start()
        try:
            for line in process.stdout:  # a notebook's sys.stdout has no descriptor to inherit
                if not quiet:
                    print(line, end="", flush=True)
            process.wait()
        except BaseException:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(_LEAVE)
            if process.poll() is None:
                os.killpg(process.pid, SIGKILL)
            raise
        reader.join()
    return process.returncode, "".join(said)
