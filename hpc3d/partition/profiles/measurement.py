"""Measurements of a profile, which all ranks make at the same time.

Times are CPU times of the rank's thread: other processes affect them only through caches and
memory. Pieces are timed in one pass over all of them. Their times are then scaled so that the sum
equals the time of a pass without timers.
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
_PARTS = 8  # parts of a model when the overhead of a part is measured


def sizes(batch: int) -> list[int]:
    """Return the powers of two up to the batch, and the batch."""
    return sorted({*(1 << power for power in range(batch.bit_length())), batch})


def measured_pieces(run: OneRankRun, rows: Sequence[int], repeats: int) -> Iterator[np.ndarray]:
    """Yield the median seconds [forward or backward, piece] for each number of `rows` per
    microbatch."""
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
    """Return the fields of RunCosts.

    The overhead of a part is the difference between many parts and one. The overheads of a step
    and of its update come from steps of the full batch.
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
    """Return the pieces in at most `count` parts between which values flow forward."""
    atoms = graph_of(Operations(captured), UNIT, 2).atoms
    count = min(count, len(atoms))
    ends = [len(atoms) * part // count for part in range(count + 1)]
    return [
        sorted(piece for atom in atoms[first:end] for piece in atom.pieces)
        for first, end in pairwise(ends)
    ]
