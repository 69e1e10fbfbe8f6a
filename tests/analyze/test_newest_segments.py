"""Wait times within steps, from the newest trace segments."""

import pytest

from hpc3d.analyze.newest_segments import NewestSegments
from hpc3d.trace.segment import segment_path
from tests.analyze.waiting_ranks import segment


def test_waits_per_axis_come_from_the_newest_steps_of_all_ranks(tmp_path):
    """Rank 0 waits 20 of its 30 ms for rank 1, which then waits 5 of 10 ms. The whole time of a
    message counts as waiting."""
    segment(tmp_path, 0, 0, [("all_gather", 0, 10, 30), ("all_reduce", 1, 65, 5)])
    segment(tmp_path, 1, 0, [("all_gather", 0, 30, 10), ("all_reduce", 1, 60, 10)])
    found = NewestSegments(tmp_path).axes()
    assert found.calls == {"x": pytest.approx(55 / 200)}
    assert found.waits == {"x": pytest.approx((20 + 5) / 200)}
    assert found.late == {1: 1, 0: 1}
    segment(tmp_path, 0, 1, [("recv", 0, 10, 40)], step=1)
    assert NewestSegments(tmp_path).axes() == found  # rank 1 has no segment of step 1
    segment(tmp_path, 1, 1, [("recv", 0, 10, 20)], step=1)
    newest = NewestSegments(tmp_path).axes()
    assert newest.steps == range(1, 2) and newest.waits == {"x": pytest.approx(60 / 200)}


def test_unreadable_segments_are_skipped(tmp_path):
    assert NewestSegments(tmp_path).axes() is None
    segment(tmp_path, 0, 0, [("all_gather", 0, 10, 30)])
    segment_path(tmp_path, 1, 0).write_bytes(b"PK half")
    found = NewestSegments(tmp_path).axes()
    assert (found.ranks, found.waits) == (1, {"x": 0.0})


def test_segments_are_read_again_only_after_a_change(tmp_path):
    segment(tmp_path, 0, 0, [("recv", 0, 10, 30)])
    newest = NewestSegments(tmp_path)
    assert newest.axes() is newest.axes()
    segment(tmp_path, 0, 1, [("recv", 0, 10, 40)], step=1)
    assert newest.axes().waits == {"x": pytest.approx(40 / 100)}
