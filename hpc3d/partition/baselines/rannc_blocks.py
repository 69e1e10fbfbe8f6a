"""RaNNC's blocks: the atoms of a graph are merged into at most 32 groups of adjacent atoms.

The algorithm follows M. Tanaka et al., arXiv:2103.16063, and nict-wisdom/rannc,
src/graph/Partitioner.cpp. Coarsening merges adjacent groups to save communication, unless the
merged group would be much slower than the others. Uncoarsening moves units between adjacent
groups. Compaction sorts the groups topologically and merges the fastest group with a neighbor
until at most 32 remain. All groups are convex and fit in memory. RaNNC measures the time of a
merged group; this module adds the times of its atoms instead.
"""

from __future__ import annotations

from collections import defaultdict
from statistics import fmean, pstdev

import networkx as nx

from hpc3d.partition.atom_graph import Graph

MOST_BLOCKS = 32
# Coarsening stops at _FEWEST groups. RaNNC measures a merged group only if at most
# _MOST_MEASURED groups are left.
_FEWEST, _MOST_MEASURED = 5, 200
_SPREAD = 2  # maximum time of a merged group, in standard deviations above the mean


def blocks(graph: Graph, memory: float, bandwidth: float) -> list[list[int]]:
    """Return the atom indices of each block; the blocks are in topological order.

    Merged groups need at most `memory` bytes. Values are sent at `bandwidth` bytes/s.
    """
    groups = _Groups(graph, memory, bandwidth)
    levels = [groups.members()]
    while len(levels[-1]) > _FEWEST:
        groups.merge_neighbours()
        levels.append(groups.members())
        if len(levels[-1]) == len(levels[-2]):
            break
    for finer in reversed(levels[:-1]):
        groups.settle(finer)
    return groups.compacted()


class _Groups:
    """Groups of atoms and the values passed between groups.

    A group is identified by the index of one of its atoms.
    """

    def __init__(self, graph, memory, bandwidth):
        self.graph, self.memory, self.bandwidth = graph, memory, bandwidth
        self.atoms = {number: {number} for number in range(len(graph))}
        self.seconds = {n: each.forward + each.backward for n, each in enumerate(graph.atoms)}
        self.of = {number: number for number in range(len(graph))}
        self.made, self.read = defaultdict(list), defaultdict(list)
        for value in graph.values:
            self.made[value.source].append(value)
            for target in value.targets:
                self.read[target].append(value)
        self.after = {number: self._readers(number) for number in self.atoms}

    def members(self):
        return [frozenset(atoms) for atoms in self.atoms.values()]

    def _readers(self, group):
        """Return a dict that maps each reader of `group` to the number of bytes it reads."""
        found = defaultdict(float)
        for atom in self.atoms[group]:
            for value in self.made[atom]:
                for reader in {self.of[target] for target in value.targets} - {group}:
                    found[reader] += value.nbytes
        return found

    def merge_neighbours(self):
        """Merge each group with at most one group that reads from it, fastest groups first."""
        weights = self.seconds.values()
        most = fmean(weights) + _SPREAD * pstdev(weights)
        measured, free = len(self.atoms) <= _MOST_MEASURED, set(self.atoms)
        for group in sorted(self.atoms, key=self.seconds.get):
            if group not in free:
                continue
            best, gain = None, 0.0
            for other, nbytes in self.after[group].items():
                merged = self._merged(group, other, most, measured) if other in free else None
                if merged is not None and merged + nbytes / self.bandwidth >= gain:
                    best, gain = other, merged + nbytes / self.bandwidth
            free.discard(group)
            if best is not None:
                free.discard(best)
                self.seconds[group] += self.seconds.pop(best)
                self._regroup(self.atoms.pop(best), group)
                del self.after[best]

    def _merged(self, group, other, most, measured):
        """Return the compute time in s saved by merging two groups, or `None` if not allowed."""
        one, two = self.seconds[group], self.seconds[other]
        if max(one, two) > most or (measured and one + two > most):
            return None
        if measured and not self._fits(self.atoms[group] | self.atoms[other]):
            return None
        if self._other_way(group, other):
            return None
        return 0.0 if measured else one + two

    def _other_way(self, group, other):
        """Return True if a path leads from `group` to `other` through a third group."""
        last = max(self.atoms[other])
        todo = [each for each in self.after[group] if each != other]
        seen = {*todo}
        while todo:
            here = todo.pop()
            if here == other:
                return True
            if min(self.atoms[here]) > last:  # no path from here leads to `other`
                continue
            new = {*self.after[here]} - seen
            seen |= new
            todo += new
        return False

    def _fits(self, atoms):
        """Return True if a group of atoms fits in memory.

        The group needs memory for weights, gradients, optimizer moments, the saved activations of
        one microbatch, and the values sent and received.
        """
        members = sum(1 << atom for atom in atoms)
        kept = self.graph.total("memory", members) + self.graph.total("saved", members)
        return kept + self._over_borders(atoms, atoms) <= self.memory

    def _over_borders(self, atoms, inside):
        """Return the total size in bytes of values passed between `atoms` and other atoms.

        Values whose source and targets are all in `inside` are not counted.
        """
        values = {id(v): v for a in atoms for v in (*self.made[a], *self.read[a])}
        return sum(v.nbytes for v in values.values() if not {v.source, *v.targets} <= inside)

    def _regroup(self, moving, group):
        self.atoms[group] |= moving
        self.of |= dict.fromkeys(moving, group)
        sources = {self.of[v.source] for atom in self.atoms[group] for v in self.read[atom]}
        for each in {group, *sources}:
            self.after[each] = self._readers(each)

    def settle(self, finer):
        """Move units (groups of a finer level) between adjacent groups to reduce communication."""
        for unit in finer:
            here = self.of[min(unit)]
            if len(self.atoms[here]) == len(unit):
                continue
            crossing = self._crossing(unit, here)
            for there in self._sides(unit):
                spared = crossing - self._crossing(unit, there)
                if spared > 0 and self._fits(self.atoms[there] | unit):
                    self._move(unit, here, there)
                    break

    def _sides(self, unit):
        """Return the groups to which a unit may be moved.

        The candidates are the group that contains all readers of the unit's values, and the group
        that contains all producers of the values read by the unit, if such groups exist.
        """
        ahead = {self.of[t] for a in unit for v in self.made[a] for t in {*v.targets} - unit}
        behind = {self.of[v.source] for a in unit for v in self.read[a] if v.source not in unit}
        return [min(side) for side in (ahead, behind) if len(side) == 1]

    def _crossing(self, unit, group):
        """Return the bytes that a unit would send and receive if it were in `group`."""
        return self._over_borders(unit, unit | self.atoms[group])

    def _move(self, unit, here, there):
        spent = sum(self.graph.atoms[a].forward + self.graph.atoms[a].backward for a in unit)
        self.atoms[here] -= unit
        self.seconds[here] -= spent
        self.seconds[there] += spent
        self._regroup(unit, there)
        self._regroup(set(), here)

    def compacted(self):
        """Merge topologically adjacent groups, fastest first; return the atoms of each block."""
        edges = nx.DiGraph()
        edges.add_nodes_from(self.atoms)
        edges.add_edges_from((one, two) for one in self.atoms for two in self.after[one])
        order = nx.lexicographical_topological_sort(edges, key=lambda n: min(self.atoms[n]))
        found = [(self.seconds[group], self.atoms[group]) for group in order]
        while len(found) > MOST_BLOCKS:
            index = min(range(len(found)), key=lambda n: found[n][0])
            pairs = [n for n in (index - 1, index) if 0 <= n < len(found) - 1]
            start = min(pairs, key=lambda n: found[n][0] + found[n + 1][0])
            (one, left), (two, right) = found[start : start + 2]
            if not self._fits(left | right):
                break
            found[start : start + 2] = [(one + two, left | right)]
        return [sorted(atoms) for _, atoms in found]
