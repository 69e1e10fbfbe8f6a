"""Reports of device streams, for two ranks with known times."""

import numpy as np
import pytest

from hpc3d.analyze.metrics.breakdown import rank_rows
from hpc3d.analyze.metrics.columns import own_time
from hpc3d.analyze.metrics.critical_path import critical_path
from hpc3d.analyze.metrics.pipeline_step import StepPasses
from hpc3d.analyze.metrics.step import between_rows, time_rows
from hpc3d.analyze.metrics.wait_states import calls_of
from hpc3d.trace.checks_per_rank import inside
from tests.analyze.synthetic import by_hand, call, row

COMPUTES, SENDS = {"stream": 1, "microbatch": 0}, {"stream": 2, "microbatch": 0}


def rows_of(rank):
    """Return rows with a broadcast that starts at its call and overlaps computation, and an
    all-gather that continues after the end of the step."""
    return [
        row(rank, 0, 2, **COMPUTES),
        row(rank, 2, 5, "copy", op="broadcast", group=0, **SENDS),
        row(rank, 5, 18, "copy", op="all_gather", group=0, **SENDS),
        row(rank, 2, 8, **COMPUTES),
        row(rank, 1, 7, "io", op="none"),
        call(rank, "broadcast", 8, 9, 0, peer=0, posted=2, **COMPUTES),
        row(rank, 9.5, 10, "io", op="none"),
        row(rank, 19, 20, "copy", op="broadcast", group=0, stream=2) | {"step": -1},
    ]


@pytest.fixture
def trace(tmp_path):
    steps = {(rank, 0): (0, 12) for rank in range(2)}
    rows = [each for rank in range(2) for each in rows_of(rank)]
    with by_hand(tmp_path / "trace.h5", rows, steps, [("x", (0, 1))], ["node", "node"]) as trace:
        yield trace


def test_overlapped_call_is_not_part_of_the_step_time(trace):
    for each in rank_rows(trace, calls_of(trace)):
        found = {key: round(each[key] * 1e3, 6) for key in ("compute_s", "exposed_s", "copy_s")}
        assert found == {"compute_s": 8, "exposed_s": 1, "copy_s": 0}
        assert (each["other_s"], each["unrecorded_s"]) == pytest.approx((0.5e-3, 2.5e-3))
        assert each["outstanding_s"] == pytest.approx(6e-3)
    assert sum(each["share"] for each in time_rows(trace)) == pytest.approx(1)
    assert between_rows(trace) == []


def test_host_time_excludes_time_covered_by_its_device(trace):
    host = trace.events["stream"] == 0
    np.testing.assert_allclose(own_time(trace)[host] * 1e-6, [0, 0.5] * 2)


def test_call_in_flight_is_separate_from_the_waiting_call(trace):
    calls = calls_of(trace)
    assert calls.ending.tolist() == [True, True]
    assert calls.blocked.tolist() == [1_000_000] * 2


def test_critical_path_follows_the_compute_stream(trace):
    path = critical_path(trace, calls_of(trace), 0)
    found = [(each.category, *np.round([each.start, each.end], 9) * 1e3) for each in path]
    assert found == [
        ("compute", 0, 2),
        ("compute", 2, 8),
        ("comm", 8, 9),
        ("host", 9, 9.5),
        ("io", 9.5, 10),
        ("host", 10, 12),
    ]


def test_pass_ends_with_its_computation(trace):
    (only,) = StepPasses(trace).measured(0)[0]
    assert only[:2] == pytest.approx((0, 9e-3))


def test_overlapped_call_may_outlast_its_step(trace):
    assert [what for _, what, rows in inside(trace) if len(rows)] == []
