"""What messages and sums of gradients take between the ranks that measure.

The fastest of many counts: where something else has the core of a rank, the others wait for it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from hpc3d.comm.communicator import Communicator
    from hpc3d.runtime.job import Job

_MORE = 5  # times the repeats of other measurements, which take longer
_SIZES = [1 << power for power in (10, 13, 16, 18, 20, 22, 24)]  # bytes


def timed_calls(job: Job, comm: Communicator, repeats: int) -> list[dict[str, Any]]:
    """The tables (op, members, bytes, seconds) of a message between two of the ranks and of a sum
    over all of them, `comm`; none of one rank."""
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
    """The least of what `call()` takes on the slowest rank."""
    found = []
    for _ in range(repeats):
        job.comm.Barrier()
        found.append(call())
    return min(map(max, zip(*job.gather(found), strict=True)))


def _sent(comm: Communicator, size: int) -> float:
    """Half of what a message to and fro takes between ranks 0 and 1."""
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
