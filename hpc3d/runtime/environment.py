"""Read the environment variables of launchers and users, and set the number of threads per rank.

This module imports neither NumPy nor MPI, because both read the environment when they are loaded.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
LOCAL_RANKS = ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "SLURM_TASKS_PER_NODE")
WORLD_RANKS = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
LOCAL_RANK = ("OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID")
OWN_RANK = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")


def number_in(names: Iterable[str], default: int) -> int:
    """Return the integer at the start of an environment variable's value, such as 4 for "4(x2)".

    The first variable in `names` whose value starts with an integer is used. If there is none,
    `default` is returned.
    """
    for name in names:
        digits = os.environ.get(name, "").split("(")[0].split(",")[0]
        if digits.isdigit():
            return int(digits)
    return default


def cores_of_node() -> int:
    """Return the number of cores of this node that are available to the job.

    This rank's own core binding is ignored. The launcher's affinity mask contains all cores of the
    job, but a container may allow fewer.
    """
    bound = os.sched_getaffinity(0)
    os.sched_setaffinity(0, range(os.sysconf("SC_NPROCESSORS_CONF")))
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, bound)
    return len(allowed & (bound | os.sched_getaffinity(os.getppid())))


def set_environment() -> None:
    """Set the number of threads per rank.

    If the node has fewer cores than ranks, Open MPI yields the core while a rank waits.
    """
    cores, ranks = cores_of_node(), number_in(LOCAL_RANKS, default=1)
    threads = min(cores // ranks, len(os.sched_getaffinity(0)))
    chosen = next(filter(None, map(os.environ.get, THREAD_VARIABLES)), str(max(1, threads)))
    for variable in THREAD_VARIABLES:
        os.environ.setdefault(variable, chosen)
    if ranks > cores:
        os.environ.setdefault("OMPI_MCA_mpi_yield_when_idle", "1")


@contextmanager
def mpi_environment() -> Iterator[None]:
    """Set the environment for MPI initialization, and restore it afterwards.

    The environment is changed only if no launcher started this process.  In this case, Open MPI
    would leave a shared-memory segment behind unless its only transport is `self`.  Open MPI 4
    would also mistake the srun of an interactive shell for its launcher, and abort.
    """
    before = dict(os.environ)
    if number_in(WORLD_RANKS, default=1) == 1 and "PMIX_RANK" not in os.environ:
        os.environ.setdefault("OMPI_MCA_btl", "self")
        os.environ.pop("SLURM_STEP_ID", None)
    try:
        yield
    finally:
        for name in ("OMPI_MCA_btl", "SLURM_STEP_ID"):
            os.environ.pop(name, None)
            if name in before:
                os.environ[name] = before[name]
