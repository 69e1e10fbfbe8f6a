"""The places where a graph may be cut: its downsets, each the atoms before a border.

`Downsets` has all of them.  Where these are too many, `Chain` has those of one sorted order, the
first 0, 1, 2 ... atoms.  Both know by downset the sums over its atoms (`forward`, `backward`,
`saved`) and `crossing`, the bytes of the values that cross the border behind it; and of a stage
between two downsets the bytes that are `fixed` there and those `trained`.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from hpc3d.partition.atom_graph import Graph, bits

MOST_WORK = 5e9  # pairs of downsets, times values: some tens of seconds
_MOST_DOWNSETS = 5_000


def cuts_of(graph: Graph) -> Downsets | Chain:
    """All downsets of a graph, or where pairs of them are too many its chain."""
    most = int((MOST_WORK / (1 + len(graph.values))) ** 0.5)
    found = graph.downsets(min(most, _MOST_DOWNSETS))
    return Chain(graph) if found is None else Downsets(graph, found)


class _Stages:
    """Sums over the atoms between two downsets, in which a weight that several of them read counts
    once: all readers in the stage but one are taken off."""

    def _count(self, graph, members):
        """By downset: sums of what is held, and how many of its atoms have each shared weight."""
        self._memory, self._parameters = (
            self._sum(graph, name) for name in ("memory", "parameters")
        )
        readers = np.zeros((len(graph), len(graph.shared)))
        for column, each in enumerate(graph.shared):
            readers[list(each.atoms), column] = 1
        self._readers = members(readers)
        self._shared = np.array([each[1:] for each in graph.shared]).reshape(-1, 2)

    def fixed(self, before: int, after: int | np.ndarray) -> float | np.ndarray:
        """Bytes that the stage holds always."""
        return self._memory[after] - self._memory[before] - self._again(before, after, 0)

    def trained(self, before: int, after: int | np.ndarray) -> float | np.ndarray:
        """Bytes of its parameters."""
        return self._parameters[after] - self._parameters[before] - self._again(before, after, 1)

    def _again(self, before, after, column):
        if not len(self._shared):
            return 0.0
        readers = self._readers[after] - self._readers[before]
        return np.maximum(0.0, readers - 1) @ self._shared[:, column]


class Downsets(_Stages):
    """All downsets, by size."""

    exact = True

    def __init__(self, graph: Graph, downsets: list[int]):
        self.downsets, self.count = downsets, len(downsets)
        self.members = np.zeros((self.count, len(graph)), bool)
        for row, downset in zip(self.members, downsets, strict=True):
            row[list(bits(downset))] = True
        self.forward, self.backward = self._sum(graph, "forward"), self._sum(graph, "backward")
        self.saved = self._sum(graph, "saved")
        self._count(graph, lambda columns: self.members @ columns)
        readers = np.zeros((len(graph.values), len(graph)))
        for row, value in zip(readers, graph.values, strict=True):
            row[list(value.targets)] = 1
        self.nbytes = np.array([value.nbytes for value in graph.values], float)
        self.made = self.members[:, [value.source for value in graph.values]]
        self.read = self.members @ readers.T  # how many readers of a value are before the border
        self.open = self.made & (self.read < readers.sum(1))
        self.crossing = self.open @ self.nbytes

    def _sum(self, graph, name):
        return self.members @ np.array([getattr(atom, name) for atom in graph.atoms], float)

    def after(self, before: int) -> np.ndarray:
        """The numbers of the downsets that hold more than this one."""
        rest = np.arange(before + 1, self.count)
        return rest[self.members[rest][:, self.members[before]].all(1)]

    def between(self, before: int, after: int) -> np.ndarray:
        """The numbers of the downsets that hold more than the one and less than the other."""
        found = self.after(before)
        return found[(found < after) & (self.members[after] | ~self.members[found]).all(1)]

    def moved(self, before: int, after: np.ndarray) -> np.ndarray:
        """Bytes of the values that enter and that leave a stage between two downsets."""
        leaving = self.open[after] & ~self.made[before]
        return self.entering(before, after) + leaving @ self.nbytes

    def entering(self, before: int, after: np.ndarray) -> np.ndarray:
        """Bytes of the values that a stage between two downsets reads from others."""
        return (self.made[before] & (self.read[after] > self.read[before])) @ self.nbytes

    def stage(self, before: int, after: int) -> int:
        """The set of atoms between two downsets."""
        return self.downsets[after] & ~self.downsets[before]


class Chain(_Stages):
    """The first 0, 1, 2 ... atoms; of these also the sums `weight`, and by atom `working`."""

    exact = False

    def __init__(self, graph: Graph):
        self.count = len(graph) + 1
        self.forward, self.backward = self._sum(graph, "forward"), self._sum(graph, "backward")
        self.saved, self.weight = self._sum(graph, "saved"), self._sum(graph, "weight")
        self.working = np.array([atom.working for atom in graph.atoms])
        self._count(graph, _running)
        reads = []  # of a value: who read it before or made it, who reads it next, bytes
        for value in graph.values:
            reads += [(*ends, value.nbytes) for ends in pairwise((value.source, *value.targets))]
        self.earlier, self.reader, self.nbytes = np.array(reads or [(0, 0, 0.0)]).T
        ends = [(value.source, value.targets[-1], value.nbytes) for value in graph.values]
        self.source, self.last, self.size = np.array(ends or [(0, 0, 0.0)]).T
        self.crossing = self._leaving(0)

    def _sum(self, graph, name):
        return _running(np.array([getattr(atom, name) for atom in graph.atoms], float))

    def _leaving(self, before):
        """By the end of a stage that begins there: the bytes of what it made and others read."""
        made = self.source >= before
        ends = np.concatenate([self.source[made] + 1, self.last[made] + 1]).astype(int)
        weights = np.concatenate([self.size[made], -self.size[made]])
        return np.cumsum(np.bincount(ends, weights, self.count + 1))[: self.count]

    def after(self, before: int) -> np.ndarray:
        return np.arange(before + 1, self.count)

    def between(self, before: int, after: int) -> np.ndarray:
        return np.arange(before + 1, after)

    def moved(self, before: int, after: np.ndarray) -> np.ndarray:
        return self.entering(before, after) + self._leaving(before)[after]

    def entering(self, before: int, after: np.ndarray) -> np.ndarray:
        first = (self.earlier < before) & (self.reader >= before)  # to read it in the stage
        ends, weights = self.reader[first].astype(int) + 1, self.nbytes[first]
        return np.cumsum(np.bincount(ends, weights, self.count + 1))[after]

    def stage(self, before: int, after: int) -> int:
        return (1 << int(after)) - (1 << int(before))


def _running(columns):
    """Sums of the first 0, 1, 2 ... rows."""
    return np.concatenate([np.zeros((1, *columns.shape[1:])), np.cumsum(columns, 0)])
