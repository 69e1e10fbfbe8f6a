"""A schedule with its times: what the command and the library say of it."""

import pytest

from hpc3d.pipeline.ideal_run import MOST_SIMULATED, ideal_run


def test_what_is_found_names_what_was_asked():
    found = ideal_run("zb-v", 2, 4, times={"forward": 2.0}).found()
    assert (found["chunks"], found["steps"], found["forward"], found["comm"]) == (2, 1, 2.0, 0.0)
    assert found["makespan"] >= 4 * (2 + 1 + 1)


def test_a_list_of_equal_parts_is_one_number():
    one = ideal_run("interleaved", 2, 4, 2, times={"backward": 2.0}).found()
    several = ideal_run("interleaved", 2, 4, 2, times={"backward": [1.0] * 4}).found()
    assert one["makespan"] == several["makespan"]


@pytest.mark.parametrize(
    ("sizes", "times", "line"),
    [
        ((2, MOST_SIMULATED), {}, f"at most {MOST_SIMULATED}"),
        ((2, 2), {"forward": 0, "backward": 0, "weight": 0}, "all 0"),
        ((3, 2), {"comm": [1.0]}, "--comm: 1 value for 2 boundaries"),
    ],
)
def test_what_cannot_be_is_refused(sizes, times, line):
    with pytest.raises(ValueError, match=line):
        ideal_run("1f1b", *sizes, times=times)


def test_its_title_has_no_plural_of_one():
    assert ideal_run("none", 1, 1).title == "none: 1 stage, 1 microbatch, 1 chunk, 1 step"
