"""A schedule with ideal timing: results of the command and the library."""

import pytest

from hpc3d.pipeline.ideal_run import MOST_SIMULATED, ideal_run


def test_ideal_run_reports_its_sizes_and_times():
    found = ideal_run("zb-v", 2, 4, times={"forward": 2.0}).found()
    assert (found["chunks"], found["steps"], found["forward"], found["comm"]) == (2, 1, 2.0, 0.0)
    assert found["makespan"] >= 4 * (2 + 1 + 1)


def test_list_of_equal_times_equals_one_number():
    one = ideal_run("interleaved", 2, 4, 2, times={"backward": 2.0}).found()
    several = ideal_run("interleaved", 2, 4, 2, times={"backward": [1.0] * 4}).found()
    assert one["makespan"] == several["makespan"]


@pytest.mark.parametrize(
    ("sizes", "times", "line"),
    [
        ((2, MOST_SIMULATED), {}, f"limit of {MOST_SIMULATED}"),
        ((2, 2), {"forward": 0, "backward": 0, "weight": 0}, "all 0"),
        ((3, 2), {"comm": [1.0]}, "--comm: 1 value for 2 boundaries"),
    ],
)
def test_invalid_sizes_and_times_are_rejected(sizes, times, line):
    with pytest.raises(ValueError, match=line):
        ideal_run("1f1b", *sizes, times=times)


def test_title_uses_the_singular_for_one():
    assert ideal_run("none", 1, 1).title == "none: 1 stage, 1 microbatch, 1 chunk, 1 step"


def test_searched_schedule_reports_its_bound_and_observes_the_memory_limit():
    times = {"forward": [3.0, 1.0], "backward": [2.0, 4.0], "comm": 0.5}
    found = ideal_run("search", 2, 4, times=times, memory=2)
    result = found.found()
    assert result["bound"] == found.bound <= result["makespan"]
    assert result["gap"] == max(0, result["makespan"] / result["bound"] - 1)
    assert max(result["in_flight"]) <= 2
    assert ideal_run("search", 2, 4, times=times).found()["makespan"] < result["makespan"]


@pytest.mark.parametrize(
    ("name", "changes", "line"),
    [
        ("search", {"memory": 0}, "--memory: the saved data of one microbatch on stage 0 needs 1"),
        (
            "search",
            {"chunks": 2},
            "parallel.chunks = 2: schedule search requires 1 chunk per stage; use 1",
        ),
        ("search", {"steps": 2}, "train.steps = 2: schedule search requires 1; use 1"),
        ("zb-h1", {"memory": 2}, "--memory: not supported by schedule zb-h1"),
    ],
)
def test_options_that_a_search_does_not_support_are_rejected(name, changes, line):
    with pytest.raises(ValueError, match=line):
        ideal_run(name, 2, 4, **changes)
