"""Training, started from Python on real ranks: `mpirun -np N python -m hpc3d.train`."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from signal import SIGKILL

from hpc3d.plain import Problems
from hpc3d.runtime.exit_codes import BAD_INPUT, STOPPED
from hpc3d.training.log import KEPT

_MOST_SAID = 2000  # characters of what a launcher says
_LEAVE = 10  # seconds in which ranks that are told to end do
# What the Makefile sets, too: more ranks than cores, and root's consent, which only root needs.
_SETTINGS = {
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": "slot:oversubscribe",
}
_CONSENT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
# A line of ours on standard error, but for how long it is at work; it may stand after words of
# the launcher.
_SAID = re.compile(r"hpc3d\.train: (?!\d+ s: )(.*)")


def launched(ranks: int, words: list[str]) -> Path:
    """Train with the words of a command line on so many processes; the folder of the run, also of
    one that stopped early, with everything saved.

    ValueError, with the lines of the command, for what it refuses; RuntimeError if a rank or a
    check fails, with what it said and the exit code.
    """
    command = [*_launcher(ranks), sys.executable, "-m", "hpc3d.train", *words]
    code, out, err = _ended(command)
    said = _SAID.findall(err)
    if code == BAD_INPUT:
        raise Problems(said or [err.strip() or "train was refused"])
    folder = next(_kept(out), None)
    if code not in (0, STOPPED) or folder is None:
        why = "; ".join(said) or err.strip()[-_MOST_SAID:]
        raise RuntimeError(f"training ended with exit code {code}: {why}")
    return folder


def _kept(out: str) -> Iterator[Path]:
    """The folder of the run, as its last line says."""
    for line in reversed(out.splitlines()):
        if KEPT in line:
            yield Path(line.partition(KEPT)[2])


def _launcher(ranks: int) -> list[str]:
    """What starts so many ranks; one rank needs nothing.  An mpirun on PATH, such as a cluster's,
    goes before the one that was installed beside this Python."""
    if not isinstance(ranks, int) or ranks < 1:
        raise ValueError(f"ranks = {ranks!r}: must be a whole number, 1 or more")
    if ranks == 1:
        return []
    beside = str(Path(sys.executable).parent)
    found = shutil.which("mpirun") or shutil.which("mpirun", path=beside)
    if found is None:
        raise ValueError(
            f"ranks = {ranks}: there is no mpirun; pip install 'hpc3d[mpi]', or train on 1 rank"
        )
    return [found, "-np", str(ranks)]


def _ended(command: list[str]) -> tuple[int, str, str]:
    """The exit code of a command, and what it wrote; it ends when this is interrupted."""
    settings = _SETTINGS | (_CONSENT if os.geteuid() == 0 else {})
    process = subprocess.Popen(
        command,
        env=settings | dict(os.environ),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,  # an interrupt of the notebook is not one of the ranks
    )
    try:
        out, err = process.communicate()
    except BaseException:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=_LEAVE)
        if process.poll() is None:
            os.killpg(process.pid, SIGKILL)
            process.wait()
        raise
    return process.returncode, out, err
