"""The doctor's findings on several ranks, with planted faults; rank 0 prints those of each plan.

`mpirun -np 3 python -m tests.diagnose.on_job_checks FOLDER`
"""

import json
import os
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

from hpc3d import doctor
from hpc3d.comm import cuda_aware_probe
from hpc3d.comm.all_pairs import AllPairs
from hpc3d.comm.shared_memory import SharedMemory
from hpc3d.diagnose import job_checks
from hpc3d.runtime import launch, shared_folder
from hpc3d.runtime.job import Job
from tests.fakes.fake_cupy import FakeCupy


def nothing(job):
    return []


def versions(job):
    return [patch.object(job_checks, "installed", lambda name: f"{name} of rank {job.rank}")]


def folder(job):
    """Only rank 0 can access the folder."""
    seen = Path.exists
    return [
        patch.object(Path, "exists", lambda path: job.rank == 0 and seen(path)),
        patch.object(shared_folder, "SEEN_WITHIN", 0.1),
    ]


def no_folder(job):
    """Rank 0 cannot write to the folder."""

    def refused(path):
        raise PermissionError(13, "Permission denied")

    return [patch.object(job_checks, "scratch", refused)]


def message(job):
    """MPI's sum is wrong, except on rank 0."""
    summed = AllPairs._all_reduce

    def wrong(self, block, op):
        return summed(self, block, op).then(lambda total: total + job.rank)

    return [patch.object(AllPairs, "_all_reduce", wrong)]


def memory(job):
    """The data gathered in shared memory are stale."""
    gathered = SharedMemory._all_gather

    def wrong(self, block):
        return gathered(self, block).then(lambda whole: whole * 0)

    return [patch.object(SharedMemory, "_all_gather", wrong)]


def cores(job):
    """All ranks are bound to core 0 of 8."""
    return [
        patch.object(os, "sched_getaffinity", lambda pid: {0}),
        patch.object(job_checks, "cores_of_node", lambda: 8),
    ]


def hosts(job):
    """Ranks alternate between two hosts, and the clock of the second one is 5 s behind."""
    now, host = time.time_ns, job.rank % 2
    late = 5_000_000_000 * host
    place = elsewhere(f"host{host}", job.rank // 2, host)
    return [place, patch.object(time, "time_ns", lambda: now() - late)]


def numbers(job):
    """MPI does not detect that the ranks share a host."""
    return [elsewhere("host", 0, 0)]


def elsewhere(host, number, node):
    place = {"host": host, "pid": os.getpid(), "local_rank": number, "node": node}
    return patch.object(Job, "location", lambda self: place)


def gpus(job):
    """All ranks share one device."""
    return [
        patch.object(cuda_aware_probe, "present", lambda: True),
        patch.dict(sys.modules, {"cupy": FakeCupy()}),
    ]


PLANS = (nothing, versions, folder, no_folder, message, memory, cores, hosts, numbers, gpus)


def body(job):
    options = SimpleNamespace(out=sys.argv[1], together=True, timeout=250)
    for plan in PLANS:
        with ExitStack() as planted:
            for change in plan(job):
                planted.enter_context(change)
            found = list(doctor.together(job, options))
        if job.rank == 0:
            print(json.dumps([plan.__name__, found]), flush=True)


if __name__ == "__main__":
    sys.exit(launch.run("test", body))
