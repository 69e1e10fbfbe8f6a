"""Search for schedules: optimality, memory limits, and training with a found schedule."""

from random import Random

import pytest

from hpc3d.comm.threads import run
from hpc3d.pipeline.csv_schedule import to_csv
from hpc3d.pipeline.schedule import instruction_streams
from hpc3d.pipeline.schedule_bound import StageMemory, Workload
from hpc3d.pipeline.schedule_search import MOST_SEARCHED, find_schedule
from hpc3d.pipeline.step_model import in_flight
from hpc3d.pipeline.timeline import Cost, makespan, timeline
from tests.pipeline.exact_schedule import optimum
from tests.pipeline.mixes import config_of, same, serial, train
from tests.pipeline.test_schedule_bound import CASES, random_workload

FEW = 60_000  # passes that a test simulates
UNEVEN = [Cost(21, 20, 20, 1), Cost(19, 20, 18, 1), Cost(5, 5, 5, 1), Cost(15, 15, 15)]


def peak(stream, memory):
    """Return the maximum size of the saved data on a stage."""
    size = most = 0.0
    for op, *_ in stream:
        flying, waiting = {"F": (1, 0), "B": (-1, 1), "W": (0, -1)}[op]
        size += flying * memory.saved + waiting * memory.weight_inputs
        most = max(most, size)
    return most


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("stages", "micros"), CASES)
def test_found_schedule_is_nearly_optimal_and_fits_in_memory(stages, micros, seed):
    work = random_workload(Random(f"{stages} {micros} {seed}"), stages, micros)
    found = find_schedule(work, FEW)
    best = optimum(work, 2 * found.seconds)
    assert best * (1 - 1e-5) <= found.seconds <= 1.05 * best
    assert found.seconds == makespan(timeline(found.streams, found.placement, work.costs))
    for stream, memory in zip(found.streams, work.memory, strict=True):
        assert len(stream) == len({*stream}) == 3 * micros
        assert peak(stream, memory) <= memory.limit * (1 + 1e-9)


@pytest.mark.parametrize("slots", [1, 2, 3, 4, 6, 8])
def test_gap_is_small_for_unequal_stages_and_any_memory(slots):
    found = find_schedule(Workload(8, UNEVEN, [StageMemory(1, 1, slots)] * 4), 5 * FEW)
    assert 0 <= found.gap <= 0.06
    assert all(in_flight(stream).activations <= slots for stream in found.streams)


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "zb-h2"])
def test_search_is_at_least_as_fast_as_a_schedule_that_fits(name):
    streams, placement = instruction_streams(name, 4, 8)
    memory = [
        StageMemory(2, 1, peak([op for op in stream if op.op != "W"], StageMemory(2, 0)) + 4)
        for stream in streams
    ]
    found = find_schedule(Workload(8, UNEVEN, memory), FEW)
    assert found.seconds <= makespan(timeline(streams, placement, UNEVEN))


def test_search_is_deterministic():
    work = Workload(6, UNEVEN, [StageMemory(1, 1, 3)] * 4)
    assert find_schedule(work, FEW) == find_schedule(work, FEW)


def test_search_refuses_what_does_not_fit_or_takes_too_long():
    with pytest.raises(ValueError, match="saved data of one microbatch on stage 1 needs 3, "):
        find_schedule(Workload(2, UNEVEN[:2], [StageMemory(1, 1, 2), StageMemory(1, 3, 2)]))
    with pytest.raises(ValueError, match=f"exceeds the limit of {MOST_SEARCHED}"):
        find_schedule(Workload(MOST_SEARCHED, UNEVEN, [StageMemory(1, 1)] * 4))


def test_training_with_a_found_schedule_matches_serial(tmp_path):
    work = Workload(6, UNEVEN, [StageMemory(1, 1, 3)] * 4)
    found = find_schedule(work, FEW)
    assert found.seconds < find_schedule(work, 0).seconds
    to_csv(str(tmp_path / "found.csv"), found.streams, found.placement)
    config = config_of(f"p=4 schedule=csv:{tmp_path}/found.csv microbatches=6")
    for trained in run(config.sizes(), lambda mesh: train(mesh, config)):
        same(trained, serial(""))
