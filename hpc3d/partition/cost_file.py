"""A graph with costs as JSON, for `python -m hpc3d.partition --graph COSTS.json`:

    {"nodes": [{"id", "forward", "backward", "memory", "saved", "parameters"}],
     "edges": [{"from", "to", "bytes"}],
     "together": [[ids]]}

Seconds of a microbatch, and bytes; what is absent is 0.  Edges from one node with equal bytes are
one value with several readers, unless their "value" tells them apart.  A group in "together" stays
on one stage.
"""

import json
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from itertools import chain
from math import isfinite
from pathlib import Path

from hpc3d import files
from hpc3d.partition.atom_graph import Atom, Graph, Value, contracted
from hpc3d.plain import Problems

MOST_NODES, _MOST_LINES = 100_000, 20
_STRICT = {"extra": "forbid"}
_NUMBERS = ("forward", "backward", "memory", "saved", "parameters")


@dataclass
class Node:
    __pydantic_config__ = _STRICT
    id: str | int
    forward: float = 0.0
    backward: float = 0.0
    memory: float = 0.0
    saved: float = 0.0
    parameters: float = 0.0


@dataclass
class Edge:
    __pydantic_config__ = _STRICT
    source: str | int
    target: str | int
    bytes: float = 0.0
    value: str | int | None = None


@dataclass
class _CostFile:
    __pydantic_config__ = _STRICT
    nodes: list[Node]
    edges: list[Edge] = field(default_factory=list)
    together: list[list[str | int]] = field(default_factory=list)


def load(path: Path) -> Graph:
    """The Graph of a file; ValueError with one line for everything that is wrong with it."""
    found = _parsed(path)
    problems = [*_wrong(found)]
    if problems:
        raise Problems([f"{path}: {line}" for line in problems[:_MOST_LINES]])
    place = {node.id: number for number, node in enumerate(found.nodes)}
    atoms = [Atom((node.id,), *(getattr(node, name) for name in _NUMBERS)) for node in found.nodes]
    readers = defaultdict(list)
    for edge in found.edges:
        readers[place[edge.source], edge.bytes, edge.value].append(place[edge.target])
    values = [Value(source, tuple(to), nbytes) for (source, nbytes, _), to in readers.items()]
    return contracted(atoms, values, [[place[name] for name in group] for group in found.together])


def _parsed(path):
    from pydantic import TypeAdapter, ValidationError

    text = files.read(path, files.MOST_JSON)
    try:
        tree = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: no JSON: {error}") from None
    for edge in _edges_of(tree):
        for ours, theirs in (("source", "from"), ("target", "to")):
            if theirs in edge:
                edge[ours] = edge.pop(theirs)
    try:
        return TypeAdapter(_CostFile).validate_json(json.dumps(tree), strict=True)
    except ValidationError as errors:
        lines = [_explained(error) for error in errors.errors()[:_MOST_LINES]]
        raise Problems([f"{path}: {line}" for line in lines]) from None


def _explained(error):
    key = ".".join(str(part) for part in error["loc"] if part not in ("str", "int"))
    if error["type"] == "unexpected_keyword_argument":
        return f"{key}: unknown key; take it out"
    if error["type"] == "missing":
        return f"{key}: lacks it"
    reason = error["msg"][0].lower() + error["msg"][1:]
    return f"{key or 'it'}: {reason}, not {error['input']!r:.60}"


def _edges_of(tree):
    edges = tree.get("edges") if isinstance(tree, dict) else None
    return [edge for edge in edges if isinstance(edge, dict)] if isinstance(edges, list) else []


def _wrong(found):
    if not found.nodes:
        yield "it has no nodes: name at least one"
    if len(found.nodes) > MOST_NODES:
        yield f"{len(found.nodes)} nodes: at most {MOST_NODES}; group operations"
    known = Counter(node.id for node in found.nodes)
    for name, count in known.items():
        if count > 1:
            yield f"node {name!r} is there {count} times: give each its own id"
    for node in found.nodes:
        for name in _NUMBERS:
            yield from _not_a_cost(f"node {node.id!r}: {name}", getattr(node, name))
    for edge in found.edges:
        yield from _wrong_edge(edge, known)
    for name in chain.from_iterable(found.together):
        if name not in known:
            yield f"together: there is no node {name!r}"


def _wrong_edge(edge, known):
    where = f"edge from {edge.source!r} to {edge.target!r}"
    for end in (edge.source, edge.target):
        if end not in known:
            yield f"{where}: there is no node {end!r}"
    if edge.source == edge.target:
        yield f"{where}: a node does not read its own result; take it out"
    yield from _not_a_cost(f"{where}: bytes", edge.bytes)


def _not_a_cost(what, value):
    if not (isfinite(value) and value >= 0):
        yield f"{what} = {value!r}: must be a number, 0 or more"
