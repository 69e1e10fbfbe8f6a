"""Choose default sizes of the tensor axes x, y and z that minimize communication."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from math import prod
from typing import TYPE_CHECKING

from hpc3d.comm.grid import divisors
from hpc3d.config.size_rules import violations
from hpc3d.console.sanitize import Problems, counted
from hpc3d.model.families import block_products

if TYPE_CHECKING:
    from hpc3d.config.input_file import Config


def with_cuboid(config: Config, ranks: int) -> Config:
    """Return `config` with the unset sizes of the tensor axes x, y and z filled in.

    If all three are unset, the valid sizes with the least communication are used.  Otherwise, each
    unset size is 1.
    """
    unset = [axis for axis in "xyz" if getattr(config.mesh, axis) is None]
    others = config.mesh.p * config.mesh.d * config.mesh.c * config.mesh.e
    if len(unset) < 3 or others < 1 or ranks % others or ranks == others:
        return replace(config, mesh=replace(config.mesh, **dict.fromkeys(unset, 1)))
    size = ranks // others
    found = [
        replace(config, mesh=replace(config.mesh, x=x, y=y, z=z)) for x, y, z in cuboids(size)
    ]
    valid = (each for each in found if not violations(each, ranks))
    best = min(valid, key=received_elements, default=None)
    if best is None:
        alone = replace(config, mesh=replace(config.mesh, x=1, y=1, z=1))
        if problems := violations(alone, others):  # of any cuboid
            raise Problems(problems)
        axes = "mesh.p, mesh.d or mesh.e" if config.model.experts else "mesh.p or mesh.d"
        raise ValueError(
            f"mesh: no cuboid of {counted(size, 'rank')} has axes that divide the model and batch "
            f"sizes ({config.parallel.way}): {_obstacle(found, ranks)}; change the number of "
            f"ranks or these sizes, or set {axes}"
        )
    return best


def _obstacle(layouts: Sequence[Config], ranks: int) -> str:
    """Describe the sizes that block the layout with the fewest violated rules."""
    lines = {config: violations(config, ranks) for config in layouts}

    def severity(config):
        unused = any(line.startswith("mesh.") for line in lines[config])  # by the scheme
        return unused, len(lines[config]), max(config.sizes().values())

    nearest = min(lines, key=severity)
    sizes = " ".join(f"{axis}={getattr(nearest.mesh, axis)}" for axis in "xyz")
    wrong = [line.partition("; ")[0] for line in lines[nearest]]
    return f"with {sizes}, {' and '.join(wrong)}"


def cuboids(ranks: int) -> list[tuple[int, int, int]]:
    """Return all meshes (x, y, z) with x y z = `ranks`."""
    pairs = product(divisors(ranks), repeat=2)
    return [(x, y, ranks // (x * y)) for x, y in pairs if ranks % (x * y) == 0]


def received_elements(
    config: Config, parts: int = 1, sizes: Mapping[str, int] | None = None
) -> float:
    """Return the mean number of elements received per rank and Transformer block (forward pass).

    A GEMM [M, K] x [K, N] whose dimensions are sharded over m, n and k ranks (P = m n k in total)
    adds [MK (n-1) + KN (m-1) + MN (k-1)] / P. With panels, all GEMMs have the same split. The
    all-to-all of tokens along e is excluded. The number of expert weights is divided by `parts`:
    if the experts are distributed over several ranks although `config` has mesh.e = 1, set `parts`
    to the number of these ranks. `sizes` replaces the sizes of the mesh axes.
    """
    split, sizes = config.splits["dense"], sizes or config.sizes()
    rows = config.train.batch * config.model.sequence
    m, n, k = (
        prod(sizes[axis] for axis in letter.split()) for letter in (split.m, split.n, split.k)
    )
    total = 0
    for count, each in block_products(config.model):
        across, along = (k, n) if each.turned and not split.panels else (n, k)
        weights, others = each.weights, m
        if each.experts > 1:
            weights, others = weights / parts, m // sizes["e"]
        if each.by_rows:
            across, others = 1, m * n
        received = each.inputs * (across - 1) + each.outputs * (along - 1)
        total += count * (rows * each.slots * received + weights * (others - 1))
    return total / (config.model.layers * m * n * k)


def enlarged_default(config: Config, ranks: int) -> Config:
    """Enlarge the default model and batch if no mesh of `ranks` ranks divides their sizes.

    In the enlarged configuration, the number of heads and the batch size are multiples of `ranks`.
    """
    try:
        with_cuboid(config, ranks)
        return config
    except ValueError:
        heads, batch = (-(-size // ranks) * ranks for size in (64, config.train.batch))
        model = replace(config.model, heads=heads, hidden=6 * heads)
        return replace(config, model=model, train=replace(config.train, batch=batch))
