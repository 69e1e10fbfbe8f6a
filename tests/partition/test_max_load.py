"""The lightest heaviest stage, against all partitions."""

import pytest

from hpc3d.partition import downsets
from hpc3d.partition.downsets import cuts_of
from hpc3d.partition.max_load import lightest
from hpc3d.partition.stages import Limits, load
from tests.partition.graphs import chain, lightest_of_all, random_graph, random_limits


def found(graph, limits):
    """The load of the heaviest stage of what `lightest` finds, computed anew."""
    cuts = cuts_of(graph)
    ends = lightest(cuts, limits)
    if ends is None:
        return None
    stages = [cuts.stage(*cut) for cut in zip([0, *ends], ends)]
    assert sum(stages) == graph.everything and len(stages) <= limits.ranks
    return max(load(graph, members, limits) for members in stages)


@pytest.mark.parametrize("seed", range(40))
def test_over_downsets_it_is_the_least_of_all(seed):
    graph = random_graph(seed, most=7)
    limits = random_limits(seed, 2 + seed % 3)
    assert found(graph, limits) == lightest_of_all(graph, limits)


@pytest.mark.parametrize("seed", range(40))
def test_a_chain_of_sorted_nodes_is_exact_for_chains(seed, monkeypatch):
    """What crosses several borders is counted as over all downsets."""
    graph, limits = random_graph(seed, most=7), random_limits(seed, 2 + seed % 3)
    exact = found(graph, limits)
    monkeypatch.setattr(downsets, "MOST_WORK", 0)
    assert not cuts_of(graph).exact
    along = found(graph, limits)
    assert along is None or along >= exact
    line = chain(range(1, 9), nbytes=3.0)
    limits = Limits(4, None, 2.0)
    assert found(line, limits) == lightest_of_all(line, limits)


def test_a_branch_that_no_chain_of_the_sorted_nodes_can_cut(monkeypatch):
    """Nodes 0 2 | 1 3, sorted as 0 1 2 3: two stages of 2 need another order."""
    from hpc3d.partition.atom_graph import Atom, Graph, Value

    atoms = [Atom((number,), 1.0, 0.0) for number in range(4)]
    graph = Graph(atoms, [Value(0, (2,), 9.0), Value(1, (3,), 9.0)])
    limits = Limits(2, None, 1.0)
    assert found(graph, limits) == 2
    monkeypatch.setattr(downsets, "MOST_WORK", 0)
    assert found(graph, limits) > 2


def test_fewest_stages_of_equal_load():
    assert len(lightest(cuts_of(chain((9, 1, 1))), Limits(3))) == 2


def test_nothing_fits():
    graph = random_graph(1)
    assert lightest(cuts_of(graph), Limits(4, memory=0.5)) is None


def test_what_was_received_needs_room_too():
    """Two nodes of 3 s and 4 bytes between them: the second holds these for a microbatch."""
    cuts = cuts_of(chain((3, 3), nbytes=4.0))
    assert lightest(cuts, Limits(2, memory=3.0)) == [1, 2]
    assert lightest(cuts, Limits(2, memory=4.0, keeps_received=True)) == [1, 2]
    assert lightest(cuts, Limits(2, memory=3.0, keeps_received=True)) == [2]
