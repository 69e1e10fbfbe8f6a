"""Checks of the local machine that do not need MPI: packages, cores, memory.

Each check yields findings. Training does not depend on these checks. On an unusual machine, a
check may raise an exception; the exception is then reported as a finding.
"""

from __future__ import annotations

import configparser
import importlib.metadata as metadata
import os
import platform
import re
import resource
import sys
from collections.abc import Iterator
from pathlib import Path

from hpc3d.console.sanitize import counted, reason_of
from hpc3d.runtime import environment
from hpc3d.runtime.finding import FAIL, OK, WARN, Finding
from hpc3d.runtime.host_map import has_remote_memory_access
from hpc3d.runtime.probe import installed, outcome, release

_OLDEST = (3, 11)
_BOUND = re.compile(r"([\w.-]+)\s*>=\s*([\d.]+)")
# This code runs in a subprocess, because h5py aborts the process if it loads an incompatible HDF5
# library.
_LOAD = "import numpy, pydantic, h5py; print(h5py.version.hdf5_version)"
# A launcher needs a fixed number of open files, plus a few per rank. With 32 ranks, Open
# MPI 5 crashes or hangs if the limit is 128 open files, and works if the limit is 192.
_FILES, _FILES_OF_RANK = 64, 6
QUOTA = Path("/sys/fs/cgroup/cpu.max")
_GPUS = "/proc/driver/nvidia/gpus"


def python() -> Iterator[Finding]:
    """Report the version and path of Python, and check that the version is supported."""
    found = f"{platform.python_version()}, {sys.executable}"
    if sys.version_info[:2] < _OLDEST:
        yield Finding(FAIL, "Python", found, "use {}.{} or newer".format(*_OLDEST))
    else:
        yield Finding(OK, "Python", found)


def packages() -> Iterator[Finding]:
    """Check that the required packages are recent enough and can be loaded."""
    found, wrong = [], []
    for name, least in requirements():
        version = installed(name)
        found.append(f"{name} {version}")
        if version is None or release(version) < release(least):
            seen = f"{version} is too old" if version else "is not installed"
            remedy = f'{sys.executable} -m pip install "{name}>={least}"'
            wrong.append(Finding(FAIL, name, seen, remedy))
    if not wrong:
        code, printed = outcome([sys.executable, "-c", _LOAD], 60)
        last = (printed.strip().splitlines() or [""])[-1]
        if code == 0:
            yield Finding(OK, "packages", f"{', '.join(found)} with HDF5 {last}")
        else:
            remedy = "reinstall the named package: pip install --force-reinstall --no-cache-dir"
            wrong.append(Finding(FAIL, "packages", f"a package cannot be loaded: {last}", remedy))
    yield from wrong


def requirements() -> list[tuple[str, str]]:
    """Return a list of the required packages as pairs (package, minimum version).

    The requirements are read from the metadata of the installed package or from setup.cfg.
    """
    try:
        lines = [line for line in metadata.requires("hpc3d") or [] if "extra" not in line]
    except metadata.PackageNotFoundError:
        source = configparser.ConfigParser()
        source.read(Path(__file__).parents[2] / "setup.cfg", encoding="utf-8")
        lines = source.get("options", "install_requires", fallback="").splitlines()
    return [found.groups() for found in map(_BOUND.match, lines) if found]


def threads(ranks: int) -> Iterator[Finding]:
    """Check that `ranks` ranks do not have more threads in total than this node has cores."""
    cores = environment.cores_of_node()
    bound, share = len(os.sched_getaffinity(0)), max(1, cores // ranks)
    asked = {
        name: os.environ[name] for name in environment.THREAD_VARIABLES if os.environ.get(name)
    }
    text = f"{counted(cores, 'core')} for {counted(ranks, 'rank')}, "
    text += f"of which this process may use {bound}; "
    given = " ".join(f"{name}={value}" for name, value in asked.items())
    told = [environment.number_in([name], default=0) for name in asked]
    if all(0 < number <= share for number in told):
        yield Finding(OK, "threads", text + (given or f"{counted(share, 'thread')} per rank"))
    else:
        remedy = f"unset {' '.join(asked)}; hpc3d then divides the cores among the ranks"
        yield Finding(WARN, "threads", f"{text}each rank has {given}", remedy)
    yield from _blas()
    yield from quota(cores)


def _blas() -> Iterator[Finding]:
    import numpy as np

    library = np.show_config(mode="dicts")["Build Dependencies"].get("blas", {})
    name = f"{library.get('name', 'unknown')} {library.get('version', '')}".strip()
    try:
        from threadpoolctl import threadpool_info

        pools = [
            f"{pool['internal_api']} with {pool['num_threads']}" for pool in threadpool_info()
        ]
        loaded = f"; threads of this process: {', '.join(pools)}" if pools else ""
    except ImportError:
        loaded = ""
    yield Finding(OK, "BLAS", f"{name}, NumPy {np.__version__}{loaded}")


def quota(cores: int) -> Iterator[Finding]:
    """Check whether a container's CPU quota is less than the number of visible cores."""
    try:
        share, period = QUOTA.read_text().split()
        time = float(share) / float(period)
    except (OSError, ValueError):  # no quota: file missing, quota "max", or older kernel
        return
    if time < cores:
        text = f"the container has {counted(cores, 'core')}, but a CPU quota of {time:.1f}"
        remedy = (
            "start the container with --cpuset-cpus instead of a CPU quota, or use "
            f"{time:.0f} ranks"
        )
        yield Finding(WARN, "cores", text, remedy)


def shared_memory(ranks: int) -> Iterator[Finding]:
    """Check whether collectives within a node can use shared memory instead of MPI."""
    from hpc3d.comm.shared_memory import SHARED, usable

    remedy = "provide more shared memory: docker run --shm-size=8g, or mount /dev/shm"
    if not os.path.isdir(SHARED):
        text = f"{SHARED} does not exist, so the ranks of a node use MPI"
        yield Finding(WARN, "shared memory", text, remedy)
        return
    space = os.statvfs(SHARED)
    free, whole = (blocks * space.f_frsize for blocks in (space.f_bavail, space.f_blocks))
    text = f"{SHARED} has {size(free)} free of {size(whole)}"
    try:
        os.close(os.open(SHARED, os.O_TMPFILE | os.O_RDWR, 0o600))
    except OSError as error:
        text, remedy = f"{SHARED}: {reason_of(error)}", "run with --mesh.transport mpi"
        yield Finding(FAIL, "shared memory", text, remedy)
        return
    if usable(ranks):
        yield Finding(OK, "shared memory", text)
    elif platform.machine() not in ("x86_64", "AMD64"):
        text = f"not used on {platform.machine()}; the ranks of a node use MPI"
        yield Finding(OK, "shared memory", text)
    else:
        text += f", too little for {counted(ranks, 'rank')}, so they use MPI"
        yield Finding(WARN, "shared memory", text, remedy)


def limits(ranks: int) -> Iterator[Finding]:
    """Check the process limits on open files, file size and locked memory."""
    unlimited, need = resource.RLIM_INFINITY, _FILES + _FILES_OF_RANK * ranks
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == unlimited or soft >= need:
        yield Finding(OK, "open files", "unlimited" if soft == unlimited else str(soft))
    else:
        able = f"ulimit -n {need}"
        if hard != unlimited and hard < need:
            able = "ask the administrator for a higher limit (limits.conf)"
        yield Finding(
            WARN, "open files", f"{soft}, but {counted(ranks, 'rank')} may need {need}", able
        )
    largest, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if largest != unlimited:
        text = f"at most {size(largest)}; larger traces and checkpoints cannot be written"
        yield Finding(WARN, "file size", text, "ulimit -f unlimited")
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if (has_remote_memory_access() or os.path.isdir(_GPUS)) and locked != unlimited:
        text = f"at most {size(locked)}, but network interfaces and GPUs need locked memory"
        yield Finding(WARN, "locked memory", text, "ulimit -l unlimited (limits.conf, slurmd)")


def size(count: float) -> str:
    """Format a number of bytes with three or four significant digits and a unit."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.4g} TB"
