"""Parts of the step time, compared with sums over individual events."""

from collections import Counter

import pytest

from hpc3d.analyze.metrics.breakdown import (
    breakdown,
    copy_rows,
    imbalance_rows,
    memory_rows,
    rank_rows,
)
from hpc3d.analyze.metrics.wait_states import calls_of
from hpc3d.trace import schema
from tests.analyze.delayed_runs import trained
from tests.analyze.synthetic import by_hand, call, large, row

GROUPS = [("x", (0, 1)), ("y", (0, 1))]


@pytest.fixture
def hand(tmp_path):
    """Two ranks; the clock of rank 1 is 50 ms ahead. Steps take 20 and 24 ms, then 10 ms.

    Rank 0 waits 3 of 5 ms for an all-reduce along x. At 12 ms it posts an all-gather along y,
    and it waits for this call from 18 ms on; in between, it computes from 13 to 17 ms.
    """
    late = {"ahead": 50}
    rows = [
        row(0, 0, 4, layer=0),
        call(0, "all_reduce", 4, 9, 0, layer=0),
        row(0, 10, 12, phase="backward", layer=1),
        row(0, 12, 12.5, "copy", op="all_gather", group=1, phase="backward", layer=1),
        row(0, 13, 17, "optimizer", phase="optimizer", stage=1),
        call(0, "all_gather", 18, 20, 0, group=1, posted=12, phase="backward", layer=1),
        row(1, 0, 7, layer=0, **late),
        call(1, "all_reduce", 7, 9, 0, layer=0, **late),
        row(1, 9, 11, "io", phase="other", **late),
        row(1, 11, 14, phase="backward", layer=1, **late),
        call(1, "all_gather", 14, 20, 0, group=1, phase="backward", layer=1, **late),
        row(1, 20, 22, "wait", phase="other", **late),
        row(0, 30, 35, layer=0, step=1),
        row(1, 30, 39, layer=0, step=1, **late),
        row(0, 50, 90, layer=0, step=2),
        row(0, 12.6, 12.9, layer=0, step=-1),
        call(0, "all_reduce", 20, 28, 1, step=-1),
        call(1, "all_reduce", 25, 28, 1, step=-1, **late),
    ]
    steps = {(0, 0): (0, 20), (1, 0): (50, 74), (0, 1): (30, 40), (1, 1): (80, 90)}
    memory = [
        {"rank": rank, "step": step, "kind": schema.MEMORY_KIND.index(kind), "peak": peak}
        for rank, step, kind, peak in (
            (0, 0, "parameter", 100),
            (0, 1, "parameter", 100),
            (0, 0, "activation", 30),
            (0, 1, "activation", 50),
            (1, 0, "parameter", 120),
            (1, 0, "activation", 70),
            (1, 1, "activation", 60),
        )
    ]
    return by_hand(tmp_path / "trace.h5", rows, steps, GROUPS, memory=memory)


def table(rows, *keys):
    """Return a dict from keys to ms."""
    return {tuple(each[key] for key in keys): each["seconds"] * 1e3 for each in rows}


def close(wanted):
    return {key: pytest.approx(value, abs=1e-9) for key, value in wanted.items()}


def test_breakdown_by_category(hand):
    rows = breakdown(hand, ["category"])
    wanted = {
        ("compute",): (6 + 10 + 5 + 9) / 4,
        ("comm",): (7 + 8) / 4,
        ("copy",): 0.5 / 4,
        ("optimizer",): 4 / 4,
        ("io",): 2 / 4,
        ("wait",): 2 / 4,
        ("unrecorded",): (2.5 + 2 + 5 + 1) / 4,
    }
    assert table(rows, "category") == close(wanted)
    assert sum(each["seconds"] for each in rows) == pytest.approx(16e-3)
    assert sum(each["share"] for each in rows) == pytest.approx(1)


def test_breakdown_by_axis_and_layer(hand):
    rows = breakdown(hand, ["axis", "layer"])
    wanted = {
        ("recorded", "", -1): (4 + 2 + 2) / 4,
        ("recorded", "", 0): (4 + 7 + 5 + 9) / 4,
        ("recorded", "", 1): (2 + 3) / 4,
        ("recorded", "x", 0): (5 + 2) / 4,
        ("recorded", "y", 1): (2 + 6 + 0.5) / 4,
        ("unrecorded", "", ""): 10.5 / 4,
    }
    assert table(rows, "category", "axis", "layer") == close(wanted)


def test_breakdown_rows_of_a_rank_add_up_to_its_step(hand):
    rows = breakdown(hand, ["rank", "phase"])
    wanted = {
        (0, "recorded", "forward"): (4 + 5 + 5) / 2,
        (0, "recorded", "backward"): (2 + 0.5 + 2) / 2,
        (0, "recorded", "optimizer"): 4 / 2,
        (0, "unrecorded", ""): (2.5 + 5) / 2,
        (1, "recorded", "forward"): (7 + 2 + 9) / 2,
        (1, "recorded", "backward"): (3 + 6) / 2,
        (1, "recorded", "other"): (2 + 2) / 2,
        (1, "unrecorded", ""): (2 + 1) / 2,
    }
    assert table(rows, "rank", "category", "phase") == close(wanted)
    for each in rows:
        step = (15e-3, 17e-3)[each["rank"]]
        assert each["seconds"] == pytest.approx(each["share"] * step)


def test_rounding_errors_of_time_differences_are_zero(tmp_path):
    """All copies start broadcasts; 3 steps with 300,007 ns have no exact mean in seconds."""
    rows, steps = [], {}
    for step, end in enumerate((0.100001, 0.100003, 0.100003)):
        for rank in (0, 1):
            steps[rank, step] = (step, step + 0.5)
            own = {"op": "broadcast", "group": 0, "step": step}
            rows.append(row(rank, step, step + end, "copy", **own))
            rows.append(row(rank, step + end, step + 0.4, step=step))
            times = {"start": step + 0.4, "end": step + 0.5, "posted": step}
            rows.append(call(rank, seq=step, peer=0, **times, **own))
    trace = by_hand(tmp_path / "trace.h5", rows, steps, GROUPS)
    for each in rank_rows(trace, calls_of(trace)):
        assert (each["copy_s"], each["unrecorded_s"]) == (0, 0)
        assert each["exposed_s"] == pytest.approx(0.600007e-3 / 3)


def test_breakdown_by_step_and_stage(hand):
    """Rank 0 belongs to stage 1, the highest stage of its events."""
    rows = breakdown(hand, ["stage", "step"])
    wanted = {
        (1, 0, "recorded"): 17.5,
        (0, 0, "recorded"): 22,
        (1, 1, "recorded"): 5,
        (0, 1, "recorded"): 9,
        (1, 0, "unrecorded"): 2.5,
        (0, 0, "unrecorded"): 2,
        (1, 1, "unrecorded"): 5,
        (0, 1, "unrecorded"): 1,
    }
    assert table(rows, "stage", "step", "category") == close(wanted)


def test_breakdown_excludes_the_time_of_nested_events(tmp_path):
    rows = [row(0, 0, 10, "host"), row(0, 1, 4, parent=0), row(0, 5, 9, "io", parent=0)]
    trace = by_hand(tmp_path / "trace.h5", rows, {(0, 0): (0, 12)})
    wanted = {("host",): 3, ("compute",): 3, ("io",): 4, ("unrecorded",): 2}
    assert table(breakdown(trace, ["category"]), "category") == close(wanted)


def test_breakdown_without_a_completed_step_is_rejected(tmp_path):
    trace = by_hand(tmp_path / "trace.h5", [row(0, 0, 1)], {}, hosts=["node0"])
    with pytest.raises(ValueError, match="no step was completed"):
        breakdown(trace, ["category"])


def test_rank_rows_split_the_step_into_compute_wait_transfer_and_copy(hand):
    first, second = rank_rows(hand, calls_of(hand))
    wanted = {
        "rank": 0,
        "host": "node0",
        "stage": 1,
        "step_s": 15e-3,
        "compute_s": 7.5e-3,
        "wait_s": 1.5e-3,
        "transfer_s": 2e-3,
        "copy_s": 0.25e-3,
        "other_s": 0,
        "unrecorded_s": 3.75e-3,
        "exposed_s": 3.5e-3,
        "outstanding_s": 2e-3,
    }
    assert first == close(wanted)
    wanted = {
        "rank": 1,
        "host": "node1",
        "stage": 0,
        "step_s": 17e-3,
        "compute_s": 9.5e-3,
        "wait_s": 1e-3,
        "transfer_s": 4e-3,
        "copy_s": 0,
        "other_s": 1e-3,
        "unrecorded_s": 1.5e-3,
        "exposed_s": 5e-3,
        "outstanding_s": 0,
    }
    assert second == close(wanted)


def test_rank_without_a_completed_step_has_no_row(tmp_path):
    rows = [call(0, "all_reduce", 0, 8, 0), call(1, "all_reduce", 6, 8, 0), row(1, 0, 6)]
    trace = by_hand(tmp_path / "t.h5", rows, {(0, 0): (0, 9)}, GROUPS, hosts=["a", "b"])
    (only,) = rank_rows(trace, calls_of(trace))
    assert (only["rank"], only["host"], only["wait_s"]) == (0, "a", pytest.approx(6e-3))


def test_concurrent_outstanding_calls_count_overlap_once(tmp_path):
    """The calls are in flight from 1 to 7 and from 3 to 9. The rank computes from 0 to 4 and from
    5 to 6, so the overlap is 1 to 4 and 5 to 6."""
    rows = [
        row(0, 0, 4),
        row(0, 5, 6),
        call(0, "all_gather", 7, 8, 0, posted=1),
        call(0, "all_gather", 9, 10, 1, posted=3),
    ]
    trace = by_hand(tmp_path / "trace.h5", rows, {(0, 0): (0, 10)}, GROUPS)
    (only,) = rank_rows(trace, calls_of(trace))
    assert only["outstanding_s"] == pytest.approx(4e-3)


def test_imbalance_is_the_maximum_over_the_mean(hand):
    rows = {each["phase"]: each for each in imbalance_rows(hand)}
    work = {"all": (7.5, 9.5), "forward": (4.5, 8), "backward": (1, 1.5), "optimizer": (2, 0)}
    assert rows.keys() == work.keys()
    for phase, (zero, one) in work.items():
        found = rows[phase]
        assert found["rank"] == (0 if zero > one else 1)
        assert found["max_s"] == pytest.approx(max(zero, one) * 1e-3)
        assert found["mean_s"] == pytest.approx((zero + one) / 2 * 1e-3)
        assert found["imbalance"] == pytest.approx(2 * max(zero, one) / (zero + one))


def test_memory_by_kind_and_rank(hand):
    assert memory_rows(hand) == [
        {"rank": 0, "parameter": 100, "activation": 50},
        {"rank": 1, "parameter": 120, "activation": 70},
        {"rank": None, "parameter": 220, "activation": 120},
    ]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    sizes = {"mesh__p": 2, "mesh__x": 2, "parallel__microbatches": 2}
    return trained(tmp_path_factory.mktemp("run") / "small", 4, **sizes)


def test_breakdown_of_a_run_equals_a_sum_over_single_events(run):
    """Sum over single events in plain Python."""
    keys = ("category", "phase", "op", "axis", "layer", "rank")
    events, steps = run.events, run.steps
    names = {key: events.labels(key) for key in ("category", "phase", "op")}
    columns = [
        events[key].tolist() for key in ("category", "phase", "op", "group", "layer", "rank")
    ]
    wanted = Counter()
    for what, step, duration in zip(zip(*columns), events["step"], events["dur"].tolist()):
        category, phase, op, group, layer, rank = what
        if step >= 0:
            axis = run.groups[group].axis if group >= 0 else ""
            codes = names["category"][category], names["phase"][phase], names["op"][op]
            wanted[(*codes, axis, layer, rank)] += duration * 1e-6 / 3
    found = table(breakdown(run, keys), *keys)
    rest = {key: value for key, value in found.items() if key[0] == "unrecorded"}
    assert {key: found[key] for key in found if key not in rest} == close(wanted)
    seconds = (steps["t_end"] - steps["t_start"]) * 1e-6
    for rank in range(4):
        own = sum(value for key, value in found.items() if key[-1] == rank)
        assert own == pytest.approx(seconds[steps["rank"] == rank].mean(), rel=1e-9)
        assert 0 <= rest["unrecorded", "", "", "", "", rank] < 0.9 * own


def test_components_of_each_rank_add_up_to_its_step_time(run):
    steps = run.steps
    seconds = (steps["t_end"] - steps["t_start"]) * 1e-9
    rows = rank_rows(run, calls_of(run))
    assert [each["stage"] for each in rows] == [0, 0, 1, 1]
    parts = ("compute_s", "wait_s", "transfer_s", "copy_s", "other_s", "unrecorded_s")
    for each in rows:
        own = seconds[steps["rank"] == each["rank"]].mean()
        assert sum(each[part] for part in parts) == pytest.approx(own, rel=1e-9)
        assert each["step_s"] == pytest.approx(own, rel=1e-9)
        assert min(each[part] for part in parts) >= 0
        assert each["wait_s"] + each["transfer_s"] == pytest.approx(each["exposed_s"])


def test_breakdown_of_many_ranks_matches_the_formula(tmp_path):
    trace = large(tmp_path / "large.h5", 6, 3, 20)
    rows = table(breakdown(trace, ["category"]), "category")
    assert rows["unrecorded",] == pytest.approx(0, abs=1e-9)
    assert rows["compute",] + rows["comm",] == pytest.approx(20 * 0.1)
    first, *_ = rank_rows(trace, calls_of(trace))
    assert first["compute_s"] == pytest.approx(sum(60e-6 + i * 13 % 11 * 1e-6 for i in range(20)))


def test_copies_are_exposed_while_the_rank_waits(tmp_path):
    """Rank 0 itself copies for 2 ms; rank 1's device copies for 4 ms, of which it waits 1 ms."""
    copy = {"op": "none", "group": -1, "name": 0}
    rows = [
        row(0, 0, 2, "copy", bytes=1000, **copy),
        row(1, 0, 4, "copy", bytes=3000, stream=4, **copy),
        row(1, 4, 5, "wait", stream=1, **copy),
        call(1, "all_gather", 5, 9, 0),
    ]
    steps = {(0, 0): (0, 10), (1, 0): (0, 10)}
    with by_hand(tmp_path / "trace.h5", rows, steps, GROUPS) as trace:
        (found,) = copy_rows(trace)
    assert found == {
        **{"name": "event", "phase": "forward", "copies": 1, "bytes": 2000},
        **{"seconds": pytest.approx(3e-3), "exposed_s": pytest.approx(1.5e-3)},
        "byte_per_s": pytest.approx(2000 / 3e-3),
    }


def test_trace_without_copies_has_no_copy_table(hand):
    assert copy_rows(hand) == []
