"""PipeDream's partition (A. Harlap et al., arXiv:1806.03377; D. Narayanan et al., SOSP 2019).

It minimises the time that the slowest stage takes for a minibatch, when all stages are busy with
others: its pipeline is asynchronous, and gradients are of weights that are some steps old.  With
T(i, j) the seconds of the units i to j forward and backward, w their bytes of parameters and c
the bytes between two units, on m workers that are joined by links of bandwidth B,

    R(i, j, m) = max(T(i, j), 4 (m - 1) w / (m B)) / m        one stage, with m replicas
    A(i, j, m) = min(R(i, j, m), min over k, m' of max(A(i, k, m - m'), 2 c_k / B, R(k, j, m')))

and on a level of links above, with nodes as its workers, A(i, j, all of a node) stands for T.
The memory of a worker is not looked at.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class ChainCosts(NamedTuple):
    """A chain of units: seconds of a minibatch in each, forward and backward together, bytes of
    its parameters, and bytes of what crosses the border behind it."""

    seconds: np.ndarray
    parameters: np.ndarray
    crossing: np.ndarray


class WorkerLevel(NamedTuple):
    """Workers that are joined by links of so many bytes/s: ranks of a node, or nodes."""

    workers: int
    bandwidth: float


class AsynchronousStage(NamedTuple):
    """The units up to `end` (exclusive), on so many replicas."""

    end: int
    replicas: int


def asynchronous(
    costs: ChainCosts, levels: tuple[WorkerLevel, ...]
) -> tuple[float, list[AsynchronousStage]]:
    """Seconds between two minibatches, and the stages; `levels` from the innermost outwards."""
    seconds = np.concatenate([[0.0], np.cumsum(costs.seconds)])
    parameters = np.concatenate([[0.0], np.cumsum(costs.parameters)])
    alone = _ranges(seconds)
    found = []
    for level in levels:
        found.append(_Level(alone, parameters, costs.crossing, level))
        alone = found[-1].best[:, :, level.workers]
    count = len(costs.seconds)
    stages = _unfolded(found, len(found) - 1, 0, count, levels[-1].workers)
    return float(alone[0, count]), [*stages]


def _ranges(sums):
    """Of every [i, j] the sum from i to j; inf unless i < j."""
    found = sums[None, :] - sums[:, None]
    found[np.tril_indices(len(sums))] = np.inf
    return found


class _Level:
    """A(i, j, m) on one level of links, and where each was cut."""

    def __init__(self, alone, parameters, crossing, level):
        size, workers = len(alone), level.workers
        self.best = np.full((size, size, workers + 1), np.inf)
        self.cut = np.zeros((size, size, workers + 1), int)  # 0: a single stage
        self.last = np.zeros((size, size, workers + 1), int)  # workers of the last stage
        moved = np.zeros(size)
        moved[1:] = 2 * np.asarray(crossing, float) / level.bandwidth
        counts = np.arange(workers + 1)
        counts[0] = 1
        weights = (parameters[None, :] - parameters[:, None])[:, :, None]
        sums = 4 * (counts - 1) * weights / (counts * level.bandwidth)
        self.single = np.maximum(alone[:, :, None], sums) / counts
        self.best[:, :, 1:] = self.single[:, :, 1:]
        for m in range(2, workers + 1):
            for rear in range(1, m):
                self._try(m, rear, moved)

    def _try(self, m, rear, moved):
        """Cuts before a last stage of `rear` workers."""
        front = np.maximum(self.best[:, :, m - rear], moved)  # [i, k]
        for end in range(2, len(moved)):
            candidates = np.maximum(front[:, :end], self.single[:end, end, rear])  # [i, k]
            chosen = candidates.argmin(1)
            least = candidates[np.arange(len(chosen)), chosen]
            better = least < self.best[:, end, m]
            self.best[better, end, m] = least[better]
            self.cut[better, end, m] = chosen[better]
            self.last[better, end, m] = rear


def _unfolded(levels, number, start, end, workers):
    """The stages of units `start` to `end` on workers of a level, each in those of the level
    below."""
    if number < 0:
        yield AsynchronousStage(end, 1)
        return
    level = levels[number]
    cut = level.cut[start, end, workers]
    last = level.last[start, end, workers]
    if cut:
        yield from _unfolded(levels, number, start, cut, workers - last)
    replicas = last if cut else workers
    below = levels[number - 1].best.shape[2] - 1 if number else 1
    for stage in _unfolded(levels, number - 1, cut or start, end, below):
        yield AsynchronousStage(stage.end, int(stage.replicas * replicas))
