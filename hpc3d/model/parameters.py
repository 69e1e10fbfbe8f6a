"""Parameters of a rank, stored in flat arrays that the optimizer updates in one pass.

Each parameter has a global shape, the layouts of its value and gradient, its initialization, and
the axes along which each rank's gradient is only a partial sum at the end of a step.

Ranks along the data axis d have the same parameters, as do ranks along the context axis c, which
process different tokens of the same sequences, and ranks along the expert axis e. The replicas of
a parameter therefore form the plane c d e. Experts are sharded along e, so their replicas form the
plane c d. With ZeRO (arXiv:1910.02054), every parameter is split into as many equal shards as it
has replicas. Each replica updates only its *own* shard and stores only the optimizer state of this
shard:

    zero    value      gradient    at the end of a step
    0       full       full        all-reduce of gradients; every replica updates everything
    1       full       full        reduce-scatter of gradients, update, all-gather of values
    2       full       own shard   reduced in every pass; update, all-gather of values
    3       own shard  own shard   values gathered and gradients reduced in every pass; update

With hybrid sharding, the replicas form groups, which are numbered along the axis r, and d is the
axis within a group. Each group has a copy of all shards, and the gradients of the shards are
reduced along r at the end of a step. With local updates, the groups are workers that train on
their own, and the outer optimizer (hpc3d.training.optimizers.outer) averages their parameters.

Stages 2 and 3 apply to matrices and the token table, whose shards consist of rows: if a block has
n rows and d replicas, each replica has ceil(n / d) rows, and the last shards end with padding.
Vectors and the position table are treated as in stage 1; vectors account for only 13 h of the
12 h^2 + 13 h parameters of a layer.

For optimizers that need complete matrices, a replica's own shard is an undivided block of a
matrix. With stages 2 and 3, this block has the layout of the gradient. Otherwise, the stored block
is assigned to one replica, its *owner*: the gradient is reduced to the owner, which updates the
value and broadcasts it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from hpc3d.arrays.host_store import store_of
from hpc3d.arrays.pool import contiguous
from hpc3d.comm.mesh import COPIES, DATA, plane
from hpc3d.ops.random import initialise
from hpc3d.ops.update import step_by_sign, sum_of_squares
from hpc3d.tensor.layout import Layout

if TYPE_CHECKING:
    from numpy.typing import DTypeLike

    from hpc3d.arrays.array import Array
    from hpc3d.comm.mesh import Mesh


Which = Callable[[str, Sequence[int]], bool]  # predicate on a parameter's name and global shape


def no_matrix(name: str, shape: Sequence[int]) -> bool:
    return False


@dataclass(eq=False)
class Parameter:
    """Parameter tensor; `value` and `grad` are views of this rank's blocks in the flat arrays.

    Expert parameters have the shape [inputs, experts, outputs].  `replicas` are the data axes
    along which ranks have the same values.  A parameter with a `sign_rate` is not trained on the
    loss and has no optimizer state: a step subtracts the rate from elements with a positive
    gradient and adds it to elements with a negative gradient.

    `tied_peer` is the pipeline stage with the other copy of a tied table.  The gradient of a
    `completed_last` parameter, such as a tied table, is complete only at the end of the step.
    `unit` names the component of the model whose backward pass completes the gradient, such as
    "layers.0".  A `frozen` parameter has a value, but no gradient and no optimizer state.  If it
    has a `dtype`, its value is stored in a separate array, `apart`.  A parameter that is not
    `counted` is a copy of another pipeline stage's parameter.  `interleaved` (matrices, columns)
    means that groups of `columns` columns belong to `matrices` matrices, round-robin.
    """

    name: str
    shape: tuple[int, ...]
    layout: Layout
    std: float = 0.0
    mean: float = 0.0
    partial: tuple[str, ...] = ()
    decay: bool = False
    rows: int | None = None  # number of initialized rows; the remaining rows are zero padding
    grad_layout: Layout | None = None
    tied_peer: int | None = None
    completed_last: bool = False
    frozen: bool = False
    dtype: DTypeLike | None = None
    counted: bool = True
    interleaved: tuple[int, int] = (1, 1)
    unit: str = ""
    replicas: tuple[str, ...] = (DATA,)
    sign_rate: float = 0.0
    value: Any = field(default=None, repr=False)
    grad: Any = field(default=None, repr=False)
    apart: Any = field(default=None, repr=False)

    def __post_init__(self) -> None:
        words = self.name.split(".")
        self.unit = self.unit or ".".join(words[:2] if words[0] == "layers" else words[:1])

    @property
    def updated_layout(self) -> Layout:
        """Layout of the gradient, and of the matrix blocks that an optimizer updates as a unit."""
        return self.grad_layout or self.layout

    def start(self, seed: int, mesh: Mesh) -> None:
        """Set `value` to this rank's block of the initial tensor.

        Each expert has its own random stream.
        """
        block = self.layout.slices(self.shape, mesh)
        if not self.std or len(self.shape) < 3:
            initialise(self.value, self, seed, block)
            return
        rows, experts, columns = block
        for index, number in enumerate(range(experts.start, experts.stop)):
            name, shape = f"{self.name}.{number}", (self.shape[0], self.shape[2])
            expert = replace(self, name=name, shape=shape)
            drawn = mesh.empty(
                (rows.stop - rows.start, columns.stop - columns.start), self.value.dtype
            )
            initialise(drawn, expert, seed, (rows, columns))
            self.value[: len(drawn), index] = drawn


class FlatSlices(NamedTuple):
    """Slices of a parameter's value and gradient in the flat arrays.

    `value` and `grad` are this rank's blocks, padded so that their shards have equal size.
    `own_value` and `own_grad` are this rank's own shards.
    """

    value: slice
    grad: slice
    own_value: slice
    own_grad: slice

    @property
    def own(self) -> int:
        """Number of elements of the parameter that this rank updates."""
        return self.own_grad.stop - self.own_grad.start


class UpdateSlice(NamedTuple):
    """Contiguous range of parameter shards that this rank's optimizer updates together.

    `value` and `grad` are the slices of the flat arrays for this range, and `items` lists the
    parameters in the range.
    """

    value: slice
    grad: slice
    items: tuple[Parameter, ...]

    @property
    def decay(self) -> bool:
        return self.items[0].decay


class WholeMatrix(NamedTuple):
    """Block of a weight matrix that this rank's optimizer updates as a unit.

    `value` and `grad` are the slices of the flat arrays that contain the block, and `shape` is its
    shape. For experts, the block is part of a stack of matrices, [inputs, experts, outputs].
    """

    value: slice
    grad: slice
    item: Parameter
    layout: Layout
    shape: tuple[int, ...]


class Parameters:
    """All parameters of this rank in the flat arrays `value` and `grad`.

    This rank updates `matrices`, the blocks of parameters for which `whole_matrices(name, shape)`
    is true, and `pieces`, contiguous ranges of all other parameters. `owners` maps each matrix
    assigned to a single replica to the index of this replica. `own_states` are flat arrays that
    only this rank stores between steps, such as gradient residuals. Gradients of 16-bit values are
    accumulated in float32 (arXiv:1710.03740, section 3) and reduced over the data axes in the type
    `reduced`. `offload` names the data that is offloaded from the memory of the ranks: with
    "parameters", the matrices of Transformer blocks are stored in a separate flat array,
    `elsewhere`. If `local` is true, the groups of replicas along COPIES are workers that train on
    their own, and gradients are not reduced along this axis.
    `units` maps each unit to its index in the order of the forward pass.
    """

    def __init__(
        self,
        mesh: Mesh,
        dtype: DTypeLike,
        zero: int = 0,
        whole_matrices: Which = no_matrix,
        reduced: DTypeLike | None = None,
        offload: Collection[str] = (),
        local: bool = False,
    ) -> None:
        self.mesh, self.dtype, self.zero, self.local = mesh, np.dtype(dtype), zero, local
        self.wide = np.promote_types(dtype, np.float32)  # dtype of gradients and optimizer state
        self.reduced = np.dtype(reduced or self.wide)
        self.whole_matrices, self.offload = whole_matrices, offload
        self.items: list[Parameter] = []
        self.slices: dict[Parameter, FlatSlices] = {}
        # Shapes of this rank's blocks of a value and of its gradient.
        self.blocks: dict[Parameter, tuple[tuple[int, ...], tuple[int, ...]]] = {}
        self.pieces: list[UpdateSlice] = []
        self.matrices: list[Any] = []
        self.owners: dict[Parameter, int] = {}
        self.own_states: dict[str, Array] = {}
        self.units: dict[str, int] = {}
        self.elsewhere: Any = None

    def add(
        self,
        name: str,
        shape: tuple[int, ...],
        layout: Layout,
        partial: tuple[str, ...] = (),
        replicas: tuple[str, ...] | None = None,
        **how: Any,
    ) -> Parameter:
        """Register a parameter; its arrays are created later by `allocate`.

        By default, the parameter is replicated along all data axes.
        """
        replicas = self.mesh.data_axes if replicas is None else replicas
        partial = self._summed_over(
            [axis for axis in partial if self.mesh.size(axis) > 1], replicas
        )
        self.items.append(
            Parameter(name, shape, layout, partial=partial, replicas=replicas, **how)
        )
        return self.items[-1]

    def _summed_over(self, axes: Sequence[str], replicas: Sequence[str]) -> tuple[str, ...]:
        """Return the axes over which a gradient is reduced, in reduction order.

        If `axes` contains all axes of `replicas`, the gradient is reduced over them after the
        tensor axes, in a single reduction over their combined group. With hybrid sharding, the
        resulting shards are then reduced over the groups of replicas, unless these are workers
        with local updates.
        """
        data = [axis for axis in replicas if self.mesh.size(axis) > 1]
        others = [axis for axis in axes if axis not in (*data, COPIES)]
        over = [axis for axis in data if axis in axes]
        copies = [axis for axis in axes if axis == COPIES and not self.local]
        return (*others, *([plane(replicas)] if over and over == data else over), *copies)

    def parts(self, item: Parameter) -> int:
        """Return the number of replicas among which the parameter's update is sharded (ZeRO)."""
        return self.mesh.count(item.replicas) if self.zero else 1

    def __iter__(self) -> Iterator[Parameter]:
        return iter(self.items)

    def allocate(self, seed: int) -> None:
        """Allocate the flat arrays and initialize the parameters.

        Parameters reduced over the same axes are adjacent, in the order in which a backward pass
        completes them, so that a gradient bucket is one contiguous range.  Among these,
        parameters with weight decay are adjacent, so that an optimizer update processes few
        contiguous ranges.
        """
        names = dict.fromkeys(item.unit for item in self.items)
        self.units = {name: index for index, name in enumerate(names)}
        self.items.reverse()
        self.items.sort(key=lambda item: (item.completed_last, item.partial, not item.decay))
        trained = [item for item in self.items if not item.frozen and not item.sign_rate]
        matrices = [item for item in trained if self.whole_matrices(item.name, item.shape)]
        self.owners = self._deal(
            [item for item in matrices if self._stored_whole(item, item.updated_layout)]
        )
        values, grads = {True: 0, False: 0}, 0
        for item in self.items:
            lies_elsewhere = self.lies_elsewhere(item)
            first = values[lies_elsewhere] if item.dtype is None else 0
            self.slices[item] = slices = self._slices_of(item, first, grads)
            if item.dtype is not None:
                item.apart = self.mesh.zeros((slices.value.stop,), item.dtype, "parameter")
            else:
                values[lies_elsewhere], grads = slices.value.stop, slices.grad.stop
        self.value = self.mesh.zeros((values[False],), self.dtype, "parameter")
        self.grad = self.mesh.zeros((grads,), self.wide, "gradient")
        if any(map(self.lies_elsewhere, self.items)):  # allocated even if empty on this rank
            self.elsewhere = store_of(self.mesh.pool).empty((values[True],), self.dtype)
            self.elsewhere.fill(0)
        self.bind()
        for item in self.items:
            item.start(seed, self.mesh)
        whole = {*matrices}
        self.pieces = _merged([item for item in trained if item not in whole], self)
        self.matrices = [self.matrix(item) for item in matrices if self.updates(item)]

    def _deal(self, matrices: Sequence[Parameter]) -> dict[Parameter, int]:
        """Return a dict that maps each matrix to the replica that updates it.

        The largest matrices are assigned first, each to the replica with the least load. The
        result is identical on all ranks of a stage, because it depends on global shapes only. A
        tied embedding matrix is assigned before all others, so that its copies on two stages have
        the same owner.
        """
        owners = {}
        load = {item.replicas: [0] * self.parts(item) for item in matrices}
        shared = [item for item in matrices if self.parts(item) > 1]
        for item in sorted(shared, key=lambda item: (item.tied_peer is None, -prod(item.shape))):
            held = load[item.replicas]
            owners[item] = held.index(min(held))
            held[owners[item]] += prod(item.shape)
        return owners

    def updates(self, item: Parameter) -> bool:
        """Return True if this rank, rather than another replica, updates its block of a matrix."""
        here = self.mesh.index(item.replicas)
        return self.owners.get(item, here) == here

    def matrix(self, item: Parameter) -> WholeMatrix:
        """Return the `WholeMatrix` that describes this rank's block of a parameter."""
        slices, layout = self.slices[item], item.updated_layout
        shape = layout.block(item.shape, self.mesh)
        return WholeMatrix(slices.own_value, slices.own_grad, item, layout, shape)

    def _slices_of(self, item: Parameter, values: int, grads: int) -> FlatSlices:
        """Return the slices of the flat arrays that contain a parameter.

        `values` and `grads` are the start indices of its value and its gradient.
        """
        block = updated = item.layout.block(item.shape, self.mesh)
        if item.updated_layout != item.layout:
            updated = item.updated_layout.block(item.shape, self.mesh)
        self.blocks[item] = block, updated
        value, grad = prod(block), prod(updated)
        if item.frozen:
            span, none = slice(values, values + value), slice(grads, grads)
            return FlatSlices(span, none, span, none)
        own, parts = min(value, grad), self.parts(item)
        if item in self.owners:
            own *= self.updates(item)
        elif self._stored_whole(item, item.layout):
            if self._stored_whole(item, item.updated_layout):
                own = -(-own // parts)
                grad = own * parts
            value = max(value, own * parts)
        return FlatSlices(
            slice(values, values + value),
            slice(grads, grads + grad),
            self._shard(item, values, value, own),
            self._shard(item, grads, grad, own),
        )

    def _stored_whole(self, item: Parameter, layout: Layout) -> bool:
        """Return True if every replica stores the full block in this layout of a parameter."""
        return {axis for dim in layout for axis in dim}.isdisjoint(item.replicas)

    def shared_out(self, item: Parameter) -> bool:
        """Return True if each replica stores the full value but updates at most one shard."""
        slices = self.slices[item]
        return item in self.owners or slices.own_value != slices.value

    def _shard(self, item: Parameter, start: int, size: int, own: int) -> slice:
        """Return the slice that contains the `own` elements of a parameter on this rank.

        The parameter has `size` elements and starts at index `start` of the flat array.
        """
        start += self.mesh.index(item.replicas) * own if own < size else 0
        return slice(start, start + own)

    def lies_elsewhere(self, item: Parameter) -> bool:
        """Return True if the value of a parameter is offloaded."""
        return (
            "parameters" in self.offload
            and item.name.startswith("layers.")
            and len(item.shape) > 1
        )

    def flat(self, item: Parameter) -> Array:
        """Return the flat array that contains the value of a parameter."""
        if item.dtype is not None:
            return item.apart
        return self.elsewhere if self.lies_elsewhere(item) else self.value

    def read(self, item: Parameter, part: slice) -> Array:
        """Return the slice `part` of a parameter's flat array, after loading it if offloaded."""
        if not self.lies_elsewhere(item):
            return self.value[part]
        return store_of(self.mesh.pool).load(self.elsewhere[part], "workspace", self.mesh.trace)()

    def write(self, item: Parameter, part: slice, values: Array) -> None:
        """Write `values` to the slice `part` of a parameter's flat array."""
        if self.lies_elsewhere(item):
            flat = contiguous(values).reshape(-1)
            store_of(self.mesh.pool).save(flat, self.elsewhere[part], self.mesh.trace)
        else:
            self.value[part].reshape(values.shape)[...] = values

    def show(self, item: Parameter) -> None:
        """Set `item.value` to the view of the parameter's slice in its flat array."""
        item.value = _view(self.flat(item), self.slices[item].value, self.blocks[item][0])

    def bind(self) -> None:
        """Set the values and gradients of all parameters to views of the flat arrays."""
        for item, slices in self.slices.items():
            self.show(item)
            if not item.frozen:
                item.grad = _view(self.grad, slices.grad, self.blocks[item][1])

    def update_by_sign(self) -> None:
        """Apply the sign update to this rank's own shards of parameters with a `sign_rate`."""
        for item in filter(lambda item: item.sign_rate, self.items):
            own = self.slices[item]
            with self.mesh.trace.span("update"):
                step_by_sign(self.value[own.own_value], self.grad[own.own_grad], item.sign_rate)

    def copy_on_write(self) -> None:
        """Copy the values to a new flat array; saved activations still refer to the old array."""
        old, self.value = self.value, self.mesh.empty(self.value.shape, self.dtype, "parameter")
        self.value[...] = old
        self.bind()

    def use(self, value: Array) -> None:
        """Set the values of all parameters to views of the flat array `value`."""
        if value is not self.value:
            self.value = value
            self.bind()

    def sum_of_squares(self) -> Any:
        """Return this rank's share of the squared gradient norm, counting each parameter once."""
        weights = [item for item in self.slices if self.counts(item) and not item.sign_rate]
        return sum_of_squares(self.grad, [self.slices[item].own_grad for item in weights])

    def counts(self, item: Parameter) -> bool:
        """Return True if this rank includes its own shard in gradient norms and checkpoints.

        Of several identical copies of a shard, exactly one is included. With local updates, one
        copy of each worker is included.
        """
        parted = self.parts(item) > 1 and not item.frozen
        return self._counts(item, item.updated_layout, parted)

    def counts_state(self, item: Parameter, layout: Layout) -> bool:
        """Return True if this rank writes its block of an optimizer state to checkpoints.

        `layout` is the layout of the state.
        """
        return self._counts(item, layout, item in self.owners)

    def _counts(self, item: Parameter, layout: Layout, parted: bool) -> bool:
        first = item.tied_peer is None or self.mesh.coord("p") < item.tied_peer
        others = item.replicas if parted else ()
        workers = (COPIES,) if self.local else ()
        return first and item.counted and layout.is_first_copy(self.mesh, *others, *workers)


def _view(flat: Array, part: slice, shape: Sequence[int]) -> Array:
    return flat[part][: prod(shape)].reshape(shape)


def _merged(items: Sequence[Parameter], parameters: Parameters) -> list[UpdateSlice]:
    """Build the update slices, merging adjacent slices that have the same weight decay."""
    pieces: list[UpdateSlice] = []
    for item in items:
        slices = parameters.slices[item]
        piece = UpdateSlice(slices.own_value, slices.own_grad, (item,))
        here = bool(pieces) and parameters.flat(pieces[-1].items[0]) is parameters.flat(item)
        if here and _follows(pieces[-1], piece):
            last = pieces.pop()
            both = zip(last[:2], piece[:2], strict=True)
            value, grad = (slice(a.start, b.stop) for a, b in both)
            piece = UpdateSlice(value, grad, (*last.items, item))
        pieces.append(piece)
    return pieces


def _follows(last: UpdateSlice, piece: UpdateSlice) -> bool:
    touch = all(a.stop == b.start for a, b in zip(last[:2], piece[:2], strict=True))
    return touch and last.decay == piece.decay
