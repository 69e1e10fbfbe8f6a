"""Places where a graph may be cut."""

import numpy as np
import pytest

from hpc3d.partition import downsets
from hpc3d.partition.atom_graph import Atom, Graph, Shared, Value
from hpc3d.partition.downsets import cuts_of
from tests.partition.graphs import partitions, random_graph

DIAMOND = [Value(0, (1, 2), 4.0), Value(1, (3,), 1.0), Value(2, (3,), 2.0)]


def atoms(count):
    return [Atom((name,), 1.0, 2.0, 3.0, 4.0, 5.0) for name in "abcdefgh"[:count]]


def test_downsets_of_a_diamond():
    graph = Graph(atoms(4), DIAMOND)
    assert graph.downsets(6) == [0, 0b0001, 0b0011, 0b0101, 0b0111, 0b1111]
    assert graph.downsets(5) is None


@pytest.mark.parametrize("seed", range(5))
def test_downsets_are_complete_and_closed_under_inputs(seed):
    graph = random_graph(seed)
    closed = {downset for (downset,) in partitions(graph, 1)}
    two = {pair[0] for pair in partitions(graph, 2)}
    assert {*graph.downsets(1 << len(graph))} == {0} | closed | two


@pytest.mark.parametrize("seed", range(10))
def test_cut_sums_and_bytes_match_a_recount(seed, monkeypatch):
    """The sums are recounted from the graph, value by value."""
    graph = random_graph(seed)
    shared = [Shared((0, 1, len(graph) - 1), 2.0, 1.0), Shared((0, 2), 1.0, 0.5)]
    graph = Graph(graph.atoms, graph.values, shared)
    for most in (downsets.MOST_WORK, 0):
        monkeypatch.setattr(downsets, "MOST_WORK", most)
        cuts = cuts_of(graph)
        assert cuts.exact == bool(most)
        for before in range(cuts.count - 1):
            held = cuts.stage(0, before) if before else 0
            assert cuts.forward[before] == graph.total("forward", held)
            assert cuts.crossing[before] == graph.bytes_out(held)
            after = cuts.after(before)
            stages = [cuts.stage(before, end) for end in after]
            moved = [graph.bytes_in(each) + graph.bytes_out(each) for each in stages]
            np.testing.assert_array_equal(cuts.moved(before, after), moved)
            for found, name in ((cuts.fixed, "memory"), (cuts.trained, "parameters")):
                held = [graph.total(name, each) for each in stages]
                np.testing.assert_allclose(found(before, after), held)
