"""Arrangements that may be the best."""

import pytest

pytest.importorskip("torch")
pytest.importorskip("networkx")

from hpc3d.partition.atom_graph import Atom, Graph, Value
from hpc3d.partition.evaluation import ModelCosts, RunCosts, bytes_held, evaluated
from hpc3d.partition.joint_search import Allowed, JointSearch
from tests.partition.arrangements import MACHINE, line, random_costs

ANY = Allowed(4, 1e9, (1, 2, 4), ("1f1b", "gpipe"))


def test_what_it_takes_a_step_for_is_about_that_of_the_clock():
    """Without messages exactly, where stages are alike and GPipe fills and drains."""
    costs = line([1.0] * 8, [0.0] * 7)
    search = JointSearch(costs, ANY._replace(schedules=("gpipe",), replicas=(1,)))
    best = search.found()[0]
    assert [stage.end for stage in best.stages] == [2, 4, 6, 8] and best.microbatches == 4
    assert search.best == evaluated(costs, best).seconds == (4 + 3) * 2 * 2 * 3


def test_passes_and_the_update_count():
    """Of one stage exactly: 4 microbatches take 4 times what comes with a part."""

    def graph(rows):
        return Graph([Atom((n,), 1.0 * rows, 2.0 * rows, parameters=5.0) for n in range(8)], [])

    costs = ModelCosts(graph, MACHINE, 8, RunCosts(forward=2.0, backward=3.0, update=0.5))
    search = JointSearch(costs, Allowed(1, 1e9, (4,), ("1f1b",)))
    (best,) = search.found()
    assert search.best == evaluated(costs, best).seconds == 8 * 8 * 3 + 4 * 5 + 0.5 * 40


@pytest.mark.parametrize("seed", range(8))
def test_what_it_finds_can_be_run_and_fits(seed):
    costs, memory, ranks = random_costs(seed)
    allowed = ANY._replace(ranks=ranks, memory=memory, schedules=("1f1b", "gpipe", "interleaved"))
    found = JointSearch(costs, allowed).found()
    assert len({*found}) == len(found)
    for choice in found:
        assert choice.ranks <= ranks and max(bytes_held(costs, choice)) <= memory
        assert evaluated(costs, choice, memory).fits


def test_recomputation_only_where_there_is_no_room():
    """Stages of 4 atoms save 4 bytes a row; the first has two microbatches in flight."""

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


def test_an_interleaved_stage_without_room_runs_again():
    """Of four parts of 2 atoms, which save 4 bytes in both rows, 5 are in flight on stage 0."""

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
def test_replicas_that_are_asked_for(replicas, expected):
    search = JointSearch(line([1.0] * 6, [1.0] * 5), ANY._replace(replicas=replicas))
    assert {choice.replicas for choice in search.found()} == expected


def test_many_ranks_are_given_in_units():
    allowed = ANY._replace(ranks=256)
    assert allowed.unit == 8 and allowed.replicas_of(1)[:2] == (8, 16)
    assert allowed._replace(ranks=63).unit == 1
    assert allowed._replace(replicas=(3,)).units(3) == 1 and allowed.units(16) == 2


def test_known_replicas_of_very_many_ranks_take_no_more_room():
    costs = line([1.0] * 6, [1.0] * 5, batch=1 << 16)
    many = ANY._replace(ranks=1 << 16, replicas=(1 << 14, 1 << 15))
    assert {each.replicas for each in JointSearch(costs, many).found()} == {(1 << 14, 1 << 15)}


def test_split_backward_passes_are_found_where_asked_for():
    search = JointSearch(line([1.0] * 6, [0.0] * 5), ANY._replace(schedules=("zb-h1",)))
    found = search.found()
    assert found and all(each.schedule == "zb-h1" for each in found if each.width > 1)


def test_nothing_fits():
    costs, _, _ = random_costs(3)
    assert not JointSearch(costs, ANY._replace(memory=1.0)).fits()
    assert JointSearch(costs, ANY).fits()
