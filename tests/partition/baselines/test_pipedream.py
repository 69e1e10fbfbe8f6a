"""PipeDream's recurrence, compared with known results and with all partitions."""

import random
from itertools import combinations, pairwise, product

import numpy as np
import pytest

from hpc3d.partition.baselines.pipedream import (
    AsynchronousStage,
    ChainCosts,
    WorkerLevel,
    asynchronous,
)


def costs(seconds, parameters=None, crossing=None):
    zeros = [0.0] * len(seconds)
    return ChainCosts(*map(np.array, (seconds, parameters or zeros, crossing or zeros)))


def test_heavy_unit_gets_more_replicas():
    """3 of 4 workers have 9 s, and 1 has 3 s: a minibatch every 3 s. Four replicas of both would
    take 4 (4 - 1) 80 / (4 x 10) = 24 s for the all-reduce: a minibatch every 6 s."""
    found = asynchronous(costs([9.0, 3.0], [0.0, 80.0]), (WorkerLevel(4, 10.0),))
    assert found == (3.0, [AsynchronousStage(1, 3), AsynchronousStage(2, 1)])


def test_expensive_gradient_reduction_favors_a_pipeline():
    """The all-reduce takes 4 (2 - 1) 30 / (2 x 2) = 30 s, more than 10 s: two stages of 5 s."""
    found = asynchronous(costs([5.0, 5.0], [0.0, 30.0]), (WorkerLevel(2, 2.0),))
    assert found == (5.0, [AsynchronousStage(1, 1), AsynchronousStage(2, 1)])


def test_slow_boundary_is_not_cut():
    """The boundary takes 2 x 9 / 2 = 9 s, and two replicas (5 + 5) / 2 s."""
    found = asynchronous(costs([5.0, 5.0], crossing=[9.0, 0.0]), (WorkerLevel(2, 2.0),))
    assert found == (5.0, [AsynchronousStage(2, 2)])


def test_boundary_traffic_counts_forward_and_backward():
    """The boundary takes 2 x 7 / 2 s, and the all-reduce of replicas 30 s."""
    found = asynchronous(costs([5.0, 5.0], [0.0, 30.0], [7.0, 0.0]), (WorkerLevel(2, 2.0),))
    assert found == (7.0, [AsynchronousStage(1, 1), AsynchronousStage(2, 1)])


def compositions(total, parts):
    return [each for each in product(range(1, total + 1), repeat=parts) if sum(each) == total]


def least(given, workers, bandwidth, start, end, alone):
    """Return the minimum over all cuts of units start to end and all distributions of workers."""
    found = []
    for stages in range(1, min(end - start, workers) + 1):
        for cut in combinations(range(start + 1, end), stages - 1):
            ends = (start, *cut, end)
            moved = max([2 * given.crossing[each - 1] / bandwidth for each in cut], default=0)
            for shares in compositions(workers, stages):
                times = [
                    max(
                        alone(i, j),
                        4 * (m - 1) * sum(given.parameters[i:j]) / (m * bandwidth),
                    )
                    / m
                    for (i, j), m in zip(pairwise(ends), shares, strict=True)
                ]
                found.append(max(moved, *times))
    return min(found)


def drawn(seed, units):
    draw = random.Random(seed)
    rows = ([draw.uniform(1, 9) for _ in range(units)] for _ in range(3))
    return ChainCosts(*map(np.array, rows))


@pytest.mark.parametrize("seed", range(6))
def test_pipedream_plan_is_the_optimum_of_all_partitions(seed):
    given = drawn(seed, 5)
    expected = least(given, 4, 8.0, 0, 5, lambda i, j: sum(given.seconds[i:j]))
    seconds, stages = asynchronous(given, (WorkerLevel(4, 8.0),))
    assert seconds == pytest.approx(expected)
    assert stages[-1].end == 5 and sum(stage.replicas for stage in stages) == 4


@pytest.mark.parametrize("seed", range(3))
def test_hierarchical_plan_treats_nodes_as_workers(seed):
    given = drawn(seed, 4)

    def node(i, j):
        return least(given, 2, 20.0, i, j, lambda i, j: sum(given.seconds[i:j]))

    seconds, stages = asynchronous(given, (WorkerLevel(2, 20.0), WorkerLevel(3, 4.0)))
    assert seconds == pytest.approx(least(given, 3, 4.0, 0, 4, node))
    assert sum(stage.replicas for stage in stages) == 6
