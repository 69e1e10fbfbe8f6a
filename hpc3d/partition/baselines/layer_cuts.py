"""Cuts between the layers of a model, as systems make them that a user tells the layers.

A layer is what a module with a number in its path computes (`layers.3.up` is of `layers.3`), in
the order of the program; what stands before the first goes with it, and functions of the model
itself with the layer before them.  `even` is GPipe as it is mostly used (arXiv:1811.06965),
`balanced` over times is torchgpipe's balance_by_time, over parameters DeepSpeed's
partition_method="parameters".
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from hpc3d.partition.atom_graph import Graph


class LayerRun(NamedTuple):
    """Atoms that follow each other, up to `end` (exclusive); `numbered` where they are a layer
    and not, for instance, an embedding or the loss."""

    end: int
    numbered: bool


def layer_runs(graph: Graph) -> list[LayerRun]:
    """The runs of a graph whose ids are `module/operation`, in the order of its atoms."""
    found, last, seen = [], None, set()
    for place, atom in enumerate(graph.atoms):
        name, numbered = _layer_of(str(atom.ids[0]))
        if last is None or (name and name not in seen):
            seen.add(name)
            last = name
            found.append(LayerRun(place, numbered))
        found[-1] = found[-1]._replace(end=place + 1)
    return found


def _layer_of(name):
    """The path of the layer that an atom is in, and whether it has a number; "" for none."""
    module, slash, _ = name.rpartition("/")
    parts = module.split(".")
    for count, part in enumerate(parts, 1):
        if part.isdecimal():
            return ".".join(parts[:count]), True
    return parts[0] if slash else "", False


def even(runs: Sequence[LayerRun], stages: int) -> list[int] | None:
    """Ends of stages with equally many numbered layers, or one more in some; None where there are
    fewer layers than stages."""
    layers = [number for number, run in enumerate(runs) if run.numbered]
    if len(layers) < stages:
        return [runs[-1].end] if stages == 1 else None
    first = [layers[len(layers) * stage // stages] for stage in range(1, stages)]
    return [runs[number - 1].end for number in first] + [runs[-1].end]


def balanced(weights: Sequence[float], stages: int) -> list[int] | None:
    """Ends of so many non-empty stages, exclusive, of which the heaviest is as light as can be;
    None where there are fewer weights.

    T[s, j] = min over i < j of max(T[s - 1, i], sum of weights i to j), of equals the first.
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
