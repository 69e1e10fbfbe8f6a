"""Default sizes of the tensor axes x, y and z: the valid cuboid with the least communication."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from math import prod
from typing import TYPE_CHECKING

from hpc3d.config.size_rules import divisors, violations
from hpc3d.console.sanitize import counted
from hpc3d.model.families import block_products

if TYPE_CHECKING:
    from hpc3d.config.input_file import Config


def with_cuboid(config: Config, ranks: int) -> Config:
    """Return `config` with the unset sizes of the tensor axes x, y and z filled in.

    If all three are unset, the valid cuboid with the least communication is used.  Otherwise,
    each unset size is 1.
    """
    given = [axis for axis in ("x", "y", "z") if getattr(config.mesh, axis) is not None]
    others = config.mesh.p * config.mesh.d * config.mesh.c * config.mesh.e
    if given or others < 1 or ranks % others:
        sizes = {axis: getattr(config.mesh, axis) or 1 for axis in "xyz" if axis not in given}
        return replace(config, mesh=replace(config.mesh, **sizes))
    if ranks == others:
        return replace(config, mesh=replace(config.mesh, x=1, y=1, z=1))
    best = min(_cuboids(config, ranks // others), key=received_elements, default=None)
    if best is None:
        experts = ", and mesh.e for its experts" if config.model.experts else ""
        raise ValueError(
            f"mesh: no cuboid of {counted(ranks // others, 'rank')} has axes that divide the "
            f"model and batch sizes ({config.parallel.way}); set mesh.x, mesh.y and "
            f"mesh.z{experts}, or change [model] or train.batch"
        )
    return best


def _cuboids(config: Config, ranks: int) -> Iterator[Config]:
    """Yield `config` with every valid mesh for which x * y * z = `ranks`."""
    for x, y in product(divisors(ranks), repeat=2):
        if ranks % (x * y) == 0:
            mesh = replace(config.mesh, x=x, y=y, z=ranks // (x * y))
            found = replace(config, mesh=mesh)
            if not violations(found, mesh.grid().size):
                yield found


def received_elements(config: Config, parts: int = 1) -> float:
    """Return the mean number of elements received per rank and Transformer block (forward pass).

    The number is the sum of [MK (n-1) + KN (m-1) + MN (k-1)] / P over the matrix products. It
    excludes the all-to-all of tokens along e and includes only 1/`parts` of the expert weights.
    """
    split, sizes = config.splits["dense"], config.mesh.sizes()
    rows = config.train.batch * config.model.sequence
    m, n, k = (
        prod(sizes[axis] for axis in letter.split()) for letter in (split.m, split.n, split.k)
    )
    total = 0
    for count, each in block_products(config.model):
        across, along = (k, n) if each.turned else (n, k)
        weights, others = each.weights, m
        if each.experts > 1:
            weights, others = weights / parts, m // config.mesh.e
        if each.by_rows:
            across, others = 1, m * n
        received = each.inputs * (across - 1) + each.outputs * (along - 1)
        total += count * (rows * each.slots * received + weights * (others - 1))
    return total / (config.model.layers * m * n * k)


def enlarged_default(config: Config, ranks: int) -> Config:
    """Return the default configuration, enlarged if its sizes fit no cuboid of `ranks` ranks.

    In the enlarged configuration, the number of heads and the batch size are multiples of `ranks`.
    """
    try:
        with_cuboid(config, ranks)
        return config
    except ValueError:
        heads, batch = (-(-size // ranks) * ranks for size in (64, config.train.batch))
        model = replace(config.model, heads=heads, hidden=6 * heads)
        return replace(config, model=model, train=replace(config.train, batch=batch))
