"""Measurements for a profile, which all ranks take at the same time.

Times are CPU times of the rank's thread, so other processes affect them only by contention for
caches and memory bandwidth. All pieces are timed in the same pass. Their times are then scaled so
that the sum equals the time of a pass without timers.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np

from hpc3d.partition.capture import Captured
from hpc3d.partition.measured_profile import UNIT
from hpc3d.partition.model_graph import graph_of
from hpc3d.partition.operation_costs import Operations
from hpc3d.partition.profiles.one_rank_run import OneRankRun
from hpc3d.partition.profiles.piece_timer import PieceTimer

CLOCK = time.thread_time
_PARTS = 8  # number of model chunks for measuring the overhead of a chunk


def sizes(batch: int) -> list[int]:
    """Return the batch size and all powers of two below it, in ascending order."""
    return sorted({*(1 << power for power in range(batch.bit_length())), batch})


def measured_pieces(run: OneRankRun, rows: Sequence[int], repeats: int) -> Iterator[np.ndarray]:
    """Yield the median times in seconds, indexed [pass, piece], for each entry of `rows`.

    `rows` lists numbers of samples per microbatch; the passes are forward and backward.
    """
    timer = PieceTimer(run.captured, run.clock)
    whole = run.stages([range(len(run.captured.pieces))])
    for count in rows:
        micro, pieces, passes = run.micro(count), [], []
        for _ in range(repeats + 1):
            pieces.append(timer.timed(micro, run.weights))
            passes.append(run.passes(whole, count))
        found = np.median(pieces[1:], 0)
        wanted = np.median(passes[1:], 0)
        yield found * (wanted / found.sum(1))[:, None]


def measured_run(run: OneRankRun, repeats: int) -> dict[str, float]:
    """Measure overheads and return them as a dict with the fields of RunCosts.

    The overhead of a model chunk is computed from the times of the model in one chunk and in
    several. The overheads of a step and of the update are measured in steps of the full batch.
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
    """Group the pieces into at most `count` chunks, so that no chunk depends on a later one."""
    atoms = graph_of(Operations(captured), UNIT, 2).atoms
    count = min(count, len(atoms))
    ends = [len(atoms) * part // count for part in range(count + 1)]
    return [
        sorted(piece for atom in atoms[first:end] for piece in atom.pieces)
        for first, end in pairwise(ends)
    ]
