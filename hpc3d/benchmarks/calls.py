"""Benchmark hpc3d's collectives against those of the MPI library, over all ranks.

The lower bound on the time of a collective is the number of bytes that a NIC must send, divided by
the measured point-to-point bandwidth between the first and the last rank.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from math import inf
from statistics import median
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from argparse import Namespace

    from hpc3d.comm.communicator import Communicator, Pending
    from hpc3d.runtime.job import Job

_SIZES = [1 << power for power in (14, 16, 18, 20, 22)]  # sizes in bytes of the unsharded array
# Number of times that the array crosses the network in each collective. This number is used to
# compute the lower bound. An all-reduce consists of a reduce-scatter and an all-gather.
_OPS = {"all_gather": 1, "reduce_scatter": 1, "all_reduce": 2}
_HEAD = ("op", "members", "bytes", "hpc3d ms", "MPI ms", "bound ms")
_KEYS = ("op", "members", "bytes", "ours_s", "mpi_s", "bound_s")
_ROUNDS = 5
_MESSAGE = 1 << 22  # message size in bytes for measuring the bandwidth


def calls(job: Job, options: Namespace) -> None:
    """Time each collective at each array size, and print one table row per measurement.

    On a single host, no data crosses the network, so the lower bound on the time is 0.
    """
    from hpc3d.comm.cartesian import build

    if job.size == 1:
        job.refuse(
            "`bench calls` needs at least 2 ranks; run mpirun -np 2 python -m hpc3d.bench calls"
        )
    ours, mpi = (build({"x": job.size}, transport=way).comm("x") for way in ("auto", "mpi"))
    mpi.long = inf
    hosts = len(set(job.gather(job.location()["host"])))
    rate = _rate_of(job, mpi) if hosts > 1 else inf
    rows = []
    _say(job, _HEAD)
    for op, times in _OPS.items():
        for size in _SIZES:
            pair = _seconds(job, op, size, (ours, mpi), options.rounds or _ROUNDS)
            bound = times * size * (hosts - 1) / hosts / rate
            rows.append((op, job.size, size, *pair, bound))
            _say(job, [1e3 * cell if isinstance(cell, float) else cell for cell in rows[-1]])
    if options.json and job.rank == 0:
        found = [dict(zip(_KEYS, row, strict=True)) for row in rows]
        print(json.dumps({"calls": found}), flush=True)


def _say(job: Job, row: Sequence[object]) -> None:
    if job.rank == 0:
        cells = [f"{cell:.2f}" if isinstance(cell, float) else str(cell) for cell in row]
        print("{:15}{:>8}{:>10}{:>10}{:>10}{:>10}".format(*cells), flush=True)


def _seconds(
    job: Job, op: str, size: int, comms: Sequence[Communicator], rounds: int
) -> list[float]:
    """For each communicator, return the median time of a collective in seconds.

    Each call is timed on its slowest rank, and the communicators are used alternately.
    """
    rows = size // 4 // job.size
    block = np.ones(rows if op == "all_gather" else rows * job.size, np.float32)
    spent = []
    for _ in range(rounds + 1):
        spent.append(
            [_duration(job, lambda comm=comm: getattr(comm, op)(block)) for comm in comms]
        )
    return [median(times) for times in zip(*job.comm.bcast(spent[1:]), strict=True)]


def _duration(job: Job, call: Callable[[], Pending]) -> float:
    """Return the time in s from a barrier until `call()` has completed on all ranks."""
    job.comm.Barrier()
    start = time.perf_counter()
    call().wait()
    return max(job.gather(time.perf_counter() - start))


def _rate_of(job: Job, comm: Communicator) -> float:
    """Return the best of three measured bandwidths from the first to the last rank, in B/s."""
    last, spent = job.size - 1, []
    message, answer = np.ones(_MESSAGE, np.uint8), np.ones(1, np.uint8)
    for _ in range(3):
        start = time.perf_counter()
        if job.rank == 0:
            comm.send(message, last).wait()
            comm.recv((1,), np.uint8, last).wait()
        elif job.rank == last:
            comm.recv((_MESSAGE,), np.uint8, 0).wait()
            comm.send(answer, 0).wait()
        spent.append(time.perf_counter() - start)
    return job.comm.bcast(_MESSAGE / min(spent))
