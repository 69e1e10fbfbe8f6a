"""What the launcher and the user tell a rank by variables, and the threads that it may have.

Nothing here imports NumPy or MPI, which read the environment when they are loaded.
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
    """The first number that an environment variable of `names` begins with."""
    for name in names:
        digits = os.environ.get(name, "").split("(")[0].split(",")[0]
        if digits.isdigit():
            return int(digits)
    return default


def cores_of_node() -> int:
    """How many cores of this node the job may use, whatever the launcher bound this rank to.

    The launcher's own cores are those that it was given; a container may allow fewer.
    """
    bound = os.sched_getaffinity(0)
    os.sched_setaffinity(0, range(os.sysconf("SC_NPROCESSORS_CONF")))
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, bound)
    return len(allowed & (bound | os.sched_getaffinity(os.getppid())))


def set_environment() -> None:
    """Share the node's cores among its ranks; let waiting ranks yield where cores are fewer."""
    cores, ranks = cores_of_node(), number_in(LOCAL_RANKS, default=1)
    threads = min(cores // ranks, len(os.sched_getaffinity(0)))
    chosen = next(filter(None, map(os.environ.get, THREAD_VARIABLES)), str(max(1, threads)))
    for variable in THREAD_VARIABLES:
        os.environ.setdefault(variable, chosen)
    if ranks > cores:
        os.environ.setdefault("OMPI_MCA_mpi_yield_when_idle", "1")


@contextmanager
def mpi_environment() -> Iterator[None]:
    """The environment in which to start MPI: another one if no launcher started this process.

    There, Open MPI leaves a segment of shared memory behind if it may send messages to others.
    Open MPI 4 takes the srun of a shell for its launcher, and aborts.
    """
    before = dict(os.environ)
    if number_in(WORLD_RANKS, default=1) == 1 and "PMIX_RANK" not in os.environ:
        os.environ.setdefault("OMPI_MCA_btl", "self")
        os.environ.pop("SLURM_STEP_ID", None)
    try:
        yield
    finally:
        for name in ("OMPI_MCA_btl", "SLURM_STEP_ID"):
            if name in before:
                os.environ[name] = before[name]
            else:
                os.environ.pop(name, None)
