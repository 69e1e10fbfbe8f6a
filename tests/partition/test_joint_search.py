"""Search for the best arrangement."""

import pytest

pytest.importorskip("networkx")

from hpc3d.partition import downsets, joint_search
from hpc3d.partition.atom_graph import Atom, Graph, Value
from hpc3d.partition.downsets import cuts_of
from hpc3d.partition.evaluation import Limits, ModelCosts, RunCosts, bytes_held, evaluated, load
from hpc3d.partition.joint_search import Allowed, JointSearch, fastest, lightest, timed
from hpc3d.pipeline.step_model import StepModel
from tests.partition.arrangements import MACHINE, line, random_costs
from tests.partition.graphs import (
    chain,
    lightest_of_all,
    quickest_of_all,
    random_graph,
    random_limits,
    seconds,
)

ANY = Allowed(4, 1e9, (1, 2, 4), ("1f1b", "gpipe"))


def test_estimated_gpipe_step_matches_the_simulator():
    """The times are equal without messages, if stages are equal in GPipe."""
    costs = line([1.0] * 8, [0.0] * 7)
    search = JointSearch(costs, ANY._replace(schedules=("gpipe",), replicas=(1,)))
    best = search.found()[0]
    assert [stage.end for stage in best.stages] == [2, 4, 6, 8] and best.microbatches == 4
    assert search.best == evaluated(costs, best).seconds == (4 + 3) * 2 * 2 * 3


@pytest.mark.parametrize("schedule", ["zb-h1", "zb-h2"])
def test_estimate_of_a_split_backward_pass_is_a_lower_bound(schedule):
    """The weight gradients fill the bubble: their time is subtracted from it."""

    def graph(rows):
        atoms = [Atom((n,), 1.0 * rows, 2.0 * rows, weight=1.0 * rows) for n in range(8)]
        return Graph(atoms, [Value(n, (n + 1,), 0.0) for n in range(7)])

    costs = ModelCosts(graph, MACHINE, 8)
    search = JointSearch(costs, Allowed(2, 1e9, (4,), (schedule,), (1,)))
    (best, *_) = search.found()
    assert 4 * 8 < search.best <= evaluated(costs, best).seconds


def test_estimate_includes_pass_overhead_and_update():
    """This is exact for one stage: 4 microbatches have 4 times the overhead of a pass."""

    def graph(rows):
        return Graph([Atom((n,), 1.0 * rows, 2.0 * rows, parameters=5.0) for n in range(8)], [])

    costs = ModelCosts(graph, MACHINE, 8, RunCosts(forward=2.0, backward=3.0, update=0.5))
    search = JointSearch(costs, Allowed(1, 1e9, (4,), ("1f1b",)))
    (best,) = search.found()
    assert search.best == evaluated(costs, best).seconds == 8 * 8 * 3 + 4 * 5 + 0.5 * 40


@pytest.mark.parametrize("seed", range(8))
def test_found_arrangements_are_valid_and_fit(seed):
    costs, memory, ranks = random_costs(seed)
    allowed = ANY._replace(ranks=ranks, memory=memory, schedules=("1f1b", "gpipe", "interleaved"))
    found = JointSearch(costs, allowed).found()
    assert len({*found}) == len(found)
    for choice in found:
        assert choice.ranks <= ranks and max(bytes_held(costs, choice)) <= memory
        assert evaluated(costs, choice, memory).fits


def test_recomputation_is_used_only_if_memory_requires_it():
    """Stages of 4 atoms save 4 bytes per row; the first has two microbatches in flight."""

    def graph(rows):
        atoms = [Atom((n,), 1.0 * rows, 2.0 * rows, saved=1.0 * rows) for n in range(8)]
        return Graph(atoms, [Value(n, (n + 1,), 0.0) for n in range(7)])

    costs = ModelCosts(graph, MACHINE, 8)
    allowed = Allowed(2, 10.0, (4,), ("1f1b",), (1,))
    assert JointSearch(costs, allowed._replace(memory=16.0)).found()[0].stages == (
        (4, 1, False),
        (8, 1, False),
    )
    first, second = JointSearch(costs, allowed).found()[0].stages
    assert first.recompute and not second.recompute
    assert not JointSearch(costs, allowed._replace(recompute=(False,), memory=7.0)).found()


def test_interleaved_stage_that_does_not_fit_recomputes():
    """Stage 0 has 5 in flight of four parts of 2 atoms, which save 4 bytes in both rows."""

    def graph(rows):
        atoms = [Atom((n,), 1.0 * rows, 2.0 * rows, saved=1.0 * rows) for n in range(8)]
        return Graph(atoms, [Value(n, (n + 1,), 0.0) for n in range(7)])

    allowed = Allowed(2, 16.0, (4,), ("interleaved",), (1,))
    found = JointSearch(ModelCosts(graph, MACHINE, 8), allowed).found()
    again = [[part.recompute for part in each.stages] for each in found if each.width == 2]
    assert again == [[True, False, False, False]]


@pytest.mark.parametrize(
    ("replicas", "expected"),
    [((2,), {(2,), (2, 2)}), ((1, 2), {(1, 2)}), ((3, 1), {(3, 1)})],
)
def test_search_returns_the_requested_replicas(replicas, expected):
    search = JointSearch(line([1.0] * 6, [1.0] * 5), ANY._replace(replicas=replicas))
    assert {choice.replicas for choice in search.found()} == expected


def test_many_ranks_are_assigned_in_units():
    allowed = ANY._replace(ranks=256)
    assert allowed.unit == 8 and allowed.replicas_of(1)[:2] == (8, 16)
    assert allowed._replace(ranks=63).unit == 1
    assert allowed._replace(replicas=(3,)).units(3) == 1 and allowed.units(16) == 2


def test_requested_replicas_of_many_ranks_are_found():
    costs = line([1.0] * 6, [1.0] * 5, batch=1 << 16)
    many = ANY._replace(ranks=1 << 16, replicas=(1 << 14, 1 << 15))
    assert {each.replicas for each in JointSearch(costs, many).found()} == {(1 << 14, 1 << 15)}


def test_split_backward_schedules_are_found_on_request():
    search = JointSearch(line([1.0] * 6, [0.0] * 5), ANY._replace(schedules=("zb-h1",)))
    found = search.found()
    assert found and all(each.schedule == "zb-h1" for each in found if each.width > 1)


def test_search_reports_whether_anything_fits():
    costs, _, _ = random_costs(3)
    assert not JointSearch(costs, ANY._replace(memory=1.0)).fits()
    assert JointSearch(costs, ANY).fits()


# Partitions between downsets, with the shortest step


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize("seed", range(25))
def test_quickest_is_the_optimum_of_all_partitions(schedule, seed):
    graph = random_graph(seed, most=7)
    limits = random_limits(seed, 2 + seed % 3)
    found, expected = (
        fastest(cuts_of(graph), limits, (schedule,)),
        quickest_of_all(graph, limits, schedule),
    )
    if expected is None:
        assert found is None
    else:
        assert found.proven and found.seconds == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(("schedule", "expected"), [("1f1b", 573), ("gpipe", 600)])
def test_quickest_partition_of_uneven_loads(schedule, expected):
    """The smallest maximum load takes 600 under 1F1B."""
    limits = Limits(4, microbatches=8)
    found = fastest(cuts_of(chain()), limits, (schedule,))
    assert (found.seconds, found.schedule, found.proven) == (expected, schedule, True)


def test_partition_time_matches_the_simulator():
    graph, limits = random_graph(3), Limits(3, None, 2.0, 5)
    cuts = cuts_of(graph)
    ends = [2, 5, cuts.count - 1]
    assert not cuts.downsets[2] & ~cuts.downsets[5]
    stages = [cuts.downsets[end] for end in ends]
    found = timed(cuts, limits, "1f1b", ends)
    assert found.seconds == seconds(graph, stages, limits, "1f1b")


def test_received_inputs_count_for_every_microbatch_in_flight():
    """In GPipe, 2 of 3 stages have received 4 bytes for each of 5 microbatches."""
    cuts, limits = cuts_of(chain((3, 3, 3), nbytes=4.0)), Limits(3, 20.0, None, 5)
    kept = limits._replace(keeps_received=True)
    assert timed(cuts, kept, "gpipe", [1, 2, 3]) and timed(cuts, limits, "gpipe", [1, 2, 3])
    assert not timed(cuts, kept._replace(memory=19.0), "gpipe", [1, 2, 3])
    assert fastest(cuts, kept._replace(memory=19.0), ("gpipe",)).ends == (3,)


def test_truncated_search_proves_nothing(monkeypatch):
    monkeypatch.setattr(joint_search, "SEARCH_BUDGET", 64)
    found = fastest(cuts_of(random_graph(4)), Limits(4, microbatches=4), ("1f1b",))
    assert found and not found.proven


def test_searches_share_one_budget(monkeypatch):
    """Searches 20 numbers of stages and two schedules, with 16 microbatches."""
    run, passes = StepModel.ends, []

    def counted(model, costs):
        passes.append(2 * len(costs) * 16)
        return run(model, costs)

    monkeypatch.setattr(joint_search, "SEARCH_BUDGET", 5_000)
    monkeypatch.setattr(StepModel, "ends", counted)
    found = fastest(cuts_of(chain(range(1, 21))), Limits(20, microbatches=16), ("1f1b", "gpipe"))
    assert found and not found.proven
    assert 5_000 <= sum(passes) <= 5_000 + 2 * 20 * 16


# Partitions between downsets, with the lightest heaviest stage


def heaviest(graph, limits):
    """Return the recomputed maximum load of the partition that `lightest` finds."""
    cuts = cuts_of(graph)
    ends = lightest(cuts, limits)
    if ends is None:
        return None
    stages = [cuts.stage(*cut) for cut in zip([0, *ends], ends)]
    assert sum(stages) == graph.everything and len(stages) <= limits.ranks
    return max(load(graph, members, limits) for members in stages)


@pytest.mark.parametrize("seed", range(40))
def test_lightest_load_over_downsets_is_optimal(seed):
    graph = random_graph(seed, most=7)
    limits = random_limits(seed, 2 + seed % 3)
    assert heaviest(graph, limits) == lightest_of_all(graph, limits)


@pytest.mark.parametrize("seed", range(40))
def test_lightest_load_of_a_chain_is_optimal(seed, monkeypatch):
    """Values that cross several boundaries count as in a search over all downsets."""
    graph, limits = random_graph(seed, most=7), random_limits(seed, 2 + seed % 3)
    exact = heaviest(graph, limits)
    monkeypatch.setattr(downsets, "MOST_WORK", 0)
    assert not cuts_of(graph).exact
    along = heaviest(graph, limits)
    assert along is None or along >= exact
    line = chain(range(1, 9), nbytes=3.0)
    limits = Limits(4, None, 2.0)
    assert heaviest(line, limits) == lightest_of_all(line, limits)


def test_downset_search_beats_the_sorted_chain_on_branches(monkeypatch):
    """For nodes 0 2 | 1 3, sorted as 0 1 2 3, two stages of 2 need another order."""
    atoms = [Atom((number,), 1.0, 0.0) for number in range(4)]
    graph = Graph(atoms, [Value(0, (2,), 9.0), Value(1, (3,), 9.0)])
    limits = Limits(2, None, 1.0)
    assert heaviest(graph, limits) == 2
    monkeypatch.setattr(downsets, "MOST_WORK", 0)
    assert heaviest(graph, limits) > 2


def test_fewest_stages_with_the_same_load_are_selected():
    assert len(lightest(cuts_of(chain((9, 1, 1))), Limits(3))) == 2


def test_lightest_returns_none_if_nothing_fits():
    graph = random_graph(1)
    assert lightest(cuts_of(graph), Limits(4, memory=0.5)) is None


def test_received_inputs_require_memory():
    """There are two nodes of 3 s with 4 bytes between them, saved by the second per microbatch."""
    cuts = cuts_of(chain((3, 3), nbytes=4.0))
    assert lightest(cuts, Limits(2, memory=3.0)) == [1, 2]
    assert lightest(cuts, Limits(2, memory=4.0, keeps_received=True)) == [1, 2]
    assert lightest(cuts, Limits(2, memory=3.0, keeps_received=True)) == [2]
