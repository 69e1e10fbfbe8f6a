"""Bytes between ranks and call rates, compared with the definitions of nccl-tests."""

import numpy as np
import pytest

from hpc3d.analyze.metrics.collectives import bandwidth_rows, communication_matrix
from hpc3d.analyze.metrics.stragglers import straggler_rows
from hpc3d.analyze.metrics.wait_states import calls_of, incomplete, wait_rows
from tests.analyze.delayed_runs import trained
from tests.analyze.synthetic import by_hand, call, large, row

GROUPS = [("x", (0, 1, 2, 3)), ("y", (1, 3)), ("p", (0, 1))]
RANKS = range(4)


def opened(path, rows, steps=1):
    """Return an open trace with steps of 1 s on four ranks."""
    table = {
        (rank, step): (1000 * step, 1000 * step + 1000) for rank in RANKS for step in range(steps)
    }
    return by_hand(path / "trace.h5", rows, table, GROUPS)


def meeting(op, seq, last, end, counts, received, **values):
    """All ranks call at 1 ms, except rank 2 at `last`; all end at `end`, rank 1 one ms earlier."""
    begin = [1, 1, last, 1]
    return [
        call(
            rank, op, begin[rank], end - (rank == 1), seq,
            count=counts[rank], bytes=received[rank], **values,
        )
        for rank in RANKS
    ]  # fmt: skip


# op: elements that go in, bytes received, S in bytes, busbw / algbw; of four ranks, float32
DEFINITIONS = {
    "all_gather": ([250] * 4, [3000] * 4, 4000, 3 / 4),
    "reduce_scatter": ([1000] * 4, [3000] * 4, 4000, 3 / 4),
    "all_reduce": ([1000] * 4, [6000] * 4, 4000, 2 * 3 / 4),
    "all_to_all": ([1000] * 4, [3000] * 4, 4000, 3 / 4),
    "broadcast": ([0, 0, 1000, 0], [4000, 4000, 0, 4000], 4000, 1),
    "reduce": ([1000] * 4, [4000, 4000, 4000, 0], 4000, 1),
}


@pytest.mark.parametrize("op", DEFINITIONS)
def test_algbw_and_busbw_follow_the_nccl_tests_definitions(tmp_path, op):
    """The call takes 8 ms, from the last arrival at 3 ms to the last end at 11 ms."""
    counts, received, size, factor = DEFINITIONS[op]
    peer = {"peer": 2} if op in ("broadcast", "reduce") else {}
    rows = meeting(op, 0, 3, 11, counts, received, **peer)
    (found,) = bandwidth_rows(calls_of(opened(tmp_path, rows)))
    assert (found["axis"], found["op"], found["members"], found["size"]) == ("x", op, 4, size)
    assert (found["count"], found["later"]) == (1, 0)
    assert found["seconds"] == pytest.approx(8e-3)
    assert found["algbw"] == pytest.approx(4000 / 8e-3)
    assert found["busbw"] == pytest.approx(factor * 4000 / 8e-3)
    assert found["busbw"] == pytest.approx(max(received) / 8e-3), "what a link carries"


def test_bandwidth_rows_use_the_median_time_by_axis_members_and_size(tmp_path):
    counts, received = [1000] * 4, [6000] * 4
    rows = [
        *meeting("all_reduce", 0, 3, 11, counts, received),
        *meeting("all_reduce", 1, 3, 5, counts, received),
        *meeting("all_reduce", 2, 3, 7, counts, received),
        *meeting("all_reduce", 3, 3, 4, [10] * 4, [60] * 4),
        *meeting("all_reduce", 4, 2, 8, [10] * 4, [60] * 4),
        *meeting("all_reduce", 5, 3, 43, [500] * 4, [6000] * 4, dtype="float64"),
        call(1, "all_reduce", 4, 9, 0, group=1, count=1000, bytes=4000),
        call(3, "all_reduce", 6, 8, 0, group=1, count=1000, bytes=4000, posted=5),
    ]
    found = bandwidth_rows(calls_of(opened(tmp_path, rows)))
    times = [(each["axis"], each["members"], each["size"], each["count"]) for each in found]
    assert times == [("x", 4, 40, 2), ("x", 4, 4000, 4), ("y", 2, 4000, 1)]
    assert [each["seconds"] for each in found] == pytest.approx([3.5e-3, 6e-3, 4e-3])
    assert [each["later"] for each in found] == [0, 0, 0.5]


def test_incomplete_calls_and_calls_outside_steps_have_no_bandwidth(tmp_path):
    counts, received = [1000] * 4, [6000] * 4
    rows = [
        *meeting("all_reduce", 0, 3, 11, counts, received)[1:],
        *meeting("all_reduce", 1, 3, 11, counts, received, step=1),
    ]
    assert bandwidth_rows(calls_of(opened(tmp_path, rows))) == []


@pytest.mark.parametrize(
    ("op", "last", "end", "count", "seconds"),
    [
        ("barrier", 3, 3, 0, 0),
        ("barrier", 3, 11, 0, 8e-3),  # time and no bytes
        ("all_reduce", 3, 3, 1000, 0),  # bytes and no time
        ("all_reduce", 3, 3.001, 1000, 1e-6),
    ],
)
def test_calls_without_bytes_or_duration_have_no_bandwidth(
    tmp_path, op, last, end, count, seconds
):
    rows = meeting(op, 0, last, end, [count] * 4, [6 * count] * 4)
    (found,) = bandwidth_rows(calls_of(opened(tmp_path, rows)))
    assert found["seconds"] == pytest.approx(seconds)
    known = bool(count and seconds)
    assert (found["algbw"] is not None, found["busbw"] is not None) == (known, known)


def test_single_rank_has_no_bandwidth_wait_or_traffic(tmp_path):
    calls = calls_of(by_hand(tmp_path / "t.h5", [row(0, 0, 5)], {(0, 0): (0, 9)}))
    assert bandwidth_rows(calls) == wait_rows(calls) == []
    assert communication_matrix(calls).tolist() == [[0]] and incomplete(calls) == 0
    assert [each["meetings"] for each in straggler_rows(calls)] == [0]


def test_message_bytes_count_once_for_the_receiver(tmp_path):
    rows = [
        call(0, "send", 50, 51, 0, group=2, peer=1, count=250, bytes=1000, posted=1),
        call(1, "recv", 0, 6, 0, group=2, peer=0, count=0, bytes=1000),
    ]
    calls = calls_of(opened(tmp_path, rows, steps=2))
    wanted = np.zeros((4, 4))
    wanted[0, 1] = 500
    assert communication_matrix(calls).tolist() == wanted.tolist()
    assert communication_matrix(calls, "p").tolist() == wanted.tolist()
    assert not communication_matrix(calls, "x").any()
    (found,) = bandwidth_rows(calls)
    assert (found["op"], found["members"], found["size"]) == ("send", 2, 1000)
    assert found["busbw"] == found["algbw"] == pytest.approx(1000 / 5e-3)
    assert found["later"] == 0, "when the sender looks after its message says nothing"


def test_rooted_collectives_send_from_or_to_the_root(tmp_path):
    """Rank 2 broadcasts 1000 bytes to three others; three ranks reduce 800 bytes to rank 1.

    The chain of the reduction begins after its root, at rank 2, which receives nothing.
    """
    rows = [
        *meeting("broadcast", 0, 3, 11, [0, 0, 250, 0], [1000, 1000, 0, 1000], peer=2),
        *meeting("reduce", 1, 3, 30, [200] * 4, [800, 800, 0, 800], peer=1),
    ]
    wanted = np.zeros((4, 4))
    wanted[2, [0, 1, 3]] += 1000
    wanted[[0, 2, 3], 1] += 800
    calls = calls_of(opened(tmp_path, rows))
    assert communication_matrix(calls).tolist() == wanted.tolist()


def test_collective_bytes_are_spread_evenly_over_the_members(tmp_path):
    rows = [
        *meeting("all_gather", 0, 3, 11, [250] * 4, [3000] * 4),
        call(1, "reduce_scatter", 20, 21, 0, group=1, count=500, bytes=1000),
        call(3, "reduce_scatter", 20, 21, 0, group=1, count=500, bytes=1000),
        call(3, "reduce_scatter", 20, 21, 1, group=1, count=500, bytes=99999, step=-1),
    ]
    calls = calls_of(opened(tmp_path, rows))
    along_x = 1000 * (1 - np.eye(4))
    along_y = np.zeros((4, 4))
    along_y[1, 3] = along_y[3, 1] = 1000
    assert communication_matrix(calls, "x").tolist() == along_x.tolist()
    assert communication_matrix(calls, "y").tolist() == along_y.tolist()
    assert communication_matrix(calls).tolist() == (along_x + along_y).tolist()


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    sizes = {"mesh__p": 2, "mesh__d": 2, "mesh__x": 2, "parallel__microbatches": 2}
    return trained(tmp_path_factory.mktemp("run") / "small", 8, **sizes)


@pytest.mark.slow
def test_communication_matrix_has_every_byte_a_run_received(run):
    calls, events = calls_of(run), run.events
    sends = events["op"] == next(c for c, n in events.labels("op").items() if n == "send")
    received = np.bincount(events["rank"], np.where(sends, 0, events["bytes"]), 8) / 3
    np.testing.assert_allclose(communication_matrix(calls).sum(0), received, rtol=1e-12)
    axes = {group.axis for group in run.groups}
    parts = [communication_matrix(calls, axis) for axis in axes]
    np.testing.assert_allclose(sum(parts), communication_matrix(calls), rtol=1e-12)
    assert axes == {"p", "d", "x", "world"}
    stages = communication_matrix(calls, "p")
    assert stages[:4, 4:].any() and not stages[:4, :4].any()
    along = np.isin(events["group"], [i for i, each in enumerate(run.groups) if each.axis == "p"])
    sent = np.bincount(events["rank"], np.where(sends & along, events["bytes"], 0), 8) / 3
    np.testing.assert_allclose(stages.sum(1), sent, rtol=1e-12)


def test_busbw_times_seconds_equals_the_received_bytes_of_a_run(run):
    """busbw times seconds equals the received bytes, up to the rounding of bytes."""
    calls = calls_of(run)
    rows = bandwidth_rows(calls)
    assert sum(each["count"] for each in rows) == len(calls.first)
    known = run.events["bytes"][calls.row]
    for each in rows:
        if each["axis"] == "d":
            assert round(each["busbw"] * each["seconds"]) in known


@pytest.mark.parametrize("name", ["1f1b", "zb-v"])
def test_every_pipeline_message_has_a_send_and_a_receive(tmp_path, name):
    values = {"mesh__p": 2, "mesh__d": 2, "parallel__microbatches": 4}
    values["parallel__chunks"] = 2 if name == "zb-v" else 1
    trace = trained(tmp_path / "run", 4, parallel__schedule=name, **values)
    calls = calls_of(trace)
    assert incomplete(calls) == 0 and calls.violation.max() == 0
    rows = wait_rows(calls)
    assert {("p", "send"), ("p", "recv"), ("d", "all_reduce")} < {
        (each["axis"], each["op"]) for each in rows
    }
    blocked = trace.events["dur"][calls.row].sum() * 1e-9 / len(trace.steps)
    assert sum(each["blocked_s"] for each in rows) == pytest.approx(blocked, rel=1e-12)


def test_traffic_of_many_ranks_matches_the_formula(tmp_path):
    side, slots = 6, 24
    calls = calls_of(large(tmp_path / "large.h5", side, 2, slots))
    rows = {(each["axis"], each["op"]): each for each in bandwidth_rows(calls)}
    assert {what: each["count"] for what, each in rows.items()} == {
        ("x", "all_reduce"): 2 * 12 * side,
        ("y", "all_reduce"): 2 * 9 * side,
        ("x", "send"): 2 * 3 * side * side // 2,
    }
    assert rows["x", "all_reduce"]["members"] == side and rows["x", "send"]["members"] == 2
    matrix = communication_matrix(calls)
    assert matrix[0, 1] == pytest.approx(12 * 1000 / (side - 1) + 3 * 1000)
    assert matrix[1, 0] == pytest.approx(12 * 1000 / (side - 1))
    assert matrix[0, side] == pytest.approx(9 * 1000 / (side - 1))
    assert matrix[0, side + 1] == 0
