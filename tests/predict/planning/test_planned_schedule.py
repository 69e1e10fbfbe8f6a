"""Search for the schedule of a layout: memory limits, step time, and refusals."""

import pytest

from hpc3d.predict.machine.machine_file import load
from hpc3d.predict.planning import planned_schedule
from hpc3d.predict.planning.peak import stage_memory
from hpc3d.predict.planning.planned_schedule import plan_schedule

SMALL = ["--model.layers", "3", "--model.hidden", "64", "--model.heads", "4"]
SMALL += ["--model.sequence", "32", "--train.batch", "24", "--mesh.p", "2"]
COUNTS = "--parallel.layers_per_stage"
SMALL += ["--parallel.microbatches", "6", COUNTS, "[2, 1]"]


def planned(memory, *words):
    return plan_schedule("gpt-serial", [*SMALL, *words], 2, load("h100"), memory)


@pytest.fixture(scope="module")
def free():
    return planned(1e12)


def test_less_memory_gives_a_slower_step_that_fits(free):
    """Each step down to one microbatch in flight fits, and no step is faster than with more."""
    peaks, seconds = [max(free.step.peaks)], [free.found.seconds]
    while True:
        try:
            found = planned(peaks[-1] - 1)
        except ValueError as error:
            assert str(error).startswith("--memory: no schedule with a split ")
            break
        peaks.append(max(found.step.peaks))
        seconds.append(found.found.seconds)
        assert peaks[-1] < peaks[-2]
        assert seconds[-1] >= seconds[-2] * (1 - 1e-9)
    assert max(planned(peaks[-1]).step.peaks) == peaks[-1]
    assert len(peaks) > 2 and seconds[-1] > 1.2 * seconds[0]
    assert [str(each) for each in found.found.streams[0][:3]] == ["F0", "B0", "W0"]


def test_search_is_repeated_if_the_simulated_peak_does_not_fit(free, monkeypatch):
    def too_high(*layout):
        memory = stage_memory(*layout)
        return memory._replace(limit=memory.limit + memory.saved)

    monkeypatch.setattr(planned_schedule, "stage_memory", too_high)
    limit = max(free.step.peaks) - 1
    assert max(planned(limit).step.peaks) <= limit


def test_makespan_is_that_of_the_simulated_passes(free):
    """The step also contains the optimizer, so it is longer, but not by much."""
    assert free.found.bound <= free.found.seconds < free.step.seconds < 2 * free.found.seconds
    assert free.step.seconds <= free.before.seconds


def test_recomputation_can_make_a_schedule_fit(free):
    with pytest.raises(ValueError, match=r"stage \d needs about .*; increase --memory or use "):
        planned(1e5)
    full = planned(1e12, "--parallel.recompute", "full")
    assert max(full.step.peaks) < max(free.step.peaks)


def test_layouts_without_single_chunk_stages_are_refused():
    with pytest.raises(ValueError, match=r"parallel\.chunks = 2: --schedule search requires 1; "):
        planned(1e12, "--model.layers=4", "--parallel.schedule=zb-v", f"{COUNTS}=[1, 1, 1, 1]")
    with pytest.raises(ValueError, match=r"mesh\.p = 1: --schedule search requires pipeline"):
        plan_schedule("gpt-serial", [], 1, load("h100"), 1e12)
