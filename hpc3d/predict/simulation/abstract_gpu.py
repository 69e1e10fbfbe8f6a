"""The rules of a device (hpc3d.model.device) on arrays without data: the kernels, products and
workspaces of a GPU, counted by a meter.

What is launched, and with which arrays, the code decides that a GPU runs: there is no second
description.
"""

from dataclasses import replace
from functools import partial
from math import prod

import numpy as np

import hpc3d.training.shapes  # noqa: F401  what is the same on hosts
from hpc3d.arrays.abstract import AbstractArray, AbstractPool, of_shapes
from hpc3d.arrays.pool import value_of
from hpc3d.cuda import launch_table
from hpc3d.cuda.cudnn_attention import Case, takes
from hpc3d.training.device import UPDATES, WORKSPACE, Updates


class DeviceShape(AbstractArray):
    """An array of a device, without data."""

    __slots__ = ()


class DeviceShapes(AbstractPool):
    """Arrays of a device that count as a `cuda.DevicePool` does."""

    kind, fused = DeviceShape, True

    def __init__(self, meter=None):
        super().__init__(meter)
        self.rules = Planned(self)

    def bring(self, array):
        return self.empty(np.shape(array), getattr(array, "dtype", np.float32))


class Planned(Updates):
    """The rules, which report to the meter of a pool what they would do."""

    def __init__(self, pool):
        self.pool, empty = pool, partial(pool.empty, kind="workspace")
        super().__init__(self.told, self.multiplied, AbstractAttention(pool), empty, pool.bring)
        self.workspace = empty((WORKSPACE,), np.uint8)

    def told(self, name, rows, columns, /, **given):
        touched = [*given.values(), *(given[key] for key in launch_table.UPDATED.get(name, ()))]
        self.pool.meter.kernel(name, sum(array.nbytes for array in of_shapes(touched)))

    def multiplied(self, a, b, out, **beside):
        *batch, rows, inner = a.shape
        self.pool.meter.product(rows, b.shape[-1], inner, a.dtype, prod(batch))

    def parted(self, x, *how):
        """Heads by themselves lie elsewhere: a copy."""
        return super().parted(x, *how).told("copy", x)

    def fused(self, a, b, out, add, **more):
        """cuBLASLt takes everything that is asked of it."""
        self.multiplied(a, b, out)
        return True


class AbstractAttention:
    """What model.flash.Flash does: of causal attention half of every product, with no scores in
    memory; five products backward, one of which is made again."""

    def __init__(self, pool):
        self.pool = pool

    def suits(self, dtype, width, drop):
        return takes(dtype, width, drop, self.pool.meter.widest)

    def forward(self, qkv, sequence, width):
        case = Case.of(qkv, sequence, width)
        out = self.pool.empty((qkv.shape[0], case.heads * width), qkv.dtype)
        stats = self.pool.empty((case.batch, case.heads, sequence, 1), np.float32)
        self.tell(case, 2, (qkv, out, stats))
        return out, stats

    def backward(self, dout, qkv, out, stats, sequence, width):
        dqkv = self.pool.empty(qkv.shape, qkv.dtype)
        self.tell(Case.of(qkv, sequence, width), 5, (dout, qkv, out, stats, dqkv))
        return dqkv

    def tell(self, case, products, arrays):
        flop = products * case.batch * case.heads * case.sequence**2 * case.width
        self.pool.meter.fused(flop, sum(array.nbytes for array in arrays), arrays[1].dtype)


def of_pool(name):
    """The rule `name` of the pool of an array."""
    return lambda first, *rest, **given: getattr(first.pool.rules, name)(first, *rest, **given)


for module, names in UPDATES.items():
    for name in names:
        getattr(module, name).register(DeviceShape)(of_pool(name))
value_of.register(DeviceShape)(lambda array: 0.0)


def unrecorded(config):
    """A run that launches its kernels one by one: what is recorded does the same."""
    return replace(config, train=replace(config.train, cuda_graph=False))


def pool_of(config, meter=None):
    """The arrays without data of a run's ranks."""
    return (DeviceShapes if config.train.backend == "cupy" else AbstractPool)(meter)
