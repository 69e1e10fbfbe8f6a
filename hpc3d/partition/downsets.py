"""Cuts of a graph into stages. A cut is a downset: the set of all atoms before a stage boundary.

`Downsets` contains all downsets of a graph. If a graph has too many downsets, a `Chain` is used
instead. A `Chain` contains only the downsets that consist of the first 0, 1, 2 ... atoms of one
topological order. Both classes provide, for each downset, the sums over its atoms (`forward`,
`backward`, `saved`) and `crossing`, the bytes of the values sent across the boundary after the
downset. For a stage between two downsets, `fixed` returns the resident memory in bytes, and
`trained` the size of the parameters in bytes.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from hpc3d.partition.atom_graph import Graph, bits

# Maximum of (number of downsets)^2 * (number of values) for a search over all downsets. A search
# of this size takes about 1 min.
MOST_WORK = 5e9
_MOST_DOWNSETS = 5_000


def cuts_of(graph: Graph) -> Downsets | Chain:
    """Return all downsets of a graph or, if there are too many, a `Chain`."""
    most = int((MOST_WORK / (1 + len(graph.values))) ** 0.5)
    found = graph.downsets(min(most, _MOST_DOWNSETS))
    return Chain(graph) if found is None else Downsets(graph, found)


class _Stages:
    """Sizes of stages in bytes; a stage is the difference between two downsets.

    A weight or input that is read by several atoms of a stage is counted only once.
    """

    def _count(self, graph, members):
        """Compute cumulative sizes per downset, and count the readers of each shared tensor."""
        self._memory, self._parameters, self._fed = (
            self._sum(graph, name) for name in ("memory", "parameters", "fed")
        )
        readers = np.zeros((len(graph), len(graph.shared)))
        for column, each in enumerate(graph.shared):
            readers[list(each.atoms), column] = 1
        self._readers = members(readers)
        self._shared = np.array([each[1:] for each in graph.shared]).reshape(-1, 3)

    def fixed(self, before: int, after: int | np.ndarray) -> float | np.ndarray:
        """Return the resident memory in bytes of the stage between two downsets."""
        return self._memory[after] - self._memory[before] - self._again(before, after, 0)

    def trained(self, before: int, after: int | np.ndarray) -> float | np.ndarray:
        """Return the parameter size in bytes of the stage between two downsets."""
        return self._parameters[after] - self._parameters[before] - self._again(before, after, 1)

    def fed(self, before: int, after: int | np.ndarray) -> float | np.ndarray:
        """Return the bytes per sample of the model inputs that a stage reads."""
        return self._fed[after] - self._fed[before] - self._again(before, after, 2)

    def _again(self, before, after, column):
        if not len(self._shared):
            return 0.0
        readers = self._readers[after] - self._readers[before]
        return np.maximum(0.0, readers - 1) @ self._shared[:, column]


class Downsets(_Stages):
    """All downsets of a graph, sorted by size."""

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
        self.read = self.members @ readers.T  # reader counts, shape [downsets, values]
        self.open = self.made & (self.read < readers.sum(1))
        self.crossing = self.open @ self.nbytes

    def _sum(self, graph, name):
        return self.members @ np.array([getattr(atom, name) for atom in graph.atoms], float)

    def after(self, before: int) -> np.ndarray:
        """Return the indices of all downsets that are proper supersets of downset `before`."""
        rest = np.arange(before + 1, self.count)
        return rest[self.members[rest][:, self.members[before]].all(1)]

    def between(self, before: int, after: int) -> np.ndarray:
        """Return the indices of the downsets that are strictly between two nested downsets."""
        found = self.after(before)
        return found[(found < after) & (self.members[after] | ~self.members[found]).all(1)]

    def moved(self, before: int, after: np.ndarray) -> np.ndarray:
        """Return the bytes of all values received or sent by a stage between two downsets."""
        entering = self.made[before] & (self.read[after] > self.read[before])
        leaving = self.open[after] & ~self.made[before]
        return entering @ self.nbytes + leaving @ self.nbytes

    def stage(self, before: int, after: int) -> int:
        """Return the atoms of the stage between two downsets, as a bit set."""
        return self.downsets[after] & ~self.downsets[before]


class Chain(_Stages):
    """Downsets that consist of the first 0, 1, 2 ... atoms of a topological order.

    `weight` contains the cumulative time of the weight gradients in seconds, and `alone` the
    temporary memory of each atom in bytes.
    """

    exact = False

    def __init__(self, graph: Graph):
        self.count = len(graph) + 1
        self.forward, self.backward = self._sum(graph, "forward"), self._sum(graph, "backward")
        self.saved, self.weight = self._sum(graph, "saved"), self._sum(graph, "weight")
        self.alone = np.array([atom.working for atom in graph.atoms])
        self._count(graph, _running)
        # Columns: producer or previous reader of a value, next reader, size in bytes, and 1 if the
        # first column is the producer (otherwise 0).
        reads = []
        for value in graph.values:
            ends = pairwise((value.source, *value.targets))
            reads += [(*each, value.nbytes, each[0] == value.source) for each in ends]
        reads = np.array(reads or [(0, 0, 0.0, 0)])
        self.earlier, self.reader, self.nbytes, self.first = reads.T
        ends = [(each.source, each.targets[0], each.targets[-1]) for each in graph.values]
        self.source, self.next, self.last = np.array(ends or [(0, 0, 0)]).T
        sizes = [(value.nbytes, value.saved) for value in graph.values]
        self.size, self.later = np.array(sizes or [(0.0, 0.0)]).T
        self.crossing = self._leaving(0)
        self._peaks: dict[int, np.ndarray] = {}
        self._sums: dict[int, np.ndarray] = {}

    def _sum(self, graph, name):
        return _running(np.array([getattr(atom, name) for atom in graph.atoms], float))

    def _leaving(self, before):
        """Return an array of the bytes sent by the stage from `before` to each possible end."""
        made = self.source >= before
        ends = np.concatenate([self.source[made] + 1, self.last[made] + 1]).astype(int)
        weights = np.concatenate([self.size[made], -self.size[made]])
        return np.cumsum(np.bincount(ends, weights, self.count + 1))[: self.count]

    def working(self, before: int | np.ndarray, after: int) -> float | np.ndarray:
        """Return the bytes that a stage's backward pass needs in addition to saved activations.

        The stage contains the atoms from cut `before` to cut `after`. The result is the peak over
        these atoms. During the backward pass of atom a, memory contains its gradients, and

            the saved activations of all atoms up to a,
            the gradients of values that are read both before and after a,
            the received gradients, and copies of the received gradients that are passed on
        """
        if after not in self._peaks:
            kept = self._kept(after)
            alone = kept[1:] + (self.alone + self._waiting(after))[:after]
            fullest = np.maximum.accumulate(alone[::-1])[::-1] - kept[-1]
            open_ = (self.source < after) & (self.last >= after)
            passed = np.bincount(self.source[open_] + 1, self.size[open_], after + 1).cumsum()
            self._peaks[after] = fullest + self.crossing[after] + passed[:after]
        return self._peaks[after][before]

    def kept(self, before: int | np.ndarray, after: int) -> float | np.ndarray:
        """Return the bytes that a stage between two cuts saves for each microbatch in flight."""
        kept = self._kept(after)
        return kept[-1] - kept[before]

    def _kept(self, after):
        """Return the cumulative bytes saved by the first 0, 1, ..., `after` atoms, as an array.

        Results that are saved only for an atom after the cut `after` are excluded.
        """
        if after not in self._sums:
            open_ = (self.source < after) & (self.next >= after)
            later = np.bincount(self.source[open_], self.later[open_], after)
            self._sums[after] = self.saved[: after + 1] - _running(later)
        return self._sums[after]

    def _waiting(self, after):
        """Return the bytes of the pending gradients during the backward pass of each atom.

        The gradient of a value is pending if a reader before `after` has contributed to it, but
        another reader or the producer has not yet run its backward pass.
        """
        read = self.reader < after
        start = self.earlier[read] + self.first[read]
        ends = np.concatenate([start, self.reader[read]]).astype(int)
        weights = np.concatenate([self.nbytes[read], -self.nbytes[read]])
        return np.cumsum(np.bincount(ends, weights, self.count))[: self.count - 1]

    def after(self, before: int) -> np.ndarray:
        return np.arange(before + 1, self.count)

    def between(self, before: int, after: int) -> np.ndarray:
        return np.arange(before + 1, after)

    def moved(self, before: int, after: np.ndarray) -> np.ndarray:
        # True for the first reader of a value in the stage
        first = (self.earlier < before) & (self.reader >= before)
        ends, weights = self.reader[first].astype(int) + 1, self.nbytes[first]
        entering = np.cumsum(np.bincount(ends, weights, self.count + 1))
        return entering[after] + self._leaving(before)[after]

    def stage(self, before: int, after: int) -> int:
        return (1 << int(after)) - (1 << int(before))


def _running(columns):
    """Return cumulative sums along axis 0: row i is the sum of the first i rows."""
    return np.concatenate([np.zeros((1, *columns.shape[1:])), np.cumsum(columns, 0)])
