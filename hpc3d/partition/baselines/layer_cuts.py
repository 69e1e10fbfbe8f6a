"""Partition a model at layer boundaries, for systems that require the user to list the layers.

A layer consists of all operations below a numbered module path: the module `layers.3.up` belongs
to the layer `layers.3`. Layers are in program order. Operations outside all submodules belong to
the preceding layer. `even` assigns all atoms before the first numbered layer to the first stage,
as is common with GPipe (arXiv:1811.06965). `balanced` corresponds to torchgpipe's balance_by_time
if the weights are times, and to DeepSpeed's partition_method="parameters" if the weights are
parameter counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from hpc3d.partition.atom_graph import Graph


class LayerRun(NamedTuple):
    """Layer of a model, made up of the atoms after the previous layer up to `end` (exclusive).

    `numbered` is True if the layer's path contains a number, and False otherwise, for example for
    an embedding or the loss.
    """

    end: int
    numbered: bool


def layer_runs(graph: Graph) -> list[LayerRun]:
    """Return a graph's layers in program order; atom ids have the form `module/operation`."""
    found, last, seen = [], None, set()
    for index, atom in enumerate(graph.atoms):
        name, numbered = _layer_of(str(atom.ids[0]))
        if last is None or (name and name not in seen):
            seen.add(name)
            last = name
            found.append(LayerRun(index, numbered))
        found[-1] = found[-1]._replace(end=index + 1)
    return found


def _layer_of(name):
    """Return the path of an atom's layer ("" if none), and whether it has a layer index."""
    module, slash, _ = name.rpartition("/")
    parts = module.split(".")
    for count, part in enumerate(parts, 1):
        if part.isdecimal():
            return ".".join(parts[:count]), True
    return parts[0] if slash else "", False


def even(runs: Sequence[LayerRun], stages: int) -> list[int] | None:
    """Distribute the numbered layers evenly over the stages; return the exclusive stage ends.

    Returns `None` if the model has fewer numbered layers than `stages`, unless `stages` is 1.
    """
    layers = [number for number, run in enumerate(runs) if run.numbered]
    if len(layers) < stages:
        return [runs[-1].end] if stages == 1 else None
    first = [layers[len(layers) * stage // stages] for stage in range(1, stages)]
    return [runs[number - 1].end for number in first] + [runs[-1].end]


def balanced(weights: Sequence[float], stages: int) -> list[int] | None:
    """Return the exclusive ends of non-empty stages that minimize the largest stage weight.

    If several partitions are optimal, the partition found first is returned. Returns `None` if
    there are fewer weights than stages. T[s, j] is the minimum, over all partitions of the first j
    weights into s stages, of the largest stage weight:

      T[s, j] = min over i < j of max(T[s - 1, i], sum of weights i to j)
    """
    count = len(weights)
    if count < stages:
        return None
    sums = np.concatenate([[0.0], np.cumsum(weights)])
    load, before = np.full((stages + 1, count + 1), np.inf), np.zeros((stages + 1, count + 1), int)
    load[0, 0] = 0.0
    for stage in range(1, stages + 1):
        for end in range(stage, count + 1):
            candidates = np.maximum(load[stage - 1, :end], sums[end] - sums[:end])
            before[stage, end] = candidates.argmin()
            load[stage, end] = candidates.min()
    ends = [count]
    for stage in range(stages, 1, -1):
        ends.append(int(before[stage, ends[-1]]))
    return ends[::-1]
