"""Lower bound on the makespan of a schedule, compared with the optimum of small workloads."""

from math import inf
from random import Random

import pytest

from hpc3d.pipeline.schedule_bound import StageMemory, Workload, lower_bound
from hpc3d.pipeline.schedule_search import find_schedule
from hpc3d.pipeline.timeline import Cost
from tests.pipeline.exact_schedule import optimum

PROVEN = 0.15  # maximum relative distance of the bound from the optimum, below it
CASES = [(1, 3), (2, 2), (2, 4), (3, 2), (3, 3), (3, 4)]


def random_workload(random, stages, micros):
    """Return unequal pass times, memory sizes and memory limits."""
    times = [[random.randint(0, 9) for _ in range(3)] for _ in range(stages)]
    costs = [Cost(*each, comm=random.choice([0, 1, 4])) for each in times]
    memory = []
    for _ in costs:
        saved = random.choice([1, 2, 4])
        inputs = saved * random.choice([0, 0.5, 1, 1, 1.5])
        limit = max(saved, inputs) * random.choice([1, 1.5, 2, 2.5, 3, 5])
        memory.append(StageMemory(saved, inputs, limit))
    return Workload(micros, costs, memory)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("stages", "micros"), CASES)
def test_bound_is_at_most_the_optimum_and_close_to_it(stages, micros, seed):
    work = random_workload(Random(f"{stages} {micros} {seed}"), stages, micros)
    horizon = 2 * find_schedule(work, budget=0).seconds
    best, bound = optimum(work, horizon), lower_bound(work)
    assert (1 - PROVEN) * best <= bound <= best + 1e-5 * horizon


def test_bound_holds_if_several_w_can_be_pending():
    costs = [Cost(5, 6, 5, 1), Cost(9, 9, 3)]
    work = Workload(3, costs, [StageMemory(4, 6, 15), StageMemory(4, 2, 8)])
    assert lower_bound(work) == optimum(work, 150) == 72


@pytest.mark.parametrize("saved", [1, 3])
def test_one_microbatch_in_memory_makes_the_pipeline_serial(saved):
    costs = [Cost(3, 5, 2, 1), Cost(2, 4, 1, 7), Cost(6, 1, 2)]
    work = Workload(4, costs, [StageMemory(saved, saved, saved), *[StageMemory(1, 1)] * 2])
    trip = (3 + 2 + 6) + (1 + 4 + 5) + 2 * (1 + 7)
    assert lower_bound(work) == 4 * (trip + 2)


def test_bound_without_limit_counts_the_busiest_stage_and_its_fill():
    costs = [Cost(1, 1, 1), Cost(2, 9, 5), Cost(1, 1, 1)]
    work = Workload(20, costs, [StageMemory(1, 1, inf)] * 3)
    assert lower_bound(work) == 1 + 20 * (2 + 9 + 5)
