"""Command that starts ranks: the launcher that belongs to the MPI library of mpi4py."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from hpc3d.runtime.mpi_library import CONSENT, CROWD, INSTALL, UNKNOWN, MpiInstall, launcher_at
from hpc3d.runtime.probe import outcome

# Names of the launchers of an ABI. Debian adds the name of the MPI if both are installed.
_NAMES = {
    "Open MPI": ("mpirun", "mpirun.openmpi"),
    "MPICH": ("mpirun", "mpirun.mpich", "mpiexec.hydra"),
}
_FIND = "from hpc3d.runtime import mpi_library; print(*mpi_library.found() or (), sep='\\n')"


def launch_settings() -> dict[str, str]:
    """Return environment variables that permit the root user, and more ranks than cores."""
    return dict.fromkeys(CONSENT, "1") | CROWD


def launch_command(ranks: int) -> list[str]:
    """Return the command that starts `ranks` ranks on this machine; one rank needs none.

    Raises
    ------
    ValueError
        If `ranks` is not a positive integer, mpi4py loads no MPI library, or no launcher belongs
        to this library.
    """
    if not isinstance(ranks, int) or ranks < 1:
        raise ValueError(f"ranks = {ranks!r}: must be a positive integer")
    if ranks == 1:
        return []
    loaded = _library()
    if loaded is None:
        remedy = "; ".join(INSTALL.splitlines())
        raise ValueError(f"ranks = {ranks}: mpi4py finds no MPI library; {remedy}")
    if path := _best(loaded):
        return [path, "-np", str(ranks)]
    raise ValueError(
        f"ranks = {ranks}: no mpirun belongs to {loaded.maker} {loaded.version}, the MPI "
        f"library of mpi4py ({loaded.path}); put its mpirun on PATH, run pip install "
        "'hpc3d[mpi]', or train on 1 rank"
    )


def _best(loaded: MpiInstall) -> str | None:
    """Return the launcher of the same MPI and version, otherwise one of the same MPI.

    The last resort is a launcher that names no known MPI, such as a script of the site.
    """
    same = unnamed = None
    for path in _candidates(loaded):
        found = launcher_at(path)
        if found.maker == UNKNOWN:
            unnamed = unnamed or path
        elif found.abi == loaded.abi:
            if found.version == loaded.version:
                return path
            same = same or path
    return same or unnamed


def _library() -> MpiInstall | None:
    """Return the MPI library that mpi4py loads, or None.

    Another process loads it, because a program that imports mpi4py later, such as a notebook,
    could no longer decide how MPI is initialized.
    """
    _, printed = outcome([sys.executable, "-c", _FIND], 60)
    fields = printed.splitlines()[-3:]
    return MpiInstall(*fields) if len(fields) == 3 else None


def _candidates(loaded: MpiInstall) -> Iterator[str]:
    """Yield the launchers on PATH, next to the MPI library, and next to this Python."""
    folders = [None, str(Path(sys.executable).parent)]
    if loaded.path and len(Path(loaded.path).parents) > 1:
        folders.insert(1, str(Path(loaded.path).parents[1] / "bin"))
    names = [(name, folder) for folder in folders for name in _NAMES[loaded.abi]]
    for path in dict.fromkeys(shutil.which(name, path=folder) for name, folder in names):
        if path:
            yield path
