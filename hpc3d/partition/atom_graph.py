"""Directed graph of indivisible atoms and of the values passed between them.

Atoms are in topological order. A set of atoms is represented by an int with one bit per atom. Each
stage of a partition is convex: no path leaves the stage and returns to it. The stages can
therefore be ordered so that values only flow forward. The union of the first s stages is a
*downset*: a set that contains all predecessors of each of its atoms.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

import networkx as nx


class Atom(NamedTuple):
    """Indivisible node: one or more operations (`ids`) that are assigned to the same stage.

    `forward` and `backward` are seconds per microbatch; `weight` is the part of `backward`, in
    seconds, spent on weight gradients. Sizes are in bytes: `memory` is resident on the stage,
    `saved` is stored for each microbatch in flight, `parameters` is the size of the parameters
    whose gradients the replicas reduce, and `working` is temporary memory for running one of the
    operations. `pieces` contains the indices of the atom's pieces in the captured module, and
    `fed` is the size per sample of the model inputs read by these pieces.
    """

    ids: tuple
    forward: float
    backward: float
    memory: float = 0.0
    saved: float = 0.0
    parameters: float = 0.0
    weight: float = 0.0
    working: float = 0.0
    pieces: tuple[int, ...] = ()
    fed: float = 0.0


class Value(NamedTuple):
    """Output of atom `source` that is read by the atoms `targets`.

    `nbytes` is the size per microbatch; the value is sent once to each stage that contains a
    target. `saved` is the size in bytes of the source's activations that only the targets need in
    the backward pass. A stage that ends before the first target does not store them.
    """

    source: int
    targets: tuple[int, ...]
    nbytes: float
    saved: float = 0.0


class Shared(NamedTuple):
    """Weight or model input that is read by several `atoms`.

    The costs of each of these atoms already include the tensor: `memory` and `parameters` for a
    weight, `fed` for an input (in bytes). A stage that contains several of these atoms stores only
    one copy of the tensor.
    """

    atoms: tuple[int, ...]
    memory: float
    parameters: float
    fed: float = 0.0


class Graph:
    """Graph of atoms in topological order, with the values passed between them and shared tensors.

    `shared` contains the weights and model inputs that several atoms read.
    """

    def __init__(
        self, atoms: Sequence[Atom], values: Sequence[Value], shared: Sequence[Shared] = ()
    ):
        self.atoms, self.values, self.shared = tuple(atoms), tuple(values), tuple(shared)
        self.inputs = [0] * len(self.atoms)  # bit sets of the direct predecessors
        for value in self.values:
            for target in value.targets:
                self.inputs[target] |= 1 << value.source

    def __len__(self) -> int:
        return len(self.atoms)

    @property
    def everything(self) -> int:
        return (1 << len(self)) - 1

    def ids(self, members: int) -> list:
        """Return the ids of all operations in a set of atoms."""
        return [name for atom in bits(members) for name in self.atoms[atom].ids]

    def total(self, name: str, members: int) -> float:
        """Return the sum of a field over a set of atoms, counting shared tensors only once."""
        found = sum(getattr(self.atoms[atom], name) for atom in bits(members))
        for each in self.shared if name in Shared._fields else ():
            readers = sum(members >> atom & 1 for atom in each.atoms)
            found -= max(0, readers - 1) * getattr(each, name)
        return found

    def bytes_in(self, members: int) -> float:
        """Return the total size in bytes of the values that a stage receives."""
        return sum(
            value.nbytes
            for value in self.values
            if not members >> value.source & 1 and _any_in(value.targets, members)
        )

    def bytes_out(self, members: int) -> float:
        """Return the total size in bytes of the values that a stage sends, each counted once."""
        return sum(
            value.nbytes
            for value in self.values
            if members >> value.source & 1 and _any_in(value.targets, ~members)
        )

    def ordered(self, order: Sequence[int]) -> Graph:
        """Return the same graph with its atoms rearranged into the topological order `order`."""
        new_index = {atom: number for number, atom in enumerate(order)}
        shared = [
            each._replace(atoms=tuple(sorted(map(new_index.get, each.atoms))))
            for each in self.shared
        ]
        values = [*_between(self.values, new_index)]
        return Graph([self.atoms[atom] for atom in order], values, shared)

    def downsets(self, limit: int) -> list[int] | None:
        """Return all downsets sorted by size, or `None` if there are more than `limit`."""
        return _downsets(tuple(self.inputs), limit)


@lru_cache(maxsize=4)  # cached, because graphs that differ only in costs have the same downsets
def _downsets(all_inputs, limit):
    found, last = [0], {0}
    while last:
        grown = {
            downset | 1 << atom
            for downset in last
            for atom, inputs in enumerate(all_inputs)
            if not downset >> atom & 1 and not inputs & ~downset
        }
        if len(found) + len(grown) > limit:
            return None
        found += sorted(grown)
        last = grown
    return found


def bits(members: int) -> Iterator[int]:
    """Yield the indices of the atoms in a set, in ascending order."""
    while members:
        lowest = members & -members
        yield lowest.bit_length() - 1
        members ^= lowest


def _any_in(targets, members):
    return any(members >> target & 1 for target in targets)


def contracted(
    atoms: Sequence[Atom],
    values: Sequence[Value],
    together: Iterable[Sequence[int]] = (),
    shared: Sequence[Shared] = (),
) -> Graph:
    """Return a graph in which each group in `together` is merged into one atom.

    Atoms on a path that leaves a group and returns to it are merged into the group, because every
    convex stage that contains the group also contains the path. Each cycle also becomes one atom.
    The input atoms may be in any order.
    """
    edges = nx.DiGraph()
    edges.add_nodes_from(range(len(atoms)))
    edges.add_edges_from((value.source, target) for value in values for target in value.targets)
    for group in together:
        nx.add_cycle(edges, group)
    parts = nx.condensation(edges)
    members = {part: sorted(parts.nodes[part]["members"]) for part in parts}
    order = [*nx.lexicographical_topological_sort(parts, key=members.get)]
    new_index = {atom: number for number, part in enumerate(order) for atom in members[part]}
    merged = [_as_one([atoms[atom] for atom in members[part]]) for part in order]
    still = _shared_by_several(shared, new_index, merged)
    return Graph(merged, [*_between(values, new_index)], still)


_SUMMED = ("forward", "backward", "memory", "saved", "parameters", "weight", "fed")


def _as_one(atoms):
    if len(atoms) == 1:
        return atoms[0]
    return Atom(
        ids=tuple(name for atom in atoms for name in atom.ids),
        working=max(atom.working for atom in atoms),
        pieces=tuple(piece for atom in atoms for piece in atom.pieces),
        **{name: sum(getattr(atom, name) for atom in atoms) for name in _SUMMED},
    )


def _shared_by_several(shared, new_index, merged):
    """Return the weights and inputs read by several atoms of the merged graph.

    If several members of a merged atom read the same tensor, the costs in `merged` are corrected
    to count the tensor only once.
    """
    found = []
    for each in shared:
        readers = Counter(new_index[atom] for atom in each.atoms)
        for number, times in readers.items():
            atom, more = merged[number], times - 1
            merged[number] = atom._replace(
                memory=atom.memory - more * each.memory,
                parameters=atom.parameters - more * each.parameters,
                fed=atom.fed - more * each.fed,
            )
        if len(readers) > 1:
            found.append(each._replace(atoms=tuple(sorted(readers))))
    return found


def _between(values, new_index):
    """Yield the values passed between merged atoms; drop values used only within one atom."""
    for value in values:
        source = new_index[value.source]
        targets = sorted({new_index[target] for target in value.targets} - {source})
        if targets:
            yield value._replace(source=source, targets=tuple(targets))
