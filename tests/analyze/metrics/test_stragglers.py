"""Detection of stragglers: none among equal ranks, and one slow rank."""

import numpy as np
import pytest

from hpc3d.analyze.metrics.breakdown import imbalance_rows
from hpc3d.analyze.metrics.stragglers import (
    CHANCE,
    LEAST,
    chance,
    straggler,
    straggler_rows,
    stragglers,
    work_of,
)
from hpc3d.analyze.metrics.wait_states import calls_of
from tests.analyze.synthetic import by_hand, call, row

STEP = 1.0


def alike(ranks, steps, seed):
    return np.random.default_rng(seed).normal(0.5, 0.05, (ranks, steps))


@pytest.mark.parametrize(("ranks", "steps"), [(2, 19), (8, 4), (8, 19), (64, 3), (64, 19)])
def test_identical_ranks_rarely_yield_a_straggler(ranks, steps):
    named = [straggler(alike(ranks, steps, seed), STEP) is not None for seed in range(400)]
    assert np.mean(named) <= CHANCE


@pytest.mark.parametrize(("ranks", "steps"), [(2, 19), (8, 4), (8, 19), (64, 3), (64, 19)])
def test_rank_slower_than_the_scatter_is_a_straggler(ranks, steps):
    work = alike(ranks, steps, 0)
    work[ranks - 1] += 0.5
    assert straggler(work, STEP) == ranks - 1


@pytest.mark.parametrize("slow", [None, 6])
def test_only_ranks_that_do_the_same_work_are_compared(slow):
    """Ranks 4 to 7 are a stage that computes twice as long, which makes none of them a
    straggler."""
    group = np.repeat([0, 1], 4)
    work = alike(8, 19, 1) * (1 + group)[:, None]
    if slow:
        work[slow] += 0.5
    found = stragglers(work, STEP, group)
    assert [*found] == [*range(8)]
    assert [rank for rank in found if found[rank]] == ([slow] if slow else [])


def test_ranks_without_peers_are_not_judged():
    work = np.full((3, 19), 0.5)
    work[2] += 0.1
    assert stragglers(work, STEP, np.arange(3)) == {}
    assert stragglers(work, STEP, np.array([0, 1, 1])) == {1: False, 2: True}


def test_number_of_groups_raises_the_number_of_steps_required():
    """The same one of 2 ranks is slowest in 6 of 6 steps by chance in 2 of 64 cases."""
    work = np.full((4, 6), 0.5)
    work[[1, 3]] += 0.1
    assert stragglers(work[:2], STEP, np.zeros(2)) == {0: False, 1: True}
    assert stragglers(work, STEP, np.array([0, 0, 1, 1])) == {}


def test_identical_times_yield_no_straggler():
    assert straggler(np.full((4, 19), 0.5), STEP) is None


@pytest.mark.parametrize(("more", "named"), [(LEAST * 1.01, 3), (LEAST * 0.99, None)])
def test_negligible_difference_yields_no_straggler(more, named):
    """A negligible difference is not reported, even if it is certain."""
    work = np.full((4, 19), 0.5)
    work[3] += more * STEP
    assert straggler(work, STEP) == named


@pytest.mark.parametrize(("steps", "named"), [(3, None), (4, 1), (5, 1)])
def test_straggler_requires_enough_steps(steps, named):
    """With 4 ranks, the same rank is slowest in 3 of 3 steps by chance in 4 of 64 cases."""
    work = np.full((4, steps), 0.5)
    work[1] += 0.1
    assert straggler(work, STEP) == named


@pytest.mark.parametrize(
    ("ranks", "steps"), [(1, 5), (4, 0)], ids=["one rank", "no step of all ranks"]
)
def test_straggler_requires_ranks_and_common_steps(ranks, steps):
    assert straggler(np.ones((ranks, steps)), STEP) is None


def test_straggler_chance_bounds_the_binomial_tail():
    assert chance(3, 3, 4) == pytest.approx(4 * 4**-3)
    assert chance(5, 20, 4) == chance(0, 20, 4) == 1.0
    for count in range(6, 21):
        exact = sum(np.random.default_rng(1).binomial(20, 0.25, 100_000) >= count) / 100_000
        assert 4 * exact <= chance(count, 20, 4) + 0.01


def run_of(path, slow=0):
    """Run of six steps of 100 ms on two ranks. Both work for 40 to 45 ms, alternately, rank 1
    `slow` ms longer, and then call a collective."""
    rows, steps = [], {}
    for step in range(6):
        begin = 100 * step
        ends = [begin + 40 + 5 * ((rank + step) % 2) + slow * rank for rank in (0, 1)]
        for rank, end in enumerate(ends):
            steps[rank, step] = begin, begin + 100
            rows.append(row(rank, begin, end, step=step))
            rows.append(call(rank, "all_reduce", end, begin + 100, step, step=step, posted=end))
    return by_hand(path, rows, steps, [("x", (0, 1))])


@pytest.mark.parametrize(("slow", "named"), [(0, []), (20, [1])])
def test_straggler_table_marks_the_slow_rank(tmp_path, slow, named):
    calls = calls_of(run_of(tmp_path / "t.h5", slow))
    odd = [40 + 5 * (step % 2) for step in range(6)]
    even = [45 - 5 * (step % 2) + slow for step in range(6)]
    assert work_of(calls) * 1e3 == pytest.approx(np.array([odd, even]))
    rows = straggler_rows(calls)
    assert [each["rank"] for each in rows if each["straggler"] == "yes"] == named
    assert {each["rank"]: each["work_s"] for each in rows} == pytest.approx(
        {0: 0.0425, 1: 0.0425 + slow * 1e-3}
    )


def staged(path):
    """Run of eight steps on two stages of two ranks. Stage 1 computes twice as long, and all ranks
    wait for it in a collective. Rank 1 computes 2 ms longer than rank 0."""
    rows, steps = [], {}
    for step in range(8):
        begin = 100 * step
        ends = [begin + 30 * (1 + rank // 2) + 2 * (rank == 1) for rank in range(4)]
        for rank, end in enumerate(ends):
            steps[rank, step] = begin, begin + 100
            rows.append(row(rank, begin, end, step=step))
            rows.append(call(rank, "all_reduce", end, begin + 70, step, step=step, posted=end))
    attributes = {"axes": "p x", "axis_sizes": [2, 2]}
    return by_hand(path, rows, steps, [("world", (0, 1, 2, 3))], **attributes)


def test_stage_that_computes_longer_is_imbalance_and_no_straggler(tmp_path):
    """The waits for the slow stage are not attributed to stragglers, which rank 1 is."""
    opened = staged(tmp_path / "t.h5")
    rows = straggler_rows(calls_of(opened))
    assert [each["rank"] for each in rows] == [1, 0, 2, 3]
    assert [each["straggler"] for each in rows] == ["yes", "no", "no", "no"]
    assert {each["peers"] for each in rows} == {1}
    assert [each["imposed_s"] for each in rows] == [0, 0, 0, 0]
    (found, *_) = imbalance_rows(opened)
    assert found["imbalance"] == pytest.approx(32 / 31) and found["rank"] == 1
    assert found["stage_imbalance"] == pytest.approx(60 / ((31 + 60) / 2)) and found["stage"] == 1
