"""Timer of messages and gradient all-reduces between the ranks of a profiling run.

Each time is the minimum over many repetitions, because all ranks are delayed if another process
occupies the core of one rank.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from hpc3d.comm.communicator import Communicator
    from hpc3d.runtime.job import Job

_MORE = 5  # factor on the number of repetitions, because messages take little time
_SIZES = [1 << power for power in (10, 13, 16, 18, 20, 22, 24)]  # bytes


def timed_calls(job: Job, comm: Communicator, repeats: int) -> list[dict[str, Any]]:
    """Measure messages and all-reduces; return tables (op, members, bytes, seconds).

    Messages are sent between two ranks. All-reduces are over all ranks of `comm`. With a single
    rank, no tables are returned.
    """
    if job.size == 1:
        return []
    repeats *= _MORE
    sends = [_fastest(job, lambda size=size: _sent(comm, size), repeats) for size in _SIZES]
    sums = [_fastest(job, lambda size=size: _summed(comm, size), repeats) for size in _SIZES]
    received = [2 * (1 - 1 / job.size) * size for size in _SIZES]
    return [
        {"op": "send", "members": 2, "bytes": _SIZES, "seconds": sends},
        {"op": "all_reduce", "members": job.size, "bytes": received, "seconds": sums},
    ]


def _fastest(job: Job, call: Callable[[], float], repeats: int) -> float:
    """Return the minimum over repetitions of the maximum of `call()` over ranks, in seconds."""
    found = []
    for _ in range(repeats):
        job.comm.Barrier()
        found.append(call())
    return min(map(max, zip(*job.gather(found), strict=True)))


def _sent(comm: Communicator, size: int) -> float:
    """Return half of the round-trip time of a message between ranks 0 and 1."""
    block, start = np.ones(size, np.uint8), time.perf_counter()
    if comm.rank == 0:
        sent = comm.send(block, 1)
        comm.recv((size,), np.uint8, 1).wait()
        sent.wait()
    elif comm.rank == 1:
        answer = comm.recv((size,), np.uint8, 0).wait()
        comm.send(answer, 0).wait()
    return (time.perf_counter() - start) / 2


def _summed(comm: Communicator, size: int) -> float:
    block, start = np.ones(size // 4, np.float32), time.perf_counter()
    comm.all_reduce(block).wait()
    return time.perf_counter() - start
