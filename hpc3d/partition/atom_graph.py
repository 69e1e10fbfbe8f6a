"""The graph that is cut: atoms, which are never cut themselves, and the values between them.

Atoms lie in a topological order.  A set of atoms is an int with a bit per atom.  A partition into
stages is convex: no path leaves a stage and comes back, so that stages can be put in an order in
which values only flow forward; the stages up to any one are a *downset*, closed under inputs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

import networkx as nx


class Atom(NamedTuple):
    """One or more operations, by their `ids`, that stay together.

    Seconds of a microbatch forward and backward, of which `weight` for the gradients of weights;
    bytes: `memory` that its stage holds for it always, `saved` for every microbatch in flight,
    `parameters` that replicas sum gradients of, `working` while one of its operations runs.
    `pieces` are the numbers of its pieces in a captured module, `fed` the bytes of a sample in
    the model's inputs that they read.
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
    """What atom `source` hands to the atoms `targets` in a microbatch, in bytes: once to each
    stage that has one of them.  So many bytes of what the source has `saved` are saved for the
    first target: not in a stage that ends before it."""

    source: int
    targets: tuple[int, ...]
    nbytes: float
    saved: float = 0.0


class Shared(NamedTuple):
    """What each of several `atoms` counts as its own, and a stage with some of them holds once: a
    weight, in bytes of `memory` and `parameters`, or an input (`fed`)."""

    atoms: tuple[int, ...]
    memory: float
    parameters: float
    fed: float = 0.0


class Graph:
    """Atoms in a topological order, the values between them, and the weights that they share."""

    def __init__(
        self, atoms: Sequence[Atom], values: Sequence[Value], shared: Sequence[Shared] = ()
    ):
        self.atoms, self.values, self.shared = tuple(atoms), tuple(values), tuple(shared)
        self.inputs = [0] * len(self.atoms)  # by atom: the set of atoms that it reads from
        for value in self.values:
            for target in value.targets:
                self.inputs[target] |= 1 << value.source

    def __len__(self) -> int:
        return len(self.atoms)

    @property
    def everything(self) -> int:
        return (1 << len(self)) - 1

    def ids(self, members: int) -> list:
        """The ids of a set of atoms."""
        return [name for atom in bits(members) for name in self.atoms[atom].ids]

    def total(self, name: str, members: int) -> float:
        """The sum of a number of some atoms, with what they share once."""
        found = sum(getattr(self.atoms[atom], name) for atom in bits(members))
        for each in self.shared if name in Shared._fields else ():
            readers = sum(members >> atom & 1 for atom in each.atoms)
            found -= max(0, readers - 1) * getattr(each, name)
        return found

    def bytes_in(self, members: int) -> float:
        """Of the values that a stage receives."""
        return sum(
            value.nbytes
            for value in self.values
            if not members >> value.source & 1 and _any_in(value.targets, members)
        )

    def bytes_out(self, members: int) -> float:
        """Of the values that a stage sends, each once."""
        return sum(
            value.nbytes
            for value in self.values
            if members >> value.source & 1 and _any_in(value.targets, ~members)
        )

    def ordered(self, order: Sequence[int]) -> Graph:
        """The same graph with its atoms in another topological order."""
        place = {atom: number for number, atom in enumerate(order)}
        shared = [
            each._replace(atoms=tuple(sorted(map(place.get, each.atoms)))) for each in self.shared
        ]
        values = [*_between(self.values, place)]
        return Graph([self.atoms[atom] for atom in order], values, shared)

    def downsets(self, limit: int) -> list[int] | None:
        """All downsets, the empty one first, by size; None if there are more than `limit`."""
        return _downsets(tuple(self.inputs), limit)


@lru_cache(maxsize=4)  # one graph with other costs is asked again
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
    """The atoms of a set, ascending."""
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
    """The Graph in which every group of atoms is one, with whatever lies on a path from a group
    back into it: a convex stage that has the one has the other.

    Atoms may come in any order, and cycles of them become one atom, too.
    """
    edges = nx.DiGraph()
    edges.add_nodes_from(range(len(atoms)))
    edges.add_edges_from((value.source, target) for value in values for target in value.targets)
    for group in together:
        nx.add_cycle(edges, group)
    parts = nx.condensation(edges)
    members = {part: sorted(parts.nodes[part]["members"]) for part in parts}
    order = [*nx.lexicographical_topological_sort(parts, key=members.get)]
    place = {atom: number for number, part in enumerate(order) for atom in members[part]}
    merged = [_as_one([atoms[atom] for atom in members[part]]) for part in order]
    still = _shared_by_several(shared, place, merged)
    return Graph(merged, [*_between(values, place)], still)


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


def _shared_by_several(shared, place, merged):
    """What is still shared by the atoms at new places; what one of them counts several times is
    taken out of it."""
    found = []
    for each in shared:
        readers = Counter(place[atom] for atom in each.atoms)
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


def _between(values, place):
    """Values by the places of their ends, without those that stay within one atom."""
    for value in values:
        source = place[value.source]
        targets = sorted({place[target] for target in value.targets} - {source})
        if targets:
            yield value._replace(source=source, targets=tuple(targets))
