"""The shortest step, against all partitions on the clock."""

import pytest

from hpc3d.partition import step_time
from hpc3d.partition.downsets import cuts_of
from hpc3d.partition.stages import Limits
from hpc3d.partition.step_time import quickest, timed
from tests.partition.graphs import chain, quickest_of_all, random_graph, random_limits, seconds


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize("seed", range(25))
def test_it_is_the_shortest_of_all(schedule, seed):
    graph = random_graph(seed, most=7)
    limits = random_limits(seed, 2 + seed % 3)
    found, expected = (
        quickest(cuts_of(graph), limits, (schedule,)),
        quickest_of_all(graph, limits, schedule),
    )
    if expected is None:
        assert found is None
    else:
        assert found.proven and found.seconds == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(("schedule", "expected"), [("1f1b", 573), ("gpipe", 600)])
def test_uneven_loads(schedule, expected):
    """Loads whose lightest heaviest stage takes 600 under 1F1B."""
    limits = Limits(4, microbatches=8)
    found = quickest(cuts_of(chain()), limits, (schedule,))
    assert (found.seconds, found.schedule, found.proven) == (expected, schedule, True)


def test_a_step_is_that_of_the_clock():
    graph, limits = random_graph(3), Limits(3, None, 2.0, 5)
    cuts = cuts_of(graph)
    ends = [2, 5, cuts.count - 1]
    assert not cuts.downsets[2] & ~cuts.downsets[5]
    downsets = [cuts.downsets[end] for end in ends]
    found = timed(cuts, limits, "1f1b", ends)
    assert found.seconds == seconds(graph, downsets, limits, "1f1b")


def test_what_was_received_is_held_by_every_microbatch_in_flight():
    """Of 3 stages under GPipe 2 have received 4 bytes for each of 5 microbatches."""
    cuts, limits = cuts_of(chain((3, 3, 3), nbytes=4.0)), Limits(3, 20.0, None, 5)
    kept = limits._replace(keeps_received=True)
    assert timed(cuts, kept, "gpipe", [1, 2, 3]) and timed(cuts, limits, "gpipe", [1, 2, 3])
    assert not timed(cuts, kept._replace(memory=19.0), "gpipe", [1, 2, 3])
    assert quickest(cuts, kept._replace(memory=19.0), ("gpipe",)).ends == (3,)


def test_a_search_that_is_cut_off_proves_nothing(monkeypatch):
    monkeypatch.setattr(step_time, "SEARCH_BUDGET", 64)
    found = quickest(cuts_of(random_graph(4)), Limits(4, microbatches=4), ("1f1b",))
    assert found and not found.proven


def test_all_searches_together_run_so_many_passes_and_one_step(monkeypatch):
    """Of 20 numbers of stages and two schedules, with 16 microbatches."""
    run, passes = step_time.timeline, []

    def counted(streams, *rest):
        passes.append(sum(map(len, streams)))
        return run(streams, *rest)

    monkeypatch.setattr(step_time, "SEARCH_BUDGET", 5_000)
    monkeypatch.setattr(step_time, "timeline", counted)
    found = quickest(cuts_of(chain(range(1, 21))), Limits(20, microbatches=16), ("1f1b", "gpipe"))
    assert found and not found.proven
    assert 5_000 <= sum(passes) <= 5_000 + 2 * 20 * 16
