"""Bubbles with ideal timing, compared with published values and closed forms."""

from itertools import pairwise

import pytest

from hpc3d.pipeline.instruction import Placement, parse
from hpc3d.pipeline.passes import lower
from hpc3d.pipeline.schedule import instruction_streams
from hpc3d.pipeline.timeline import Cost, bubble, makespan, timeline

# Zero Bubble, arXiv:2401.10241: times of table 6 [ms], bubble rates of table 5.
PUBLISHED = [
    # p, m, T_F, T_B, T_W, T_comm, 1F1B, ZB-H1, ZB-H2
    (8, 24, 18.522, 18.086, 9.337, 0.601, 0.2431, 0.1585, 0.1083),
    (8, 32, 18.513, 18.086, 9.331, 0.626, 0.1985, 0.1242, 0.0837),
    (8, 64, 18.546, 18.097, 9.321, 0.762, 0.1240, 0.0674, 0.0444),
    (8, 24, 29.718, 29.444, 19.927, 0.527, 0.2347, 0.1323, 0.0698),
    (8, 32, 29.802, 29.428, 19.530, 0.577, 0.1898, 0.1045, 0.0559),
    (8, 64, 29.935, 29.621, 19.388, 0.535, 0.1091, 0.0554, 0.0294),
]


EQUAL = Cost(1, 1, 1)


def run(name, p, m, v=1, cost=EQUAL, **steps):
    return timeline(*instruction_streams(name, p, m, v, **steps), cost)


@pytest.mark.parametrize("row", PUBLISHED)
def test_bubbles_match_the_published_rates(row):
    p, m, *times = row[:6]
    for name, rate in zip(("1f1b", "zb-h1", "zb-h2"), row[6:]):
        assert abs(bubble(run(name, p, m, cost=Cost(*times))) - rate) <= 0.00005 + 1e-9, name


@pytest.mark.parametrize(("p", "m"), [(1, 3), (2, 2), (4, 8), (8, 4), (5, 16)])
@pytest.mark.parametrize("name", ["gpipe", "1f1b", "pipedream"])
def test_bubble_of_unsplit_backward_passes(name, p, m):
    rows = run(name, p, m, cost=Cost(2, 3, 1))
    assert bubble(rows) == pytest.approx((p - 1) / (m + p - 1), abs=1e-12)
    assert makespan(rows) == (m + p - 1) * 6


@pytest.mark.parametrize(("p", "m"), [(2, 2), (2, 8), (4, 4), (4, 12), (8, 16)])
@pytest.mark.parametrize("v", [1, 2, 3, 4])
def test_bubble_of_the_interleaved_schedule(p, m, v):
    rows = run("interleaved", p, m, v)
    assert makespan(rows) / (3 * m) - 1 == pytest.approx((p - 1) / (v * m), abs=1e-12)


@pytest.mark.parametrize(("p", "m"), [(1, 2), (1, 5), (2, 4), (2, 9), (4, 8), (5, 13)])
def test_bubble_of_pairs_of_passes(p, m):
    """Each stage is idle for p - 1 times; the passes of a pair start and end together."""
    rows = timeline(*instruction_streams("dualpipe-v", p, m, 2), EQUAL, pairs=True)
    assert makespan(rows) == 3 * m + p - 1
    for stage, row in enumerate(rows):
        together = sum(one[:2] == other[:2] for one, other in pairwise(row))
        assert together == 2 * m - 3 * p + 1 + stage


@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 16), (8, 32)])
@pytest.mark.parametrize("cost", [Cost(1, 1, 1), Cost(3, 3, 2), Cost(4, 5, 3)])
def test_zero_bubble_wait_matches_the_paper(p, m, cost):
    """(p-1)(T_F + T_B - T_W) and (p-1)(T_F + T_B - 2 T_W): table 2 of arXiv:2401.10241."""
    for name, weights in (("zb-h1", 1), ("zb-h2", 2)):
        rows = run(name, p, m, cost=cost)
        wait = max(row[-1][1] - row[0][0] for row in rows) - m * sum(cost[:3])
        assert wait == (p - 1) * (cost.forward + cost.backward - weights * cost.weight), name


@pytest.mark.parametrize("p", range(1, 9))
def test_zb_v_has_no_bubble_with_enough_microbatches(p):
    for m in (2 * p - 1, 2 * p, 3 * p + 1):
        assert bubble(run("zb-v", p, m, 2)) == 0.0
    short = [bubble(run("zb-v", p, m, 2)) for m in range(1, 2 * p - 1)]
    assert all(rate > 0 for rate in short)


def test_two_asynchronous_steps_fill_and_drain_once():
    one = makespan(run("1f1b", 4, 8))
    assert makespan(run("pipedream-2bw", 4, 8, steps=2)) == 2 * one - 3 * 3


def test_pass_times_of_a_small_pipeline():
    rows = run("1f1b", 2, 2, cost=Cost(1.0, 2.0, 4.0, comm=0.5))
    assert [[(start, end, str(what)) for start, end, what in row] for row in rows] == [
        [(0, 1, "F0"), (1, 2, "F1"), (9, 15, "BW0"), (16, 22, "BW1")],
        [(1.5, 2.5, "F0"), (2.5, 8.5, "BW0"), (8.5, 9.5, "F1"), (9.5, 15.5, "BW1")],
    ]


def test_chunks_on_the_same_stage_send_no_message():
    rows = run("zb-v", 1, 1, 2, cost=Cost(2, 2, 2, comm=9))
    assert [(start, str(what)) for start, _, what in rows[0]] == [
        (0, "F0"),
        (1, "1F0"),
        (2, "1B0"),
        (3, "1W0"),
        (4, "B0"),
        (5, "W0"),
    ]


@pytest.mark.parametrize("backward", ["B", "BW"])
def test_deadlocked_streams_are_reported(backward):
    """The error uses the names in the streams: a B remains a B."""
    texts = "F0 B0 F1 B1".replace("B", backward), "F1 B1 F0 B0"
    orders, place = [list(map(parse, text.split())) for text in texts], Placement(2, 1)
    for run in (lambda: timeline(orders, place, EQUAL), lambda: lower(orders, place)):
        with pytest.raises(
            ValueError, match=rf"^deadlock: stage 0 at {backward}0, stage 1 at F1 cannot proceed;"
        ):
            run()


def test_pass_before_its_input_is_a_deadlock():
    for text in ("W0 F0 B0", "B0 F0", "F0 W0 B0"):
        with pytest.raises(ValueError, match="deadlock: stage 0 at"):
            timeline([[parse(word) for word in text.split()]], Placement(1, 1), EQUAL)


def test_timeline_uses_the_cost_of_each_chunk_and_border():
    """There are two stages of two chunks; boundaries take longer down the model."""
    costs = [Cost(2.0**part, 3.0**part, 0.0, 0.1 * 2**part) for part in range(4)]
    passes, placement = instruction_streams("interleaved", 2, 2, 2)
    rows = timeline(passes, placement, costs)
    spans = {
        (op[0], placement.part(stage, chunk), mb): (start, end)
        for stage, row in enumerate(rows)
        for start, end, (op, mb, chunk) in row
    }
    starts = {start for start, _ in spans.values()}
    for (op, part, mb), (start, end) in spans.items():
        cost = costs[part]
        assert end - start == pytest.approx(cost.forward if op == "F" else cost.backward)
        before = spans.get((op, part - 1 if op == "F" else part + 1, mb))
        if before:
            border = costs[part - 1 if op == "F" else part].comm
            assert start >= before[1] + border - 1e-9
    waits = [spans["F", part, 0][0] - spans["F", part - 1, 0][1] for part in range(1, 4)]
    assert waits[0] == pytest.approx(0.1) and len(starts) == len(spans)


def test_optimal_cut_of_uneven_loads_depends_on_the_schedule():
    """Loads 8 11 2 1 18 5 4 11, backward twice as long, 8 microbatches: the best boundaries of
    1F1B differ from those with the smallest maximum load, which are best for GPipe."""

    def seconds(name, loads):
        return makespan(run(name, 4, 8, cost=[Cost(load, 2 * load, 0) for load in loads]))

    even, other = (19, 3, 18, 20), (21, 19, 5, 15)
    assert [seconds("1f1b", each) for each in (even, other)] == [600, 573]
