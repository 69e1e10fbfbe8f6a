"""Read a cost-annotated graph for `python -m hpc3d.partition --graph COSTS.json`.

    {"nodes": [{"id", "forward", "backward", "memory", "saved", "parameters"}],
     "edges": [{"from", "to", "bytes"}],
     "together": [[ids]]}

Times are in seconds per microbatch, and sizes in bytes; missing values are 0. Edges from the same
node with equal "bytes" represent one value with several readers, unless their "value" keys differ.
All nodes of a group in "together" are placed on the same stage.
"""

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Annotated

from pydantic import Field, TypeAdapter, ValidationError

from hpc3d.console import small_files
from hpc3d.console.sanitize import Problems, as_written
from hpc3d.partition.atom_graph import Atom, Graph, Value, contracted

MOST_NODES, _MOST_LINES = 100_000, 20
_MOST = 1e30  # maximum time in seconds or size in bytes, so that sums remain finite
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
    source: Annotated[str | int, Field(alias="from")]
    target: Annotated[str | int, Field(alias="to")]
    bytes: float = 0.0
    value: str | int | None = None


@dataclass
class _CostFile:
    __pydantic_config__ = _STRICT
    nodes: list[Node]
    edges: list[Edge] = field(default_factory=list)
    together: list[list[str | int]] = field(default_factory=list)


def load(path: Path) -> Graph:
    """Read a graph from a JSON file; raise ValueError with one line per problem found."""
    text = small_files.read(path, small_files.MOST_JSON)
    try:
        found = TypeAdapter(_CostFile).validate_json(text, strict=True)
    except ValidationError as errors:
        lines = dict.fromkeys(map(_explained, errors.errors()))
        raise Problems([f"{path}: {line}" for line in [*lines][:_MOST_LINES]]) from None
    problems = [*_wrong(found)]
    if problems:
        raise Problems([f"{path}: {line}" for line in problems[:_MOST_LINES]])
    index_of = {node.id: number for number, node in enumerate(found.nodes)}
    atoms = [Atom((node.id,), *(getattr(node, name) for name in _NUMBERS)) for node in found.nodes]
    readers = defaultdict(list)
    for edge in found.edges:
        readers[index_of[edge.source], edge.bytes, edge.value].append(index_of[edge.target])
    values = [Value(source, tuple(to), nbytes) for (source, nbytes, _), to in readers.items()]
    return contracted(
        atoms, values, [[index_of[name] for name in group] for group in found.together]
    )


def _explained(error):
    """Return a one-line message for a pydantic error.

    pydantic reports an id of the wrong type as two errors (not a string, not an integer). Both get
    the same message, so that the caller can drop duplicates.
    """
    where = [part for part in error["loc"] if part not in ("str", "int")]
    key = ".".join(f"{part!s:.60}" for part in where) or "graph"
    known = {
        "json_invalid": f"not valid JSON: {error.get('ctx', {}).get('error', '')}",
        "unexpected_keyword_argument": f"{key}: unknown key; remove it",
        "missing": f"{key} is missing",
        "dataclass_type": f"{key}: must be a JSON object, {{...}}",
    }
    if error["loc"][-1:] in (("str",), ("int",)):
        return f"{key}: must be a string or an integer"
    reason = error["msg"][0].lower() + error["msg"][1:]
    return known.get(error["type"], f"{key}: {reason}, not {as_written(error['input']):.60}")


def _wrong(found):
    if not found.nodes:
        yield "the graph has no nodes; add at least one"
    if len(found.nodes) > MOST_NODES:
        yield (
            f"the graph has {len(found.nodes)} nodes, more than the limit of {MOST_NODES}; "
            "combine several operations into one node"
        )
    known = Counter(node.id for node in found.nodes)
    for name, count in known.items():
        if count > 1:
            yield f"node {name!r:.60} appears {count} times; give each node a unique id"
    for node in found.nodes:
        for name in _NUMBERS:
            yield from _not_a_cost(f"node {node.id!r}: {name}", getattr(node, name))
    for edge in found.edges:
        yield from _wrong_edge(edge, known)
    for name in chain.from_iterable(found.together):
        if name not in known:
            yield f"together: no node has the id {name!r:.60}"


def _wrong_edge(edge, known):
    where = f"edge from {edge.source!r} to {edge.target!r}"
    for end in (edge.source, edge.target):
        if end not in known:
            yield f"{where}: no node has the id {end!r}"
    if edge.source == edge.target:
        yield f"{where}: a node must not read its own result; remove this edge"
    yield from _not_a_cost(f"{where}: bytes", edge.bytes)


def _not_a_cost(what, value):
    if not 0 <= value <= _MOST:
        yield f"{what} = {value!r:.30}: must be a number from 0 to {_MOST:g}"
