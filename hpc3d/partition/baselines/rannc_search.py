"""RaNNC's search for a pipeline partition of a chain of blocks.

The algorithm follows arXiv:2103.16063 and nict-wisdom/rannc, src/graph/DPStaging.cpp. It uses the
smallest number of stages that fits in memory. It first tries pipelines on one node, replicated on
every node, and then pipelines that span more nodes. The number of replicas of a stage and the
number of microbatches are powers of two. With several microbatches, stages recompute activations
and offload their inputs to host memory. For each number of stages, blocks and devices, the search
keeps the state that minimizes

    max over stages of (forward + c) + max over stages of (backward + c)

Among the numbers of microbatches that fit in memory, the search selects the one with the shortest
step. The step time is estimated for lock-step waves t:

    sum over t of max over active s (forward + c) + max over active s (backward + c)
    + max over stages of parameters / A

Here, c is the number of bytes that a stage receives and sends, divided by P. The network model
consists of only two bandwidths: P = 20 GiB/s (point-to-point) and A = 10 GiB/s (all-reduce).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf
from typing import NamedTuple

import numpy as np

from hpc3d.partition.downsets import Chain

POINT_TO_POINT, _ALL_REDUCE = 20 * 2**30, 10 * 2**30  # bytes/s
MOST_MICROBATCHES = 32


class Devices(NamedTuple):
    """Cluster: number of devices, devices per node, and usable memory in bytes per device."""

    count: int
    node: int
    memory: float


class RanncPlan(NamedTuple):
    """Pipeline plan found by RaNNC's search.

    `ends` contains the exclusive end of each stage as a block index, `replicas` the number of
    replicas of each stage, and `seconds` is the step time according to RaNNC's own estimate.
    """

    ends: list[int]
    replicas: list[int]
    microbatches: int
    seconds: float


def first_feasible(
    chain_of: Callable[[int], Chain], batch: int, devices: Devices
) -> RanncPlan | None:
    """Return RaNNC's plan for steps of `batch` samples, or `None` if no plan fits in memory.

    `chain_of(samples)` returns the chain of blocks with costs for microbatches of `samples`
    samples.
    """
    nodes = devices.count // devices.node
    most = 0
    for used in (used for used in range(1, nodes + 1) if nodes % used == 0):
        group = devices.node * used
        tables = [
            _Table(chain_of, batch, devices._replace(count=group), nodes // used, micros)
            for micros in _powers(min(batch, MOST_MICROBATCHES))
        ]
        for stages in range(1, group + 1):
            found = [table.extended() for table in tables]
            if stages > most and any(found):
                return min(filter(None, found), key=lambda plan: plan.seconds)
        most = group
    return None


def lock_step(forward: Sequence[float], backward: Sequence[float], microbatches: int) -> float:
    """Return the time in seconds of a step that is executed in lock-step waves.

    In each wave, all active stages wait for the slowest one.
    """
    stages, seconds = len(forward), 0.0
    for wave in range(microbatches + stages - 1):
        active = slice(max(0, wave - microbatches + 1), wave + 1)
        seconds += max(forward[active]) + max(backward[active])
    return seconds


def _powers(most):
    return [2**power for power in range(most.bit_length())]


class _Costs(NamedTuple):
    """Times in seconds of every possible stage, as arrays indexed [first cut, last cut].

    `moved` is the time to send the stage's inputs and outputs, and `summed` the time of the
    gradient all-reduce. If a stage does not fit in memory, all its times are inf.
    """

    forward: np.ndarray
    backward: np.ndarray
    moved: np.ndarray
    summed: np.ndarray


def _costs(chain: Chain, memory: float, recompute: bool) -> _Costs:
    found = _Costs(*(np.full((chain.count, chain.count), inf) for _ in _Costs._fields))
    for before in range(chain.count - 1):
        after = chain.after(before)
        forward = chain.forward[after] - chain.forward[before]
        backward = chain.backward[after] - chain.backward[before] + recompute * forward
        moved = chain.moved(before, after)
        saved = chain.saved[after] - chain.saved[before]
        working = np.maximum.accumulate(chain.alone[before:])
        held = chain.fixed(before, after) + saved + moved + working
        summed = chain.trained(before, after) / _ALL_REDUCE
        numbers = forward, backward, moved / POINT_TO_POINT, summed
        for into, each in zip(found, numbers, strict=True):
            into[before, after] = np.where(held < memory, each, inf)
    return found


class _State(NamedTuple):
    """Best partitions of the first b blocks over the first d devices, as arrays indexed [b, d].

    `value` is the objective, `forward` and `backward` are the times of the slowest stages in
    seconds, and `block` and `device` are the indices of the last stage's first block and device.
    """

    value: np.ndarray
    forward: np.ndarray
    backward: np.ndarray
    block: np.ndarray
    device: np.ndarray


class _Table:
    """Dynamic-programming search for the best pipeline on a group of devices.

    The pipeline is replicated on `pipelines` such groups. Each call to `extended` adds one stage.
    """

    def __init__(self, chain_of, batch, group, pipelines, micros):
        self.devices, self.pipelines, self.micros = group.count, pipelines, micros
        samples = -(-batch // (pipelines * micros))
        self.sizes = [r for r in _powers(group.count) if r <= samples][::-1]
        chains = (chain_of(-(-batch // (r * pipelines * micros))) for r in self.sizes)
        self.costs = [_costs(chain, group.memory, micros > 1) for chain in chains]
        self.blocks = len(self.costs[0].forward) - 1
        self.states = [self._empty(0.0)]

    def _empty(self, value):
        shape = self.blocks + 1, self.devices + 1
        numbers = (np.full(shape, value) for _ in range(3))
        return _State(*numbers, *(np.zeros(shape, int) for _ in range(2)))

    def extended(self) -> RanncPlan | None:
        """Add a stage; return the plan, or `None` if no plan with this number of stages fits."""
        stages, last = len(self.states), self.states[-1]
        state = self._empty(inf)
        for end in range(stages, self.blocks + 1):
            for devices in range(stages, self.devices + 1):
                self._choose(last, state, end, devices)
        self.states.append(state)
        return self._plan() if np.isfinite(state.value[-1, -1]) else None

    def _choose(self, last, state, end, devices):
        """Choose the last stage for the first `end` blocks on `devices` devices.

        The value of a candidate is the largest forward time of its stages plus their largest
        backward time. As in RaNNC, a candidate replaces the stored one if its value is below the
        stored value. The new stored value is the larger of two values: that of the candidate, and
        the stored value of the stages before its last stage.
        """
        before = len(self.states) - 1
        starts = slice(before, end if before else 1)
        kept = [
            (costs, size)
            for costs, size in zip(self.costs, self.sizes)
            if (devices - size >= before if before else devices == size)
        ]
        if not kept:
            return
        left = [devices - size for _, size in kept]
        moved = np.stack([costs.moved[starts, end] for costs, _ in kept], 1)
        forward = np.stack([costs.forward[starts, end] for costs, _ in kept], 1)
        backward = np.stack([costs.backward[starts, end] for costs, _ in kept], 1)
        front = [each[starts][:, left] for each in last[:3]]
        value = np.maximum(forward + moved, front[1]) + np.maximum(backward + moved, front[2])
        index = _first_kept(value.ravel(), front[0].ravel())
        if index is None:
            return
        row, column = divmod(index, len(left))
        state.value[end, devices] = max(value[row, column], front[0][row, column])
        state.forward[end, devices] = max(forward[row, column], front[1][row, column])
        state.backward[end, devices] = max(backward[row, column], front[2][row, column])
        state.block[end, devices] = before + row
        state.device[end, devices] = left[column]

    def _plan(self):
        """Trace back the stages; return the plan with the step time for lock-step waves."""
        end, devices, ends, sizes = self.blocks, self.devices, [], []
        rows = []
        for state in self.states[:0:-1]:
            start, rest = int(state.block[end, devices]), int(state.device[end, devices])
            ends.append(end)
            sizes.append(devices - rest)
            costs = self.costs[self.sizes.index(devices - rest)]
            rows.append([each[start, end] for each in costs])
            end, devices = start, rest
        forward, backward, moved, summed = np.array(rows[::-1]).T
        seconds = lock_step(forward + moved, backward + moved, self.micros) + summed.max()
        replicas = [self.pipelines * size for size in sizes[::-1]]
        return RanncPlan(ends[::-1], replicas, self.micros, float(seconds))


def _first_kept(value, front):
    """Return the index of the candidate selected by RaNNC, or `None` if none fits in memory.

    Candidates are compared in order, and each better candidate replaces the stored candidate.
    """
    kept, stored, index = None, inf, 0
    while (better := np.flatnonzero(value[index:] < stored)).size:
        kept = index + int(better[0])
        stored, index = max(value[kept], front[kept]), kept + 1
    return kept
