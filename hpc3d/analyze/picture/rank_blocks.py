"""Layers and matrix blocks of each rank, read from the objects that training uses.

The coordinates of a rank, the layer ranges of its stage, and the slices of its parameters come
from the `Grid`, from `parts_of` and from `Layout.slices` of `Parameters` on abstract arrays,
respectively.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from functools import cached_property, lru_cache
from math import prod
from typing import TYPE_CHECKING, NamedTuple

from hpc3d.comm.abstract_communicator import abstract_mesh
from hpc3d.model.stage import LayerRange, build
from hpc3d.pipeline.program import placement_of
from hpc3d.training.trainer import parameters_of, parts_of, spec_of

if TYPE_CHECKING:
    from hpc3d.comm.mesh import Mesh
    from hpc3d.config.input_file import Config
    from hpc3d.model.parameters import Parameter, Parameters

MOST_DRAWN = 64  # ranks that are all drawn
_ROW = 8  # ranks in a row

Block = tuple[tuple[int, int], ...]  # (start, stop) of each dimension


class Unit(NamedTuple):
    """Embedding, head or Transformer block that a rank stores, and its largest matrix.

    `layer` is the number of a Transformer block, or None for the embedding and the head. `chunk`
    is the index of the model chunk in model order.
    """

    name: str
    layer: int | None
    chunk: int
    matrix: Parameter


class AxisUse(NamedTuple):
    """Mesh axis, and whether its ranks store different or equal values of each kind of data."""

    axis: str
    ranks: int
    parameters: str
    gradients: str
    optimizer: str
    activations: str


class RankRow(NamedTuple):
    """Ranks that are drawn in one row; `axis` is "" or the axis along which they lie."""

    axis: str
    ranks: tuple[int, ...]


class _RankModel(NamedTuple):
    """Model of a rank; `items` are its parameters in the order of the forward pass."""

    mesh: Mesh
    parameters: Parameters
    items: tuple[Parameter, ...]
    units: tuple[Unit, ...]


class RankBlocks:
    """Layers and blocks of each rank under a resolved configuration.

    Parameters
    ----------
    config
        Resolved configuration that contains the vocabulary.
    hosts
        Host index of each rank, or an empty sequence if the hosts are unknown.
    """

    def __init__(self, config: Config, hosts: Sequence[int] = ()) -> None:
        self.config, self.hosts, self.grid = config, hosts, config.grid()
        self.axes = [axis for axis, size in self.grid.sizes.items() if size > 1]
        self.placement = placement_of(config)
        self._stage = lru_cache(maxsize=MOST_DRAWN)(self._model)
        self._mesh = lru_cache(maxsize=2 * MOST_DRAWN)(self._abstract_mesh)

    def _abstract_mesh(self, rank: int) -> Mesh:
        return abstract_mesh(self.config.sizes(), self.grid.coords(rank))

    def _model(self, stage: int, rank: int | None = None) -> _RankModel:
        """Build the model of a rank, by default of the first rank of a pipeline stage."""
        config = self.config
        mesh = self._abstract_mesh(self.grid.rank({"p": stage}) if rank is None else rank)
        parameters = parameters_of(mesh, config)
        parts, peer = parts_of(mesh, config, self.placement)
        build(mesh, parameters, spec_of(config, config.model.vocabulary), parts, peer)
        items = tuple(parameters)
        pairs = zip(self.placement.parts_of(stage), parts, strict=True)
        units = (unit for chunk, part in pairs for unit in _units(chunk, part, items))
        return _RankModel(mesh, parameters, items, tuple(units))

    def _stage_of(self, rank: int) -> _RankModel:
        """Return the model of the first rank of a rank's stage, which has the same parameters."""
        return self._stage(self.grid.coord(rank, "p"))

    def units(self, rank: int) -> tuple[Unit, ...]:
        """Return the embedding, Transformer blocks and head of a rank, in model order."""
        return self._stage_of(rank).units

    def block(self, rank: int, item: Parameter) -> Block | None:
        """Return the block of a parameter on a rank, or None if the rank does not store it."""
        if all(each.name != item.name for each in self._stage_of(rank).items):
            return None
        slices = item.layout.slices(item.shape, self._mesh(rank))
        return tuple((each.start, each.stop) for each in slices)

    def stored(self, rank: int) -> int:
        """Return the number of parameter elements that a rank stores, without padding."""
        blocks = (self.block(rank, item) or () for item in self._stage_of(rank).items)
        return sum(prod(stop - start for start, stop in block) for block in blocks)

    @cached_property
    def rows(self) -> list[RankRow]:
        """Rows of ranks: all ranks, or more than 64 ranks by one example per mesh axis.

        The example of an axis starts at rank 0 and has its first seven ranks and its last rank.
        """
        size = self.grid.size
        if size <= MOST_DRAWN:
            width = min(_ROW, size)
            rows = (range(first, min(first + width, size)) for first in range(0, size, width))
            return [RankRow("", tuple(ranks)) for ranks in rows]
        lines = {axis: self.grid.ranks_along(axis, {}) for axis in self.axes}
        some = {axis: (*ranks[: _ROW - 1], ranks[-1]) for axis, ranks in lines.items()}
        return [RankRow(axis, tuple(dict.fromkeys(ranks))) for axis, ranks in some.items()]

    @property
    def drawn(self) -> list[int]:
        """Ranks of all rows, in increasing order."""
        return sorted({rank for row in self.rows for rank in row.ranks})

    def matrix(self, name: str | None = None) -> Parameter:
        """Return a parameter of the model by name; default: largest matrix of the first block.

        Raises ValueError if no rank stores a parameter of this name.
        """
        models = [*map(self._stage, range(self.placement.stages))]
        if name is None:
            units = (unit for model in models for unit in model.units)
            return next(unit.matrix for unit in units if unit.layer == 0)
        found = {each.name: each for model in models for each in model.items}
        if name not in found:
            near = get_close_matches(name, found, 3) or [*found][:3]
            raise ValueError(
                f"--matrix {name or repr(name)}: the model has no such parameter; use, for "
                f"example, {', '.join(near)}"
            )
        return found[name]

    def home(self, item: Parameter) -> dict[str, int]:
        """Return the coordinates of the first rank of the first stage that has a parameter."""
        stages = ({"p": stage} for stage in range(self.placement.stages))
        return next(
            self.grid.coords(self.grid.rank(coords))
            for coords in stages
            if self.block(self.grid.rank(coords), item) is not None
        )

    def spanned(self, item: Parameter) -> list[str]:
        """Return the axes of a stage along which ranks store different blocks of a parameter."""
        return [axis for axis in self.axes if axis in item.layout.axes and axis != "p"]

    def copied(self, item: Parameter) -> list[str]:
        """Return the axes of a stage along which a parameter is replicated."""
        return [axis for axis in self.axes if axis not in (*self.spanned(item), "p")]

    def owners(self, item: Parameter) -> dict[Block, list[int]]:
        """Return a dict from each nonempty block of a parameter to the ranks that store it.

        The blocks are in the order of their indices. If there are more than 64 ranks, the dict has
        up to 64 ranks, which all store different blocks.
        """
        ranks: Sequence[int] = range(self.grid.size)
        if len(ranks) > MOST_DRAWN:
            ranks = self.grid.ranks_over(self.spanned(item), self.home(item))[:MOST_DRAWN]
        found = defaultdict(list)
        for rank in ranks:
            block = self.block(rank, item)
            if block and all(start < stop for start, stop in block):
                found[block].append(rank)
        return dict(sorted(found.items()))

    def uses(self) -> list[AxisUse]:
        """Return one row per mesh axis that has several ranks."""
        return [self._use(axis) for axis in self.axes]

    def _use(self, axis: str) -> AxisUse:
        size = self.grid.sizes[axis]
        if axis == "p":
            return AxisUse(axis, size, *["by layer"] * 4)
        stages = range(self.placement.stages)
        stage = next(
            stage
            for stage in stages
            if any(unit.layer is not None for unit in self._stage(stage).units)
        )
        ranks = self.grid.ranks_along(axis, {"p": stage})[:2]
        first, last = (self._model(stage, rank) for rank in ranks)
        for model in (first, last):
            model.parameters.allocate(self.config.seed)
        cells = [_in_words(found) for found in zip(*_differences(axis, first, last), strict=True)]
        rows = self.config.train.batch // self.config.parallel.microbatches
        shape = rows * self.config.model.sequence, self.config.model.hidden
        layout = self.config.splits["dense"].x
        here, there = (layout.slices(shape, each.mesh) for each in (first, last))
        kept = "tokens split" if here[0] != there[0] else "hidden split" * (here != there)
        return AxisUse(axis, size, *cells, kept or "replicated")


def _units(chunk: int, part: LayerRange, items: Sequence[Parameter]) -> Iterator[Unit]:
    """Yield the units of a model chunk.

    In a tied model, the head is drawn with the token table, which the embedding also uses.
    """
    largest: dict[str, Parameter] = {}
    for item in items:
        known = largest.get(item.unit)
        if len(item.shape) > 1 and (known is None or prod(item.shape) > prod(known.shape)):
            largest[item.unit] = item
    if part.first:
        yield Unit("embedding", None, chunk, largest["embedding"])
    for layer in part.layers:
        yield Unit(f"layer {layer}", layer, chunk, largest[f"layers.{layer}"])
    if part.last:
        yield Unit("head", None, chunk, largest.get("head") or largest["embedding"])


def _differences(
    axis: str, model: _RankModel, other: _RankModel
) -> Iterator[tuple[tuple[bool, bool], tuple[bool, bool], tuple[bool, bool]]]:
    """Compare the matrices of Transformer blocks on two ranks that are neighbors along an axis.

    Yield for each matrix three pairs, for its values, its gradients and the elements whose
    optimizer state a rank stores: True if the matrix contains experts, and True if the two ranks
    have different blocks. If one replica along the axis updates the matrix, they differ.
    """
    owners = model.parameters.owners
    for one, two in zip(model.items, other.items, strict=True):
        if one.decay and one.unit.startswith("layers."):
            values, gradients = (
                layout.slices(one.shape, model.mesh) != layout.slices(one.shape, other.mesh)
                for layout in (one.layout, one.updated_layout)
            )
            assigned = one in owners and axis in one.replicas
            states = gradients or assigned or _own(model, one) != _own(other, two)
            experts = len(one.shape) > 2
            yield (experts, values), (experts, gradients), (experts, states)


def _own(model: _RankModel, item: Parameter) -> tuple[int, int]:
    """Return the elements of its gradient block that a rank updates, as (start, stop)."""
    slices = model.parameters.slices[item]
    start = slices.grad.start
    return slices.own_grad.start - start, slices.own_grad.stop - start


def _in_words(found: Sequence[tuple[bool, bool]]) -> str:
    """Describe an axis along which matrices have equal or different blocks.

    `found` lists pairs: True for experts, and True if the blocks differ.
    """
    if len({differ for _, differ in found}) == 1:
        return "split" if found[0][1] else "replicated"
    only_experts = all(experts == differ for experts, differ in found)
    return "experts split" if only_experts else "partly split"
