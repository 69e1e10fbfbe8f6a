"""The parameters of a model: blocks of flat arrays that the optimiser walks through once.

A parameter knows its global shape, its layout, how it starts, and the axes along which each rank's
gradient is only a partial sum (the axes that split the tokens it acted on).
"""

from dataclasses import dataclass, field
from itertools import accumulate, groupby
from math import prod
from typing import NamedTuple

import numpy as np

from hpc3d.model.random import normal
from hpc3d.tensor.layout import Layout


@dataclass
class Parameter:
    """One tensor; `value` and `grad` are this rank's blocks, views of the flat arrays."""

    name: str
    shape: tuple[int, ...]
    layout: Layout
    std: float = 0.0
    mean: float = 0.0
    partial: tuple[str, ...] = ()
    decay: bool = False
    rows: int | None = None  # rows that are drawn; the padding below them starts at 0
    value: np.ndarray | None = field(default=None, repr=False)
    grad: np.ndarray | None = field(default=None, repr=False)

    def start(self, seed, mesh):
        """Set `value` to this rank's block of the initial tensor."""
        self.value.fill(self.mean)
        if self.std:
            rows, columns = self.layout.slices(self.shape, mesh)
            drawn = slice(rows.start, max(rows.start, min(rows.stop, self.rows or rows.stop)))
            block = normal((seed, self.name), (drawn, columns), self.shape[1])
            self.value[: drawn.stop - drawn.start] = block * self.std
            self.value[drawn.stop - drawn.start :] = 0


class Group(NamedTuple):
    """What the parameters of one stretch of the flat arrays have in common."""

    partial: tuple[str, ...]
    copies: tuple[str, ...]  # the axes along which every rank holds the same block
    decay: bool


class Parameters:
    """All parameters of this rank on flat arrays `value` and `grad`."""

    def __init__(self, mesh, dtype):
        self.mesh, self.dtype = mesh, np.dtype(dtype)
        self.items, self.parts = [], {}

    def add(self, name, shape, layout, **how):
        """A new parameter; its arrays exist after `allocate`."""
        self.items.append(Parameter(name, shape, layout, **how))
        return self.items[-1]

    def __iter__(self):
        return iter(self.items)

    def allocate(self, seed):
        """Lay the parameters out, a group after the other, and give them their initial values."""
        self.items.sort(key=self.group)
        shapes = [item.layout.block(item.shape, self.mesh) for item in self.items]
        total = sum(map(prod, shapes))
        self.value = self.mesh.zeros((total,), self.dtype, "parameter")
        self.grad = self.mesh.zeros((total,), self.dtype, "gradient")
        stop = 0
        for item, shape in zip(self.items, shapes, strict=True):
            part = slice(stop, stop := stop + prod(shape))
            item.value, item.grad = (a[part].reshape(shape) for a in (self.value, self.grad))
            item.start(seed, self.mesh)
        ends = accumulate(map(prod, shapes))
        for group, of_group in groupby(
            zip(self.items, ends, strict=True), lambda i: self.group(i[0])
        ):
            start = self.parts[next(reversed(self.parts))].stop if self.parts else 0
            self.parts[group] = slice(start, list(of_group)[-1][1])

    def group(self, item):
        sharded = {axis for dim in item.layout for axis in dim} | set(item.layout.owned)
        copies = tuple(axis for axis in self.mesh.sizes if axis not in sharded)
        return Group(item.partial, copies, item.decay)

    def reduce_gradients(self):
        """Sum the partial gradients, one collective an axis for all parameters alike."""
        for partial in dict.fromkeys(group.partial for group in self.parts):
            parts = [part for group, part in self.parts.items() if group.partial == partial]
            block = self.grad[parts[0].start : parts[-1].stop]
            total = block
            for axis in partial:
                total = self.mesh.comm(axis).all_reduce(total).wait()
            if total is not block:
                block[...] = total

    def sum_of_squares(self):
        """The sum of this rank's share of the gradient's squares, each parameter counted once."""
        shares = [
            self.grad[part]
            for group, part in self.parts.items()
            if all(self.mesh.coord(axis) == 0 for axis in group.copies)
        ]
        return sum(float(np.dot(share, share)) for share in shares)
