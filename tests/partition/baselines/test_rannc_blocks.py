"""RaNNC's blocks: invariants for any graph, and the order of merges."""

import pytest

pytest.importorskip("networkx")

from hpc3d.partition.atom_graph import Atom, Graph, Value
from hpc3d.partition.baselines import rannc_blocks
from hpc3d.partition.baselines.rannc_blocks import MOST_BLOCKS, blocks
from tests.partition.graphs import chain, random_graph

ANY = 1e30


def chained(seconds, nbytes):
    """Return atoms with these seconds, and with bytes between them."""
    atoms = [Atom((number,), each, 0.0) for number, each in enumerate(seconds)]
    return Graph(atoms, [Value(number, (number + 1,), each) for number, each in enumerate(nbytes)])


@pytest.mark.parametrize("seed", range(30))
def test_values_only_flow_forward_between_blocks(seed):
    graph = random_graph(seed, most=40, dense=0.1)
    found = blocks(graph, ANY, 1.0)
    block = {atom: number for number, atoms in enumerate(found) for atom in atoms}
    assert sorted(block) == [*range(len(graph))]
    for value in graph.values:
        assert all(block[value.source] <= block[target] for target in value.targets)


def test_number_of_blocks_is_limited():
    graph = chain(range(1, 301), nbytes=1.0)
    found = blocks(graph, ANY, 1.0)
    assert 5 < len(found) <= MOST_BLOCKS
    times = [sum(graph.atoms[atom].forward for atom in atoms) for atoms in found]
    assert max(times) < 3 * sum(times) / len(times)


def test_widest_value_is_merged_first():
    """Atom 1 of 7 may join 0 or 2; atom 2 receives more."""
    found = blocks(chained([9, 1, 9, 9, 9, 9, 9], [3, 5, 0, 0, 0, 0]), ANY, 1.0)
    assert [1, 2] in found


def test_heaviest_neighbor_is_merged_first_among_many_groups():
    """Atom 0 has no inputs and is read by 1 and 2; pairs of the others are merged, too. After
    that, nothing is merged, because nothing fits."""
    loads = [0.5, 1.2, 1.0, *(201 * [0.6, 1.4])]
    values = [Value(0, (1,), 0.0), Value(0, (2,), 0.0)]
    values += [Value(n, (n + 1,), 0.0) for n in range(3, len(loads), 2)]
    graph = Graph([Atom((n,), load, 0.0, 1.0) for n, load in enumerate(loads)], values)
    found = blocks(graph, 1.5, 1.0)
    assert [0, 1] in found and [2] in found


def test_groups_that_do_not_fit_stay_separate():
    """One, two or four atoms of 6 bytes each fit."""
    graph = chain([1.0, 5.0] * 6)
    heavy = Graph([atom._replace(memory=6.0) for atom in graph.atoms], graph.values)
    for memory, atoms in ((8.0, 1), (12.0, 2)):
        assert [*map(len, blocks(heavy, memory, 1.0))] == 12 // atoms * [atoms]


def crossing(graph, found):
    block = {atom: number for number, atoms in enumerate(found) for atom in atoms}
    return sum(
        value.nbytes
        for value in graph.values
        if any(block[target] != block[value.source] for target in value.targets)
    )


def test_block_boundaries_move_to_reduce_traffic(monkeypatch):
    graphs = [random_graph(seed, most=40, dense=0.1) for seed in range(20)]
    moved = [crossing(graph, blocks(graph, ANY, 1.0)) for graph in graphs]
    monkeypatch.setattr(rannc_blocks._Groups, "settle", lambda self, finer: None)
    still = [crossing(graph, blocks(graph, ANY, 1.0)) for graph in graphs]
    assert all(a <= b for a, b in zip(moved, still)) and sum(moved) < sum(still)
