"""Checks of the output folder: free space, writing of checkpoints, and file system type."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from hpc3d.console.sanitize import reason_of
from hpc3d.diagnose.node_checks import size
from hpc3d.runtime.finding import FAIL, OK, WARN, Finding

_LITTLE = 10**9  # free space in bytes below which a warning is reported
_NETWORK = ("nfs", "cifs", "smb", "afs", "9p", "fuse.sshfs", "glusterfs")
_MEMORY = ("tmpfs", "ramfs")
MOUNTS = Path("/proc/self/mounts")
ELSEWHERE = "use another folder (--run.out), or free disk space"


def storage(folder: Path) -> Iterator[Finding]:
    """Check that a folder has free space and that files can be written, synced and renamed."""
    try:
        with scratch(folder) as there:
            replaced(Path(there))
    except OSError as error:
        text = f"{folder}: cannot write to this folder ({reason_of(error)})"
        yield Finding(FAIL, "disk", text, ELSEWHERE)
        return
    free = shutil.disk_usage(_standing(folder)).free
    text = f"{folder}: {size(free)} free; fsync and rename work"
    yield Finding(OK, "disk", text) if free > _LITTLE else Finding(WARN, "disk", text, ELSEWHERE)
    yield from lies_on(folder)


def _standing(folder: Path | str) -> Path:
    """Return `folder` or its nearest existing parent, because runs create missing folders."""
    folder = Path(folder).absolute()
    return next(parent for parent in (folder, *folder.parents) if parent.exists())


def scratch(folder: Path) -> tempfile.TemporaryDirectory:
    """Return a temporary folder in `folder`, as a context manager that deletes it on exit."""
    return tempfile.TemporaryDirectory(prefix=".doctor-", dir=_standing(folder))


def replaced(folder: Path) -> None:
    """Replace a file with the same steps as when a checkpoint is saved.

    Write and fsync a new file, rename it to the old name, and fsync the folder.
    """
    new, old = folder / "new", folder / "old"
    old.touch()
    with new.open("wb") as file:
        file.write(bytes(1 << 20))
        file.flush()
        os.fsync(file.fileno())
    new.replace(old)
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def lies_on(folder: Path) -> Iterator[Finding]:
    """Report the type of a folder's file system. Warn about network and in-memory file systems."""
    kind = file_system(_standing(folder))
    if kind.startswith(_NETWORK):
        text = f"{folder} is on a network file system ({kind})"
        remedy = "no fix is required, but a parallel file system or a local disk is faster"
        yield Finding(WARN, "file system", text, remedy)
    elif kind in _MEMORY:
        text = f"{folder} is in memory ({kind}), so a reboot deletes the runs"
        yield Finding(WARN, "file system", text, "use another folder (--run.out)")
    else:
        yield Finding(OK, "file system", kind)


def file_system(path: Path) -> str:
    """Return the type, such as "ext4", of the file system that contains `path`."""
    mounts = {}
    for line in MOUNTS.read_text(encoding="utf-8", errors="replace").splitlines():
        _, point, kind, *_ = line.split(" ")
        point = re.sub(r"\\(\d{3})", lambda code: chr(int(code[1], 8)), point)
        mounts[Path(point)] = kind  # later mounts hide earlier mounts at the same mount point
    path = Path(path).resolve()
    return next(mounts[parent] for parent in (path, *path.parents) if parent in mounts)
