"""Graphs of atoms, groups that stay together, and downsets."""

from hpc3d.partition.atom_graph import Atom, Graph, Shared, Value, bits, contracted
from tests.partition.graphs import chain

DIAMOND = [Value(0, (1, 2), 4.0), Value(1, (3,), 1.0), Value(2, (3,), 2.0)]


def atoms(count):
    return [Atom((name,), 1.0, 2.0, 3.0, 4.0, 5.0) for name in "abcdefgh"[:count]]


def test_bytes_of_a_value_count_once():
    graph = Graph(atoms(4), DIAMOND)
    assert graph.bytes_out(0b0001) == 4 and graph.bytes_in(0b0110) == 4
    assert graph.bytes_in(0b1000) == 3 and graph.bytes_out(0b0110) == 3
    assert graph.bytes_in(0b0100) == 4 and graph.bytes_out(0b1111) == 0


def test_unsorted_atoms_are_sorted_topologically():
    shuffled = [Value(2, (0,), 1.0), Value(0, (1,), 1.0)]
    graph = contracted(atoms(3), shuffled)
    assert [atom.ids for atom in graph.atoms] == [("c",), ("a",), ("b",)]
    assert graph.values == (Value(1, (2,), 1.0), Value(0, (1,), 1.0))[::-1] or graph.values == (
        Value(0, (1,), 1.0),
        Value(1, (2,), 1.0),
    )


def test_contracted_group_includes_the_atoms_between():
    graph = contracted(atoms(4), DIAMOND, [[0, 3]])
    assert [sorted(atom.ids) for atom in graph.atoms] == [["a", "b", "c", "d"]]
    assert graph.atoms[0][1:6] == (4.0, 8.0, 12.0, 16.0, 20.0) and not graph.values


def test_contracted_branches_keep_the_other_atoms():
    graph = contracted(atoms(4), DIAMOND, [[1, 2]])
    assert [atom.ids for atom in graph.atoms] == [("a",), ("b", "c"), ("d",)]
    assert graph.values == (Value(0, (1,), 4.0), Value(1, (2,), 1.0), Value(1, (2,), 2.0))


def test_overlapping_groups_are_merged():
    graph = contracted(atoms(5), [], [[0, 1], [1, 2]])
    assert [atom.ids for atom in graph.atoms] == [("a", "b", "c"), ("d",), ("e",)]


def test_cycle_is_contracted_into_one_atom():
    graph = contracted(atoms(3), [Value(0, (1,), 1.0), Value(1, (0, 2), 1.0)])
    assert [atom.ids for atom in graph.atoms] == [("a", "b"), ("c",)]


def test_ids_and_totals_of_a_set_of_atoms():
    graph = chain()
    assert graph.ids(0b1010) == [1, 3] and [*bits(0b1010)] == [1, 3]
    assert graph.total("forward", 0b111) == 21


def test_shared_weights_count_once():
    graph = Graph(atoms(4), [], [Shared((0, 1, 3), 3.0, 2.0)])
    assert graph.total("memory", 0b1111) == 4 * 3 - 2 * 3
    assert graph.total("parameters", 0b0011) == 2 * 5 - 2
    assert graph.total("memory", 0b0101) == 2 * 3 and graph.total("saved", 0b1111) == 16


def test_sharing_ends_if_the_readers_are_contracted():
    shared = [Shared((0, 1), 3.0, 2.0), Shared((1, 2), 1.0, 1.0)]
    graph = contracted(atoms(3), [], [[0, 1]], shared)
    assert [atom.memory for atom in graph.atoms] == [3.0, 3.0]
    assert graph.shared == (Shared((0, 1), 1.0, 1.0),)
    assert graph.total("memory", 0b11) == 9 - 3 - 1


def test_contracted_atom_has_the_largest_workspace_and_all_pieces():
    several = [
        Atom(("a",), 1.0, 1.0, working=2.0, pieces=(0,)),
        Atom(("b",), 1.0, 1.0, weight=0.5),
    ]
    (one,) = contracted(several, [], [[0, 1]]).atoms
    assert (one.working, one.weight, one.pieces) == (2.0, 0.5, (0,))


def test_graph_can_be_reordered():
    graph = Graph(atoms(4), DIAMOND, [Shared((1, 3), 1.0, 1.0)]).ordered([0, 2, 1, 3])
    assert [atom.ids for atom in graph.atoms] == [("a",), ("c",), ("b",), ("d",)]
    assert graph.values == (Value(0, (1, 2), 4.0), Value(2, (3,), 1.0), Value(1, (3,), 2.0))
    assert graph.shared == (Shared((2, 3), 1.0, 1.0),)
