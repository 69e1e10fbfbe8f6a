"""Critical paths of small examples, of random events, and of runs with a slow layer."""

from itertools import pairwise

import numpy as np
import pytest

from hpc3d.analyze.metrics.critical_path import critical_path, path_rows
from hpc3d.analyze.metrics.wait_states import calls_of
from tests.analyze.delayed_runs import trained
from tests.analyze.synthetic import COMPUTE, JITTER, SLOT, by_hand, call, jitter, large, row

GROUPS = [("x", (0, 1, 2)), ("p", (0, 1))]
AHEAD = {0: 0, 1: 900, 2: -40}  # ms that the ranks' clocks are ahead


def opened(path, rows, ends):
    """Return an open trace with steps from 0 to `ends` ms of rank 0's clock."""
    rows = [
        {
            **each,
            "t_start": each["t_start"] + AHEAD[each["rank"]] * 10**6,
            "posted": each["posted"] + AHEAD[each["rank"]] * 10**6,
        }
        for each in rows
    ]
    steps = {(rank, 0): (AHEAD[rank], AHEAD[rank] + end) for rank, end in enumerate(ends)}
    return by_hand(path / "trace.h5", rows, steps, GROUPS)


def path_of(trace, step=0):
    return critical_path(trace, calls_of(trace), step)


def assert_path(trace, wanted):
    """Compare the path with a list of (rank, start, end, category, axis, layer), in ms."""
    found = path_of(trace)
    times = np.array([(each.start, each.end) for each in found]) * 1e3
    np.testing.assert_allclose(times, [each[1:3] for each in wanted], atol=1e-9)
    what = [(each.rank, each.category, each.axis, each.layer) for each in found]
    assert what == [(rank, *rest) for rank, _, _, *rest in wanted]


def test_critical_path_through_a_collective_follows_the_last_arrival(tmp_path):
    rows = [
        row(0, 0, 3, layer=0),
        row(1, 1, 9, layer=1),
        row(2, 0, 5, layer=2),
        *(
            call(rank, "all_reduce", start, 12, 0, layer=3)
            for rank, start in ((0, 3), (1, 9), (2, 5))
        ),
        row(0, 12, 13, layer=4),
        row(1, 12, 14, layer=5),
        row(2, 13, 19, "optimizer", layer=6),
    ]
    wanted = [
        (1, 0, 1, "host", "", -1),
        (1, 1, 9, "compute", "", 1),
        (2, 9, 12, "comm", "x", 3),
        (2, 12, 13, "host", "", -1),
        (2, 13, 19, "optimizer", "", 6),
        (2, 19, 20, "host", "", -1),
    ]
    assert_path(opened(tmp_path, rows, (15, 14, 20)), wanted)


def test_critical_path_through_a_broadcast_follows_the_last_arrival(tmp_path):
    called = {"op": "broadcast", "group": 1}
    rows = [
        row(0, 0, 2, layer=0),
        row(0, 2, 7, "copy", layer=1, **called),
        row(0, 7, 10, layer=2),
        call(0, start=10, end=11, posted=2, seq=0, peer=1, layer=3, **called),
        row(1, 0, 6, layer=4),
        call(1, start=6, end=8, seq=0, peer=1, layer=5, **called),
    ]
    wanted = [
        (1, 0, 6, "compute", "", 4),
        (0, 6, 7, "copy", "p", 1),
        (0, 7, 10, "compute", "", 2),
        (0, 10, 11, "comm", "p", 3),
    ]
    assert_path(opened(tmp_path, rows, (11, 8)), wanted)


def message(number, sender, sent, receiver, received, **values):
    """Return the two calls of a message, each from its posting to its end."""
    ends = ("send", sender, sent, receiver), ("recv", receiver, received, sender)
    return [
        call(rank, op, *when, number, group=1, peer=peer, **values)
        for op, rank, when, peer in ends
    ]


PIPELINE = [
    row(0, 0, 4, layer=0),
    *message(0, 0, (4, 5), 1, (0, 6)),
    row(1, 6, 10, layer=1),
    *message(0, 1, (10, 11), 0, (5, 12)),
    row(0, 12, 15, layer=2, phase="backward"),
]


def test_critical_path_through_a_message_follows_its_sender(tmp_path):
    wanted = [
        (0, 0, 4, "compute", "", 0),
        (1, 4, 6, "comm", "p", -1),
        (1, 6, 10, "compute", "", 1),
        (0, 10, 12, "comm", "p", -1),
        (0, 12, 15, "compute", "", 2),
    ]
    trace = opened(tmp_path, PIPELINE, (15, 12))
    assert_path(trace, wanted)
    rows = path_rows(path_of(trace), ("category", "phase"))
    assert [(each["category"], each["phase"]) for each in rows] == [
        ("compute", "forward"),
        ("comm", "forward"),
        ("compute", "backward"),
    ]
    assert [each["seconds"] for each in rows] == pytest.approx([8e-3, 4e-3, 3e-3])
    assert [each["share"] for each in rows] == pytest.approx([8 / 15, 4 / 15, 3 / 15])


def test_late_receiver_is_on_the_critical_path_of_its_sender(tmp_path):
    rows = [row(0, 0, 2), row(1, 0, 8), *message(0, 0, (2, 10), 1, (8, 9)), row(0, 10, 11)]
    wanted = [
        (1, 0, 8, "compute", "", 0),
        (0, 8, 10, "comm", "p", 0),
        (0, 10, 11, "compute", "", 0),
    ]
    assert_path(opened(tmp_path, [{**each, "layer": 0} for each in rows], (11, 9)), wanted)


def test_message_that_arrived_during_compute_is_off_the_critical_path(tmp_path):
    """The receive is posted at 1, and the message arrives at 5, before the wait at 9."""
    receive = call(1, "recv", 9, 10, 0, group=1, peer=0, posted=1)
    send = call(0, "send", 4, 5, 0, group=1, peer=1)
    rows = [row(0, 0, 4, layer=0), send, row(1, 1, 9, layer=1), receive]
    wanted = [
        (1, 0, 1, "host", "", -1),
        (1, 1, 9, "compute", "", 1),
        (1, 9, 10, "comm", "p", -1),
    ]
    assert_path(opened(tmp_path, rows, (5, 10)), wanted)


def test_critical_path_continues_at_the_posting_of_a_call(tmp_path):
    """Rank 1 posts its part at 6, computes until 9 and then waits; rank 0 waits for the part."""
    rows = [
        row(0, 0, 2, layer=0),
        call(0, "all_gather", 2, 8, 0),
        row(0, 8, 12, layer=1),
        row(1, 0, 6, layer=2),
        row(1, 6, 9, layer=3),
        call(1, "all_gather", 9, 10, 0, posted=6),
    ]
    wanted = [
        (1, 0, 6, "compute", "", 2),
        (0, 6, 8, "comm", "x", -1),
        (0, 8, 12, "compute", "", 1),
    ]
    assert_path(opened(tmp_path, rows, (12, 10)), wanted)


def test_critical_path_resolves_nested_events(tmp_path):
    """The enclosing event comes first in the order of starts: row 0 is the parent."""
    rows = [
        row(0, 0, 10, "io"),
        row(0, 1, 4, layer=0, parent=0),
        row(0, 5, 9, layer=1, parent=0),
    ]
    wanted = [
        (0, 0, 1, "host", "", -1),
        (0, 1, 4, "compute", "", 0),
        (0, 4, 5, "host", "", -1),
        (0, 5, 9, "compute", "", 1),
        (0, 9, 10, "host", "", -1),
    ]
    assert_path(opened(tmp_path, rows, (10,)), wanted)


def assert_whole(path, seconds):
    """Assert that the pieces are contiguous and cover the step."""
    assert path[0].start == 0 and path[-1].end == pytest.approx(seconds, rel=1e-9)
    assert all(one.end == other.start for one, other in pairwise(path))
    assert sum(each.seconds for each in path) == pytest.approx(seconds, rel=1e-9)
    assert all(each.start < each.end for each in path)


@pytest.mark.parametrize("number", range(10))
def test_critical_path_terminates_if_clocks_disagree(tmp_path, number, chance):
    """Random rows, in which most calls end before the start of calls that they depend on."""
    random = np.random.default_rng(chance.getrandbits(64))
    rows = []
    for rank in range(3):
        edges = np.sort(random.choice(200, 40, replace=False)).tolist()
        for number, (start, end) in enumerate(zip(edges[::2], edges[1::2])):
            if number % 2:
                rows.append(row(rank, start, end, layer=number))
            else:
                rows.append(call(rank, "all_reduce", start, end, random.permutation(5)[0]))
    trace = opened(tmp_path, rows, (200, 190, 180))
    assert_whole(path_of(trace), 0.2)


def test_critical_path_of_a_missing_step_is_rejected(tmp_path):
    trace = opened(tmp_path, [*PIPELINE, row(0, 20, 30, step=1)], (15, 12))
    with pytest.raises(ValueError, match=r"no events of step 7; the trace has steps 0 to \d$"):
        path_of(trace, 7)
    with pytest.raises(
        ValueError, match=r"step 1 was not completed; the trace has steps 0 to \d$"
    ):
        path_of(trace, 1)


def test_critical_path_of_many_ranks_follows_the_last_arrivals(tmp_path):
    """The path has a computation and a transfer in each time slot."""
    side, slots = 6, 24
    trace = large(tmp_path / "large.h5", side, 2, slots)
    path = path_of(trace, 1)
    assert_whole(path, slots * SLOT * 1e-9)
    assert [each.category for each in path] == ["compute", "comm"] * slots
    worst = (COMPUTE + 10 * JITTER) * 1e-9
    for slot, (work, transfer) in enumerate(zip(path[::2], path[1::2])):
        assert work.end - slot * SLOT * 1e-9 == pytest.approx(
            (COMPUTE + jitter(work.rank, slot)) * 1e-9, rel=1e-9
        )
        assert transfer.start == work.end and work.seconds <= worst * (1 + 1e-9)
        assert transfer.axis == ("x" if slot % 8 == 7 or slot % 2 == 0 else "y")
        line = (work.rank % side, work.rank // side), (transfer.rank % side, transfer.rank // side)
        assert line[0][transfer.axis == "x"] == line[1][transfer.axis == "x"], "one group"


DELAY = 0.2  # seconds of virtual time; all else takes microseconds


def test_slow_layer_dominates_the_critical_path(tmp_path):
    def delay(recorder, name):
        slow = recorder.layer == 5 and recorder.phase == "backward" and recorder.step == 1
        return DELAY if slow and name == "gelu" else 0

    sizes = {"mesh__p": 2, "mesh__x": 2, "parallel__microbatches": 3, "parallel__schedule": "1f1b"}
    trace = trained(tmp_path / "run", 4, delay, **sizes)
    path = path_of(trace, 1)
    rows = path_rows(path, ("layer", "phase", "name"))
    first = next(each for each in rows if each["layer"] >= 0)
    assert (first["layer"], first["phase"], first["name"]) == (5, "backward", "gelu")
    assert first["seconds"] == pytest.approx(3 * DELAY, rel=0.01), "one pause per microbatch"
    whole = sum(each.seconds for each in path)
    assert [each["share"] for each in rows] == pytest.approx(
        [each["seconds"] / whole for each in rows]
    )
    assert sum(each["share"] for each in rows) == pytest.approx(1)
    assert {each.rank for each in path if each.layer == 5} <= {2, 3}
    steps = trace.steps
    chosen = steps["step"] == 1
    whole = steps["t_end"][chosen].max() - steps["t_start"][chosen].min()
    assert_whole(path, whole * 1e-9)


def test_slow_rank_is_on_the_critical_path(tmp_path):
    def delay(recorder, name):
        slow = recorder.layer == 2 and recorder.phase == "forward" and recorder.step == 1
        return DELAY if slow and recorder.rank == 3 and name == "gelu" else 0

    sizes = {"mesh__x": 4, "model__heads": 4, "model__layers": 4, "parallel__scheme": "1d"}
    trace = trained(tmp_path / "run", 4, delay, **sizes)
    rows = path_rows(path_of(trace, 1), ("rank", "layer", "name"))
    first = next(each for each in rows if each["layer"] >= 0)
    assert (first["rank"], first["layer"], first["name"]) == (3, 2, "gelu")
    assert first["seconds"] == pytest.approx(DELAY, rel=0.01)
