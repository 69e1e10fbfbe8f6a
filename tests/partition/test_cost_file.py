"""Graphs in files: their contents, and an error message for each invalid entry."""

import json
import re

import pytest

from hpc3d.console.sanitize import lines_of
from hpc3d.partition import cost_file
from hpc3d.partition.atom_graph import Atom, Value
from hpc3d.partition.cost_file import load
from tests.elided import elided


def file_with(tmp_path, **tree):
    path = tmp_path / "costs.json"
    path.write_text(json.dumps(tree))
    return path


def nodes(*names):
    return [{"id": name, "forward": 1, "backward": 2.5} for name in names]


def edge(source, target, **rest):
    return {"from": source, "to": target, **rest}


def test_absent_costs_default_to_zero(tmp_path):
    graph = load(file_with(tmp_path, nodes=nodes("a", 1), edges=[edge("a", 1, bytes=8)]))
    assert graph.atoms == (Atom(("a",), 1.0, 2.5), Atom((1,), 1.0, 2.5))
    assert graph.values == (Value(0, (1,), 8.0),)


def test_edges_with_equal_bytes_are_one_value(tmp_path):
    edges = [edge("a", "b", bytes=8), edge("a", "c", bytes=8), edge("a", "d", bytes=4)]
    graph = load(file_with(tmp_path, nodes=nodes(*"abcd"), edges=edges))
    assert graph.values == (Value(0, (1, 2), 8.0), Value(0, (3,), 4.0))
    edges[1]["value"] = "another"
    graph = load(file_with(tmp_path, nodes=nodes(*"abcd"), edges=edges))
    assert [value.targets for value in graph.values] == [(1,), (2,), (3,)]


def test_together_groups_are_contracted(tmp_path):
    tree = {"nodes": nodes(*"abc"), "edges": [edge("a", "b")], "together": [["a", "c"]]}
    assert [atom.ids for atom in load(file_with(tmp_path, **tree)).atoms] == [("a", "c"), ("b",)]


WRONG = [
    ({"nodes": []}, "no nodes"),
    ({}, "nodes is missing"),
    ({"nodes": nodes("a", "a")}, "node 'a' ... 2 times"),
    ({"nodes": [{"id": "a", "forward": -1}]}, "node 'a': forward = -1.0: ... from 0"),
    ({"nodes": [{"id": "a", "forward": 1e999}]}, "node 'a': forward = inf"),
    ({"nodes": [{"id": "a", "forward": "long"}]}, "nodes.0.forward: ... 'long'"),
    ({"nodes": [{"id": "a", "seconds": 1}]}, "nodes.0.seconds: unknown key"),
    ({"nodes": [{"forward": 1}]}, "nodes.0.id is missing"),
    ({"nodes": nodes("a"), "edges": [edge("a", "b")]}, "from 'a' to 'b': ... id 'b'"),
    ({"nodes": nodes("a"), "edges": [edge("a", "a")]}, "from 'a' to 'a': ... remove this edge"),
    ({"nodes": nodes(*"ab"), "edges": [edge("a", "b", bytes=-4)]}, "bytes = -4.0"),
    ({"nodes": nodes("a"), "together": [["a", "z"]]}, "together: ... id 'z'"),
    ({"nodes": nodes("a"), "edges": 3}, "edges"),
    ({"nodes": nodes("a"), "edges": [{"from": "a"}]}, "edges.0.to is missing"),
    ({"nodes": nodes(1.5)}, "nodes.0.id: ... a string or an integer"),
    ({"nodes": [{"id": "a", "memory": 1e31}]}, "memory = 1e+31: ... 1e+30"),
]


@pytest.mark.parametrize(("tree", "expected"), WRONG, ids=[line for _, line in WRONG])
def test_invalid_cost_file_is_reported_in_one_line(tree, expected, tmp_path):
    path = file_with(tmp_path, **tree)
    with pytest.raises(ValueError) as raised:
        load(path)
    (line,) = lines_of(raised.value)
    assert line.startswith(f"{path}: ")
    assert re.search(elided(expected), line), line


def test_cost_file_must_be_json(tmp_path):
    path = tmp_path / "costs.json"
    path.write_text("{")
    with pytest.raises(ValueError, match="JSON"):
        load(path)
    with pytest.raises(ValueError, match=r"absent\.json"):
        load(tmp_path / "absent.json")


def test_too_many_nodes_are_rejected(tmp_path, monkeypatch):
    monkeypatch.setattr(cost_file, "MOST_NODES", 1)
    with pytest.raises(ValueError, match="more than the limit of 1;"):
        load(file_with(tmp_path, nodes=nodes(*"ab")))
