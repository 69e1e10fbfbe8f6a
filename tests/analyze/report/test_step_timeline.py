"""Boxes of a step timeline."""

import numpy as np
import pytest

from hpc3d.analyze.metrics.critical_path import critical_path
from hpc3d.analyze.metrics.wait_states import calls_of
from hpc3d.analyze.report.step_timeline import KINDS, boxes, timeline
from tests.analyze.small import small
from tests.analyze.synthetic import by_hand, call, row


def drawn(trace, limit=1000):
    calls = calls_of(trace)
    return timeline(trace, calls, 0, critical_path(trace, calls, 0), limit)


def test_call_is_split_into_wait_and_transfer(tmp_path):
    with small(tmp_path / "trace.h5") as trace:
        chart = drawn(trace)
    found = {
        kind: sorted(zip(*(np.round(part, 6).tolist() for part in parts)))
        for kind, parts in boxes(chart).items()
    }
    assert found == {
        "forward": [(0, 4, 0), (0, 5, 1)],
        "wait": [(4, 5, 0), (6, 8, 0)],
        "transfer": [(5, 6, 0), (5, 6, 1), (8, 9, 0), (8, 9, 1)],
        "optimizer": [(6, 8, 1)],
    }


def test_timeline_events_carry_peer_call_axis_and_bytes(tmp_path):
    with small(tmp_path / "trace.h5") as trace:
        chart = drawn(trace)
    events = {key: values.tolist() for key, values in chart.events.items()}
    assert events["by"] == [-1, 1, 1, -1, -1, -1, -1]
    one, other = events["meeting"][1], events["meeting"][2]
    assert events["meeting"] == [-1, one, other, -1, one, -1, other] and one != other
    assert [chart.names["op"][op] for op in events["op"]][1:3] == ["all_gather", "recv"]
    assert [chart.names["axis"][axis] for axis in events["axis"]][:2] == ["", "x"]
    assert events["bytes"] == [0, 1000, 400, 0, 1000, 0, 400]
    assert (chart.shown, chart.ranks, chart.axes) == ([0, 1], 2, [("x", 2)])


@pytest.mark.parametrize(
    ("category", "phase", "kind"),
    [
        ("compute", "backward", "backward"),
        ("compute", "backward_weight", "backward_weight"),
        ("compute", "optimizer", "optimizer"),
        ("compute", "other", "other"),
        ("copy", "forward", "copy"),
        ("io", "forward", "host"),
        ("wait", "backward", "wait"),
    ],
)
def test_box_kind_by_category_and_phase(tmp_path, category, phase, kind):
    rows = [row(0, 0, 1, category, phase=phase)]
    with by_hand(tmp_path / "trace.h5", rows, {(0, 0): (0, 2)}) as trace:
        assert [*KINDS][drawn(trace).events["kind"][0]] == kind


def test_times_start_at_the_first_step_begin_on_the_common_clock(tmp_path):
    """Rank 1's clock is 3.5 ms behind, and rank 1 begins the step 3 ms after rank 0."""
    rows = [row(0, 2, 4), row(1, 5, 6, ahead=-3.5)]
    steps = {(0, 0): (1, 9), (1, 0): (0.5, 5.5)}
    with by_hand(tmp_path / "trace.h5", rows, steps) as trace:
        np.testing.assert_allclose(drawn(trace).events["start"], [1, 4])


MANY = 32


def crowd(path):
    """Ranks with 10 events each; ranks 20 to 23 are stage 1. At the end, all wait for rank 13."""
    rows = [
        row(rank, at, at + 0.5, stage=int(20 <= rank < 24))
        for rank in range(MANY)
        for at in range(9)
    ]
    arrivals = [95 if rank == 13 else 50 for rank in range(MANY)]
    rows += [
        call(rank, "all_reduce", at, 96, seq=0, posted=at, stage=int(20 <= rank < 24))
        for rank, at in enumerate(arrivals)
    ]
    steps = {(rank, 0): (0, 100) for rank in range(MANY)}
    return by_hand(path, rows, steps, [("x", tuple(range(MANY)))])


def test_timeline_shows_representative_ranks_if_events_exceed_the_limit(tmp_path):
    with crowd(tmp_path / "trace.h5") as trace:
        assert drawn(trace, limit=320).shown == list(range(MANY))
        assert len(drawn(trace, limit=319).shown) == 31
        shown = drawn(trace, limit=59)
        assert {0, 13, 20} <= set(shown.shown) and len(shown.shown) == 5
        assert set(shown.events["rank"].tolist()) == set(shown.shown)
        assert drawn(trace, limit=30).shown == [0, 13, 20]
        assert drawn(trace, limit=29).shown == [0, 13]
        assert drawn(trace, limit=1).shown == [0]


def test_first_rank_is_representative_without_calls(tmp_path):
    rows = [row(rank, 0, 1) for rank in range(4)]
    with by_hand(tmp_path / "trace.h5", rows, {(r, 0): (0, 1) for r in range(4)}) as trace:
        assert drawn(trace, limit=1).shown == [0]
