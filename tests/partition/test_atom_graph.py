"""Graphs of atoms, groups that stay together, and downsets."""

from hpc3d.partition.atom_graph import Atom, Graph, Value, bits, contracted
from tests.partition.graphs import chain

DIAMOND = [Value(0, (1, 2), 4.0), Value(1, (3,), 1.0), Value(2, (3,), 2.0)]


def atoms(count):
    return [Atom((name,), 1.0, 2.0, 3.0, 4.0, 5.0) for name in "abcdefgh"[:count]]


def test_bytes_count_a_value_once():
    graph = Graph(atoms(4), DIAMOND)
    assert graph.bytes_out(0b0001) == 4 and graph.bytes_in(0b0110) == 4
    assert graph.bytes_in(0b1000) == 3 and graph.bytes_out(0b0110) == 3
    assert graph.bytes_in(0b0100) == 4 and graph.bytes_out(0b1111) == 0


def test_atoms_in_any_order_are_sorted():
    shuffled = [Value(2, (0,), 1.0), Value(0, (1,), 1.0)]
    graph = contracted(atoms(3), shuffled)
    assert [atom.ids for atom in graph.atoms] == [("c",), ("a",), ("b",)]
    assert graph.values == (Value(1, (2,), 1.0), Value(0, (1,), 1.0))[::-1] or graph.values == (
        Value(0, (1,), 1.0),
        Value(1, (2,), 1.0),
    )


def test_a_group_takes_along_what_lies_between():
    graph = contracted(atoms(4), DIAMOND, [[0, 3]])
    assert [sorted(atom.ids) for atom in graph.atoms] == [["a", "b", "c", "d"]]
    assert graph.atoms[0][1:6] == (4.0, 8.0, 12.0, 16.0, 20.0) and not graph.values


def test_a_group_of_branches_leaves_the_rest():
    graph = contracted(atoms(4), DIAMOND, [[1, 2]])
    assert [atom.ids for atom in graph.atoms] == [("a",), ("b", "c"), ("d",)]
    assert graph.values == (Value(0, (1,), 4.0), Value(1, (2,), 1.0), Value(1, (2,), 2.0))


def test_groups_that_overlap_are_one():
    graph = contracted(atoms(5), [], [[0, 1], [1, 2]])
    assert [atom.ids for atom in graph.atoms] == [("a", "b", "c"), ("d",), ("e",)]


def test_a_cycle_is_one_atom():
    graph = contracted(atoms(3), [Value(0, (1,), 1.0), Value(1, (0, 2), 1.0)])
    assert [atom.ids for atom in graph.atoms] == [("a", "b"), ("c",)]


def test_ids_and_sums_of_a_set():
    graph = chain()
    assert graph.ids(0b1010) == [1, 3] and [*bits(0b1010)] == [1, 3]
    assert graph.total("forward", 0b111) == 21
