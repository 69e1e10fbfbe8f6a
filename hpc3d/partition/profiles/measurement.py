"""Measure compute, message and all-reduce times on all ranks at the same time.

All pieces are timed in the same pass. The times are then scaled so that their sum equals the time
of a pass without timers.

The time of a message or an all-reduce is the minimum over many repetitions, because another
process on the core of a single rank delays all ranks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from hpc3d.partition.capture import Captured
from hpc3d.partition.measured_profile import UNIT
from hpc3d.partition.model_graph import graph_of
from hpc3d.partition.operation_costs import Operations
from hpc3d.partition.profiles.one_rank_run import OneRankRun
from hpc3d.partition.profiles.piece_timer import PieceTimer

if TYPE_CHECKING:
    from hpc3d.comm.communicator import Communicator
    from hpc3d.runtime.job import Job

_PARTS = 8  # number of model chunks for measuring the overhead per chunk
_MORE = 5  # messages are fast, so their number of repetitions is multiplied by this factor
_SIZES = [1 << power for power in (10, 13, 16, 18, 20, 22, 24)]  # message sizes in bytes


def sizes(batch: int) -> list[int]:
    """Return the batch size and all powers of two below it, in ascending order."""
    return sorted({*(1 << power for power in range(batch.bit_length())), batch})


def measured_pieces(
    run: OneRankRun,
    rows: Sequence[int],
    repeats: int,
    usage: Callable[[], Any] | None = None,
) -> Iterator[np.ndarray]:
    """Yield the measured values of all pieces, for each number of samples in `rows`.

    An array [quantity, piece] contains the median times in seconds of the forward and the backward
    pass. If `usage()` reads the memory of the device, the array also contains the workspace in
    bytes: the memory that an operation of the piece allocates and frees again.
    """
    timer = PieceTimer(run.captured, run.clock, run.device)
    meter = usage and PieceTimer(run.captured, usage, run.device, np.maximum)
    whole = run.stages([range(len(run.captured.pieces))])
    for count in rows:
        micro, pieces, passes = run.micro(count), [], []
        for _ in range(repeats + 1):
            pieces.append(timer.timed(micro, run.weights))
            passes.append(run.passes(whole, count))
        found = np.median(pieces[1:], 0)
        wanted = np.median(passes[1:], 0)
        values = [*(found * (wanted / found.sum(1))[:, None])]
        if meter:
            values.append(meter.timed(micro, run.weights).max(0))
        yield np.array(values)


def measured_run(run: OneRankRun, repeats: int) -> dict[str, float]:
    """Measure the overheads of a run and return them as a dict with the fields of RunCosts.

    The overhead per model chunk is the additional time of running the model in several chunks
    instead of one. The overheads of a step and of the update are measured in full-batch steps.
    """
    one, many = (run.stages(_parts(run.captured, count)) for count in (1, _PARTS))
    apart = []
    for _ in range(2 * repeats + 1):
        more = np.subtract(run.passes(many, 1), run.passes(one, 1))
        apart.append(more / max(1, len(many) - 1))
    steps = [run.step() for _ in range(repeats + 1)]
    forward, backward = np.maximum(0.0, np.median(apart[1:], 0))
    _, update, rest = np.median(steps[1:], 0)
    return {
        "forward": float(forward),
        "backward": float(backward),
        "step": float(rest),
        "update": float(update) / max(1, run.trained_bytes),
    }


def _parts(captured: Captured, count: int) -> list[list[int]]:
    """Group the pieces into at most `count` chunks that depend only on earlier chunks."""
    atoms = graph_of(Operations(captured), UNIT, 2).atoms
    count = min(count, len(atoms))
    ends = [len(atoms) * part // count for part in range(count + 1)]
    return [
        sorted(piece for atom in atoms[first:end] for piece in atom.pieces)
        for first, end in pairwise(ends)
    ]


def timed_calls(
    job: Job, comm: Communicator, repeats: int, clock: Callable[[], Any] = time.perf_counter
) -> list[dict[str, Any]]:
    """Time messages and all-reduces; return a list with one table per operation.

    A table is a dict with the keys op, members, bytes and seconds. Messages are sent between two
    ranks, and all-reduces are over all ranks of `comm`. The list is empty on a single rank. The
    difference of two readings of `clock()` is a time in seconds.
    """
    if job.size == 1:
        return []
    repeats *= _MORE
    sends, sums = (
        [_fastest(job, partial(call, comm, size, clock), repeats) for size in _SIZES]
        for call in (_sent, _summed)
    )
    received = [2 * (1 - 1 / job.size) * size for size in _SIZES]
    return [
        {"op": "send", "members": 2, "bytes": _SIZES, "seconds": sends},
        {"op": "all_reduce", "members": job.size, "bytes": received, "seconds": sums},
    ]


def _fastest(job: Job, call: Callable[[], float], repeats: int) -> float:
    """Return the time of a call in seconds: maximum over ranks, minimum over repetitions."""
    found = []
    for _ in range(repeats):
        job.comm.Barrier()
        found.append(call())
    return min(map(max, zip(*job.gather(found), strict=True)))


def _sent(comm: Communicator, size: int, clock: Callable[[], Any]) -> float:
    """Return half of the round-trip time in seconds of a message between ranks 0 and 1."""
    block, start = comm.pool.zeros((size,), np.uint8), clock()
    if comm.rank == 0:
        sent = comm.send(block, 1)
        comm.recv((size,), np.uint8, 1).wait()
        sent.wait()
    elif comm.rank == 1:
        answer = comm.recv((size,), np.uint8, 0).wait()
        comm.send(answer, 0).wait()
    return _since(start, comm, clock) / 2


def _summed(comm: Communicator, size: int, clock: Callable[[], Any]) -> float:
    block, start = comm.pool.zeros((size // 4,), np.float32), clock()
    comm.all_reduce(block).wait()
    return _since(start, comm, clock)


def _since(start, comm, clock):
    """Return the time in seconds since `start`, after the device has completed all calls."""
    end = clock()
    comm.pool.synchronize()
    return end - start
