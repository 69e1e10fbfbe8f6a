"""PipeDream's partition (A. Harlap et al., arXiv:1806.03377; D. Narayanan et al., SOSP 2019).

The planner minimizes the time per minibatch of the slowest stage; at any time, all stages process
different minibatches. The pipeline is asynchronous: gradients are computed with weights that are
several updates old. Let T(i, j) be the forward and backward time of units i to j in seconds, w the
size of their parameters in bytes, and c_k the number of bytes sent across the boundary after unit
k. On m workers connected by links of B bytes/s, the time per minibatch is R with a single stage,
and A with the best pipeline:

    R(i, j, m) = max(T(i, j), 4 (m - 1) w / (m B)) / m        one stage, with m replicas
    A(i, j, m) = min(R(i, j, m), min over k, m' of max(A(i, k, m - m'), 2 c_k / B, R(k, j, m')))

On the next network level, the workers are nodes, and A(i, j, m) with m ranks per node replaces T.
Memory limits are ignored.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class ChainCosts(NamedTuple):
    """Costs of a chain of units (layers); each array has one entry per unit.

    `seconds` is the sum of the forward and backward time per minibatch, `parameters` is in bytes,
    and `crossing` is the number of bytes sent across the boundary after the unit.
    """

    seconds: np.ndarray
    parameters: np.ndarray
    crossing: np.ndarray


class WorkerLevel(NamedTuple):
    """Network level: workers (ranks or nodes) connected by links of `bandwidth` bytes/s."""

    workers: int
    bandwidth: float


class AsynchronousStage(NamedTuple):
    """Stage that contains the units up to `end` (exclusive) and runs on `replicas` workers."""

    end: int
    replicas: int


def asynchronous(
    costs: ChainCosts, levels: tuple[WorkerLevel, ...]
) -> tuple[float, list[AsynchronousStage]]:
    """Return the optimal partition: its time per minibatch in seconds, and its stages.

    `levels` are ordered from the innermost to the outermost network level.
    """
    seconds = np.concatenate([[0.0], np.cumsum(costs.seconds)])
    parameters = np.concatenate([[0.0], np.cumsum(costs.parameters)])
    alone = seconds[None, :] - seconds[:, None]  # [i, j]
    alone[np.tril_indices(len(seconds))] = np.inf
    found = []
    for level in levels:
        found.append(_Level(alone, parameters, costs.crossing, level))
        alone = found[-1].best[:, :, level.workers]
    count = len(costs.seconds)
    stages = _unfolded(found, len(found) - 1, 0, count, levels[-1].workers)
    return float(alone[0, count]), [*stages]


class _Level:
    """Dynamic-programming table of a network level: times per minibatch and optimal cuts."""

    def __init__(self, alone, parameters, crossing, level):
        size, workers = len(alone), level.workers
        self.best = np.full((size, size, workers + 1), np.inf)
        self.cut = np.zeros((size, size, workers + 1), int)  # 0 for a single stage
        self.last = np.zeros((size, size, workers + 1), int)  # number of workers of the last stage
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
        """Try all partitions for `m` workers in which the last stage has `rear` workers."""
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
    """Yield the optimal stages for units `start` to `end` on the workers of a network level.

    Each stage is expanded recursively into the stages of the next inner level.
    """
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
