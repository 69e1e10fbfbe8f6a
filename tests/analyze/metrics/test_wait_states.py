"""Which rank waits for which: chosen calls, formulas, and runs whose ranks pause."""

import numpy as np
import pytest

from hpc3d.analyze.metrics.breakdown import rank_rows
from hpc3d.analyze.metrics.collectives import bandwidth_rows
from hpc3d.analyze.metrics.stragglers import straggler_rows
from hpc3d.analyze.metrics.wait_states import calls_of, incomplete, wait_rows
from tests.analyze.delayed_runs import trained
from tests.analyze.synthetic import COMPUTE, JITTER, SLOT, by_hand, call, jitter, large, row

GROUPS = [("x", (0, 1, 2)), ("y", (0, 2)), ("p", (0, 1))]
CLOCKS = {0: 0, 1: 7000, 2: -500}  # ms ahead of rank 0's
BROADCAST, REDUCE = {"op": "broadcast", "peer": 1}, {"op": "reduce", "peer": 1}
SEND, RECEIVE = {"op": "send", "peer": 1, "group": 2}, {"op": "recv", "peer": 0, "group": 2}

# rank, posted, start, end; wait, transfer and violation; the rank that it waited for [ms]
MEETINGS = {
    "all wait for the last": (
        {"op": "all_reduce"},
        (0, 2, 2, 10, 4, 4, 0, 1),
        (1, 6, 6, 10, 0, 4, 0, 1),
        (2, 3, 5, 11, 1, 5, 0, 1),
    ),
    "who comes to its result later waits no more": (
        {"op": "all_gather"},
        (0, 1, 9, 12, 0, 3, 0, 2),
        (1, 2, 7, 12, 1, 4, 0, 2),
        (2, 8, 8, 12, 0, 4, 0, 2),
    ),
    "another group, with the same numbers": (
        {"op": "all_gather", "group": 1},
        (0, 3, 3, 6, 1, 2, 0, 2),
        (2, 4, 4, 6, 0, 2, 0, 2),
    ),
    "clocks disagree: rank 0 had the sum before rank 2 came": (
        {"op": "all_reduce"},
        (0, 2, 2, 5, 3, 0, 3, 2),
        (1, 2, 2, 9, 6, 1, 0, 2),
        (2, 8, 8, 9, 0, 1, 0, 2),
    ),
    "a root need not wait": (
        BROADCAST,
        (0, 2, 2, 6, 3, 1, 0, 1),
        (1, 5, 5, 6, 0, 1, 0, 1),
        (2, 9, 9, 10, 0, 1, 0, 2),
    ),
    "a root that waits for the last": (
        BROADCAST,
        (0, 2, 2, 10, 7, 1, 0, 2),
        (1, 5, 5, 10, 4, 1, 0, 2),
        (2, 9, 9, 10, 0, 1, 0, 2),
    ),
    "clocks disagree: a block before its root": (
        BROADCAST,
        (0, 2, 2, 4, 2, 0, 1, 1),
        (1, 5, 5, 8, 1, 2, 0, 2),
        (2, 6, 6, 8, 0, 2, 0, 2),
    ),
    "only the root of a reduction waits": (
        REDUCE,
        (0, 2, 2, 4, 0, 2, 0, 0),
        (1, 3, 3, 10, 6, 1, 0, 2),
        (2, 9, 9, 10, 0, 1, 0, 2),
    ),
    "clocks disagree: a sum before its last term": (
        REDUCE,
        (0, 2, 2, 4, 0, 2, 0, 0),
        (1, 3, 3, 8, 5, 0, 1, 2),
        (2, 9, 9, 10, 0, 1, 0, 2),
    ),
    "late sender": (None, (0, 5, 5, 6, 0, 1, 0, 0), (1, 2, 2, 10, 3, 5, 0, 0)),
    "late receiver": (None, (0, 2, 2, 10, 6, 2, 0, 1), (1, 8, 8, 10, 0, 2, 0, 1)),
    "a message that is sent at once": (None, (0, 2, 2, 3, 0, 1, 0, 0), (1, 8, 8, 9, 0, 1, 0, 1)),
    "a message on its way": (None, (0, 4, 4, 5, 0, 1, 0, 0), (1, 2, 6, 7, 0, 1, 0, 0)),
    "clocks disagree: received before it is sent": (
        None,
        (0, 9, 9, 10, 0, 1, 0, 0),
        (1, 2, 2, 7, 5, 0, 2, 0),
    ),
}


def rows_of(what, members, seq=0, begin=0):
    """Return the rows of a call. For a message from rank 0 to rank 1, `None` means no row."""
    return [
        call(
            rank,
            start=begin + start,
            end=begin + end,
            posted=begin + posted,
            seq=seq,
            ahead=CLOCKS[rank],
            **(what or (SEND, RECEIVE)[rank]),
        )
        for rank, posted, start, end, *_ in members
    ]


def opened(path, rows, end=1000, **values):
    steps = {(rank, 0): (CLOCKS[rank], CLOCKS[rank] + end) for rank in CLOCKS}
    return by_hand(path / "trace.h5", rows, steps, GROUPS, **values)


@pytest.mark.parametrize("name", MEETINGS)
def test_wait_and_transfer_time_of_single_calls(tmp_path, name):
    what, *members = MEETINGS[name]
    calls = calls_of(opened(tmp_path, rows_of(what, members)))
    found = zip(calls.rank, calls.wait, calls.blocked - calls.wait, calls.violation, calls.by)
    wanted = [
        (rank, wait * 10**6, transfer * 10**6, early * 10**6, by)
        for rank, *_, wait, transfer, early, by in members
    ]
    assert sorted(map(tuple, np.transpose([*zip(*found)]).tolist())) == wanted
    assert len(calls.first) == 1 and incomplete(calls) == 0


@pytest.fixture
def everything(tmp_path):
    """Return all calls, one after the other, with the numbers that a recorder assigns."""
    count, rows = {}, []
    for place, (what, *members) in enumerate(MEETINGS.values()):
        group = 2 if what is None else what.get("group", 0)
        rows += rows_of(what, members, count.get(group, 0), 20 * place)
        count[group] = count.get(group, 0) + 1
    return opened(tmp_path, rows)


def test_calls_are_matched_by_group_and_sequence_number(everything):
    calls = calls_of(everything)
    assert len(calls.first) == len(MEETINGS) and incomplete(calls) == 0
    wanted = sum(member[4] for _, *members in MEETINGS.values() for member in members)
    assert calls.wait.sum() == wanted * 10**6


def test_wait_and_transfer_add_up_to_blocked_time(everything):
    events, rows = everything.events, wait_rows(calls_of(everything))
    for each in rows:
        assert each["wait_s"] + each["transfer_s"] == pytest.approx(each["blocked_s"], rel=1e-12)
    blocked = sum(each["blocked_s"] for each in rows)
    assert blocked * 3 == pytest.approx(events["dur"].sum() * 1e-9, rel=1e-12)
    whole = wait_rows(calls_of(everything), ())
    assert [each["calls"] for each in whole] == [pytest.approx(len(events) / 3)]
    by_op = {(each["axis"], each["op"]): each for each in rows}
    assert by_op["p", "recv"]["wait_s"] == pytest.approx(8e-3 / 3)
    assert by_op["p", "send"]["wait_s"] == pytest.approx(6e-3 / 3)
    assert (by_op["p", "recv"]["violations"], by_op["p", "recv"]["worst_s"]) == (1, 2e-3)
    assert (by_op["x", "all_reduce"]["violations"], by_op["x", "all_reduce"]["worst_s"]) == (
        1,
        3e-3,
    )
    assert sum(each["violations"] for each in rows) == 4


def test_stragglers_are_ranked_by_imposed_wait(everything):
    rows = straggler_rows(calls_of(everything))
    imposed, waited = np.zeros(3), np.zeros(3)
    for _, *members in MEETINGS.values():
        for rank, *_, wait, _, _, by in members:
            imposed[by] += wait * 1e-3
            waited[rank] += wait * 1e-3
    assert [each["rank"] for each in rows] == np.argsort(-imposed).tolist()
    for each in rows:
        assert each["imposed_s"] == pytest.approx(imposed[each["rank"]])
        assert each["wait_s"] == pytest.approx(waited[each["rank"]])
        assert each["host"] == f"node{each['rank']}"
    late = [max(members, key=lambda each: each[1])[0] for _, *members in MEETINGS.values()]
    assert {each["rank"]: each["last"] for each in rows} == {
        rank: late.count(rank) for rank in CLOCKS
    }
    assert sum(each["meetings"] for each in rows) == len(everything.events)


def test_opposite_directions_of_a_channel_are_separate_messages(tmp_path):
    """Both ranks send message 0 to each other before they receive."""
    rows = [
        call(0, "send", 0, 1, 0, group=2, peer=1),
        call(1, "send", 0, 1, 0, group=2, peer=0),
        call(0, "recv", 1, 3, 0, group=2, peer=1),
        call(1, "recv", 1, 3, 0, group=2, peer=0),
    ]
    calls = calls_of(by_hand(tmp_path / "t.h5", rows, {(0, 0): (0, 9), (1, 0): (0, 9)}, GROUPS))
    assert np.diff(calls.first).tolist() == [2] and len(calls.row) == 4
    assert [sorted(pair.tolist()) for pair in np.split(calls.rank, 2)] == [[0, 1], [0, 1]]
    assert calls.wait.sum() == 0 and incomplete(calls) == 0


def test_messages_are_numbered_per_receiver(tmp_path):
    """The messages are message 0 to rank 1 and message 0 to rank 2."""
    rows = [
        call(0, "send", 0, 1, 0, peer=1),
        call(1, "recv", 0, 3, 0, peer=0),
        call(0, "send", 5, 6, 0, peer=2),
        call(2, "recv", 4, 7, 0, peer=0),
    ]
    steps = {(rank, 0): (0, 9) for rank in range(3)}
    calls = calls_of(by_hand(tmp_path / "t.h5", rows, steps, GROUPS))
    assert np.split(calls.rank, calls.first[1:])[1].tolist() == [0, 2]
    assert calls.wait.sum() == 1_000_000 and incomplete(calls) == 0


# rank, start and end of the call, start and end of the wait; wait in the call, and for whom [ms]
CALLED_EARLY = {
    "all meet": ((0, 2, 7, 8, 9, 4, 2), (1, 5, 7, 7.5, 8, 1, 2), (2, 6, 7, 8, 9, 0, 2)),
    "the root goes on": ((0, 2, 6, 8, 9, 3, 1), (1, 5, 5.5, 7, 8, 0, 1), (2, 9, 10, 11, 12, 0, 2)),
}


@pytest.mark.parametrize("name", CALLED_EARLY)
def test_broadcast_wait_starts_at_the_call(tmp_path, name):
    """Rank 1 is the root; all ranks compute for at least 0.5 ms between call and wait."""
    rows, members = [], CALLED_EARLY[name]
    for rank, called, free, begin, end, *_ in members:
        late = {"ahead": CLOCKS[rank], "op": "broadcast"}
        rows += [row(rank, called, free, "copy", group=0, **late)]
        rows += [row(rank, free, begin, ahead=CLOCKS[rank])]
        rows += [call(rank, start=begin, end=end, posted=called, seq=0, peer=1, **late)]
    trace = opened(tmp_path, rows)
    calls, wanted = calls_of(trace), {each[0]: each[-2:] for each in members}
    early = zip(calls.rank, calls.wait * 1e-6, calls.by, calls.ending)
    assert {rank: (wait, by) for rank, wait, by, ending in early if not ending} == wanted
    assert not calls.wait[calls.ending].any() and not calls.violation.any()
    assert len(calls.first) == 1 and incomplete(calls) == 0
    (only,) = wait_rows(calls)
    blocked = sum(free - called + end - begin for _, called, free, begin, end, *_ in members)
    assert (only["calls"], only["blocked_s"]) == (1, pytest.approx(blocked / 3 * 1e-3))
    assert [each["meetings"] for each in straggler_rows(calls)] == [1, 1, 1]
    for each in rank_rows(trace, calls):
        _, called, free, begin, end, wait, _ = members[each["rank"]]
        assert each["wait_s"] == pytest.approx(wait * 1e-3)
        assert each["exposed_s"] == pytest.approx((free - called + end - begin) * 1e-3)
        assert each["copy_s"] == pytest.approx(0) and each["outstanding_s"] > 0
    (collective,) = bandwidth_rows(calls)
    assert collective["count"] == 1


def test_copies_into_shared_blocks_are_not_waits(tmp_path):
    """A block in shared memory is copied at once, even if the peers are late."""
    rows = [row(0, 1, 3, "copy", op="all_gather", group=1), row(0, 3, 4)]
    rows += [call(0, "all_gather", 4, 9, 0, group=1, posted=1)]
    rows += [call(2, "all_gather", 8, 9, 0, group=1)]
    calls = calls_of(opened(tmp_path, rows))
    assert calls.ending.all() and calls.wait.tolist() == [4_000_000, 0]


def test_call_with_a_missing_member_is_incomplete(tmp_path):
    what, *members = MEETINGS["all wait for the last"]
    calls = calls_of(opened(tmp_path, rows_of(what, members[::2])))
    assert incomplete(calls) == 1
    assert calls.wait.tolist() == [1_000_000, 0], "until the last of those that are known"


def test_waits_count_in_completed_steps_but_use_all_arrivals(tmp_path):
    """The last rank to arrive never completed its step."""
    rows = [
        call(0, "all_gather", 2, 9, 0, group=1),
        call(2, "all_gather", 7, 9, 0, group=1, step=1),
        row(0, 0, 2),
    ]
    steps = {(0, 0): (0, 10), (2, 0): (0, 5)}
    calls = calls_of(by_hand(tmp_path / "t.h5", rows, steps, GROUPS, hosts=["a"] * 3))
    (only,) = wait_rows(calls)
    assert (only["calls"], only["wait_s"], only["transfer_s"]) == (0.5, 2.5e-3, 1e-3)
    assert straggler_rows(calls)[0]["imposed_s"] == pytest.approx(5e-3)


def test_peer_out_of_range_is_rejected(tmp_path):
    rows = rows_of(None, MEETINGS["late sender"][1:])
    rows[0]["peer"] = 3
    with pytest.raises(ValueError, match="events/peer contains an invalid row index"):
        calls_of(opened(tmp_path, rows))


def test_waits_of_many_ranks_match_the_formula(tmp_path):
    """Shape [ranks along y, along x, slots]; all members wait for the last one of their group."""
    side, steps, slots = 6, 3, 20
    trace = large(tmp_path / "large.h5", side, steps, slots)
    late = jitter(np.arange(side**2)[:, None], np.arange(slots)).reshape(side, side, slots)
    pairs = late.reshape(side, side // 2, 2, slots)
    last = np.repeat(pairs.max(2), 2, axis=1)
    slot = np.arange(slots)
    collective = np.where(slot % 2, late.max(0, keepdims=True), late.max(1, keepdims=True))
    wait = np.where(slot % 8 == 7, last, collective) - late
    calls = calls_of(trace)
    rows = {(each["axis"], each["op"]): each for each in wait_rows(calls)}
    odd = np.arange(side) % 2 == 1
    of = {
        ("x", "all_reduce"): wait[:, :, slot % 2 == 0],
        ("y", "all_reduce"): wait[:, :, (slot % 2 == 1) & (slot % 8 < 7)],
        ("x", "send"): wait[:, ~odd][..., slot % 8 == 7],
        ("x", "recv"): wait[:, odd][..., slot % 8 == 7],
    }
    assert rows.keys() == of.keys()
    for what, waits in of.items():
        assert rows[what]["wait_s"] == pytest.approx(waits.sum() * 1e-9 / side**2, rel=1e-12)
    blocked = (SLOT - COMPUTE - late).sum() * 1e-9 / side**2
    assert sum(each["blocked_s"] for each in rows.values()) == pytest.approx(blocked, rel=1e-12)
    assert all(each["violations"] == 0 for each in rows.values()) and incomplete(calls) == 0
    assert late.max() == 10 * JITTER
    imposed = sum(each["imposed_s"] for each in straggler_rows(calls))
    assert imposed == pytest.approx(wait.sum() * 1e-9, rel=1e-12), "a step"


DELAY = 0.15  # seconds of virtual time; all else takes microseconds
CLOSE = 1e-3  # seconds


@pytest.fixture(scope="module")
def slept(tmp_path_factory):
    """Rank 2 of 4 pauses before an all-reduce of all ranks, in each of three steps."""

    def delay(recorder, name):
        here = (name, recorder.layer, recorder.phase) == ("gelu", 1, "forward")
        return DELAY if here and recorder.rank == 2 else 0

    sizes = {"mesh__x": 4, "model__heads": 4, "model__layers": 3, "parallel__scheme": "1d"}
    return trained(tmp_path_factory.mktemp("run") / "slept", 4, delay, **sizes)


def test_sleeping_rank_is_the_first_straggler(slept):
    first, *others = straggler_rows(calls_of(slept))
    assert (first["rank"], first["host"]) == (2, "node2")
    assert first["imposed_s"] == pytest.approx(3 * DELAY, abs=CLOSE)
    assert [each["wait_s"] for each in others] == pytest.approx([DELAY] * 3, abs=CLOSE)
    assert first["wait_s"] < CLOSE


def test_sleep_counts_as_wait_of_other_ranks_not_as_transfer(slept):
    rows = wait_rows(calls_of(slept), ("layer", "phase", "axis"))
    there = {"layer": 1, "phase": "forward", "axis": "x"}
    (delay,) = (each for each in rows if there.items() <= each.items())
    assert delay["wait_s"] == pytest.approx(0.75 * DELAY, abs=CLOSE), "three of four ranks wait"
    assert delay["transfer_s"] < CLOSE
    assert incomplete(calls_of(slept)) == 0 and not any(each["violations"] for each in rows)
