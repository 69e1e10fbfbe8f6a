"""Optimizer base class, AdamW, SGD, and the learning rate schedule.

An optimizer class declares its states and the matrices that the optimizer needs unsharded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from math import cos, pi, prod, sqrt
from typing import TYPE_CHECKING, NamedTuple

from hpc3d.arrays.host_store import store_of, walk
from hpc3d.model.parameters import Which, no_matrix
from hpc3d.ops.update import adamw, descend
from hpc3d.tensor.layout import Layout

if TYPE_CHECKING:
    from hpc3d.arrays.array import Array
    from hpc3d.comm.mesh import Mesh
    from hpc3d.config.input_file import TrainConfig
    from hpc3d.model.parameters import Parameter, Parameters, UpdateSlice, WholeMatrix

_STRETCH = 1 << 20  # maximum number of elements loaded at once from an offloaded array
# name and side length of the large square matrix that is used to estimate the size of states
_LARGE, _ROWS = "layers.0.up.weight", 1 << 20


def every(name: str, shape: Sequence[int]) -> bool:
    """Return True for every parameter."""
    return True


def is_matrix(name: str, shape: Sequence[int]) -> bool:
    """Return True for matrices [inputs, outputs] and for stacks [inputs, experts, outputs]."""
    return len(shape) > 1


def is_vector(name: str, shape: Sequence[int]) -> bool:
    return not is_matrix(name, shape)


class StateSpec(NamedTuple):
    """Optimizer state array, initialized to zero.

    Attributes
    ----------
    name
        Name of the state in checkpoints.
    dtype
        The element type; None for the type of the gradients.
    per
        Rows and columns of the part of a matrix that shares one state element; None stands for
        all rows or columns.  (1, 1) is elementwise, (1, None) has one element per row.  Only
        unsharded matrices have states that are not elementwise.
    of
        Function that selects parameters: `of(name, shape)` is true if a parameter has the state.
    codes
        Name of the elementwise state whose blocks this state scales, or "". A block does not
        extend beyond a rank's columns, so the number of blocks depends on the layout.
    outer
        True for a state of the outer optimizer (hpc3d.training.optimizers.outer).
    """

    name: str
    dtype: str | None = None
    per: tuple[int | None, int | None] = (1, 1)
    of: Which = every
    codes: str = ""
    outer: bool = False

    @property
    def elementwise(self) -> bool:
        return self.per == (1, 1)

    def shape(self, shape: Sequence[int], shards: int = 1) -> tuple[int, ...]:
        """Return the global shape of the state for a parameter with the global shape `shape`.

        `shards` is the number of ranks that shard the columns of the parameter.
        """
        if self.elementwise:
            return (*shape,)
        sizes = (shape[0], 1), (shape[-1] // shards, shards)
        ends = [
            -(-size // per) * count if per else 1
            for (size, count), per in zip(sizes, self.per, strict=True)
        ]
        return (ends[0], *shape[1:-1], ends[1])

    def density(self) -> float:
        """Return the number of state elements per parameter element, for a large square matrix."""
        rows, columns = self.per
        held = rows and columns and self.of(_LARGE, (_ROWS, _ROWS))
        return 1 / (rows * columns) if held else 0.0

    def layout(self, layout: Layout) -> Layout:
        """Return the layout of the state for a parameter with the layout `layout`.

        If the state reduces a dimension to one element, the state is replicated along the axes
        that shard this dimension of the parameter.
        """
        rows, columns = self.per
        *others, last = layout
        dims = *others, last if columns else ()
        return layout.with_dims(*dims) if rows else Layout("", *map(" ".join, dims[1:]))


def _keeps(spec: StateSpec, item: Parameter) -> bool:
    trained = spec.outer or not item.sign_rate
    return spec.of(item.name, item.shape) and trained and not item.frozen


_VALUE = "value"


class _Update(NamedTuple):
    """Parameters that an optimizer updates together, with their gradients and states.

    `grad` is the gradient, and `arrays` maps names to the parameter values and the optimizer
    states. `item` is the first of the parameters, and represents them: all are offloaded together
    and have the same weight decay.
    """

    item: Parameter
    parameters: Parameters
    grad: Array
    arrays: dict[str, Array]

    def lies_elsewhere(self, name: str) -> bool:
        """Return True if the array `name` is offloaded."""
        if name == _VALUE:
            return self.parameters.lies_elsewhere(self.item)
        return "optimizer" in self.parameters.offload

    def keep(self, decay: float) -> float:
        return 1 - decay if self.item.decay else 1.0


MASTER = StateSpec("master")  # float32 master copy of 16-bit parameters


class Optimizer:
    """Base class of optimizers; updates the parameters that this rank owns.

    Parameters of 16 bits have a `master` copy in float32, which is updated and then rounded
    (Micikevicius et al., arXiv:1710.03740, section 3.1).

    `steps` counts the updates so far, and `constants` is the result of `TrainConfig.constants`. A
    subclass declares its STATES, and WHOLE_MATRICES selects the matrices that it needs unsharded:
    `matrices` yields them as blocks, and `pieces` yields the other parameters. `states` maps names
    to flat arrays, and `slices` maps the same names to the slice of each parameter. If arrays are
    offloaded, `pieces` and `matrices` yield copies, which are valid until the next item is
    requested. `others` are states that an outer optimizer stores in addition.
    """

    STATES: tuple[StateSpec, ...] = ()
    WHOLE_MATRICES: Which = no_matrix

    def __init__(
        self,
        parameters: Parameters,
        weight_decay: float,
        others: tuple[StateSpec, ...] = (),
        **constants: float,
    ) -> None:
        self.parameters, self.weight_decay, self.steps = parameters, weight_decay, 0
        self.constants: Mapping[str, float] = constants
        self.narrow = parameters.wide != parameters.dtype
        self.inner = (MASTER, *self.STATES) if self.narrow else self.STATES
        self.specs = (*self.inner, *others)
        self.slices: dict[str, Mapping[Parameter, slice]] = {}
        self.states = {spec.name: self._zeros(spec) for spec in self.specs}
        self.copy_to_masters()

    def copy_to_masters(self) -> None:
        """Copy the values of 16-bit parameters to their master copies."""
        if self.narrow:
            for (value, master, _), *_ in self._pieces(0.0):
                master[...] = value
            for [(_, (value, master, _), *_)] in self.batches(self._each_matrix(), 0.0):
                master[...] = value

    @classmethod
    def at_once(cls, mesh: Mesh) -> int:
        """Return the number of identical layers that should be updated as one batch."""
        return 1

    def _zeros(self, spec):
        """Allocate the flat array of a state, filled with zeros, and set its `slices`."""
        items = [*self.parameters]
        edges = [*accumulate((self._size(spec, item) for item in items), initial=0)]
        self.slices[spec.name] = dict(zip(items, map(slice, edges, edges[1:]), strict=False))
        dtype, mesh = spec.dtype or self.parameters.wide, self.parameters.mesh
        if "optimizer" not in self.parameters.offload:
            return mesh.zeros((edges[-1],), dtype, "optimizer")
        state = store_of(mesh.pool).empty((edges[-1],), dtype)
        state.fill(0)
        return state

    def _size(self, spec: StateSpec, item: Parameter) -> int:
        if not _keeps(spec, item):
            return 0
        if spec.elementwise:
            return self.parameters.slices[item].own
        return prod(self.block(spec, item)) if self.parameters.updates(item) else 0

    def block(self, spec: StateSpec, item: Parameter) -> tuple[int, ...]:
        """Return the shape of this rank's state block for a matrix that this rank updates."""
        mesh, layout = self.parameters.mesh, item.updated_layout
        shape = spec.shape(item.shape, mesh.count(layout[-1]))
        return spec.layout(layout).block(shape, mesh)

    def states_of(self, item: Parameter) -> Iterator[tuple[StateSpec, Array]]:
        """Yield (spec, this rank's elements) for each optimizer state of a parameter."""
        for spec in self.specs:
            if _keeps(spec, item):
                yield spec, self.states[spec.name][self.slices[spec.name][item]]

    def pieces(
        self, decay: float
    ) -> Iterator[tuple[tuple[Array, Array | None, Array], dict[str, Array], float]]:
        """Yield the slices of the flat arrays that the optimizer updates elementwise.

        Each item holds (value, master or None, gradient), the slices of the states by name, and
        the weight decay factor of the values.  The time until the caller requests the next item is
        recorded as "update" in the trace.
        """
        for piece in self._pieces(decay):
            with self.parameters.mesh.trace.span("update"):
                yield piece

    def _pieces(self, decay: float) -> Iterator[tuple]:
        units = [[update] for update in self._stretches()]
        for [update], [states] in zip(units, self._at_hand(units), strict=True):
            value = states.pop(_VALUE)
            yield (value, states.get(MASTER.name), update.grad), states, update.keep(decay)

    def _stretches(self) -> Iterator[_Update]:
        """Yield the slices to update, split into short slices if arrays are offloaded.

        Short slices limit the memory of the copies.
        """
        for piece in self.parameters.pieces:
            update = self._update_of(piece)
            size = update.grad.size
            step = _STRETCH if any(map(update.lies_elsewhere, update.arrays)) else size
            for start in range(0, max(1, size), max(1, step)):
                part = slice(start, start + step)
                here = {name: array[part] for name, array in update.arrays.items()}
                yield update._replace(grad=update.grad[part], arrays=here)

    def _update_of(self, piece: UpdateSlice) -> _Update:
        first, last, parameters = piece.items[0], piece.items[-1], self.parameters
        arrays = {_VALUE: parameters.flat(first)[piece.value]}
        for spec in self.inner:
            if spec.of(first.name, first.shape):
                slices = self.slices[spec.name]
                stretch = slice(slices[first].start, slices[last].stop)
                arrays[spec.name] = self.states[spec.name][stretch]
        return _Update(first, parameters, parameters.grad[piece.grad], arrays)

    def matrices(self, decay: float) -> Iterator[tuple[WholeMatrix, tuple, dict, float]]:
        """Yield the unsharded matrices to update.

        Each item holds the `WholeMatrix`; (value, master or None, gradient) as blocks of its
        shape; the blocks of the states by name; and the weight decay factor of the value.  The
        time until the caller requests the next item is recorded as "update" in the trace.
        """
        for [matrix] in self.batches(self._each_matrix(), decay):
            with self.parameters.mesh.trace.span("update"):
                yield matrix

    def _each_matrix(self) -> list[list[WholeMatrix]]:
        return [[part] for part in self.parameters.matrices]

    def batches(
        self, batches: Sequence[Sequence[WholeMatrix]], decay: float
    ) -> Iterator[list[tuple[WholeMatrix, tuple, dict, float]]]:
        """Yield one list per batch, with an item of `matrices` for each matrix in the batch.

        All ranks that share a matrix must iterate over the same matrices, because an update may
        require an all-reduce over the mesh axes that shard the matrix.
        """
        units = [[*map(self._update_of_matrix, batch)] for batch in batches]
        for batch, unit, at_hand in zip(batches, units, self._at_hand(units), strict=True):
            yield [
                self._as_blocks(*matrix, decay)
                for matrix in zip(batch, unit, at_hand, strict=True)
            ]

    def _update_of_matrix(self, part: WholeMatrix) -> _Update:
        parameters, item = self.parameters, part.item
        arrays = {_VALUE: parameters.flat(item)[part.value]}
        arrays |= {spec.name: state for spec, state in self.states_of(item) if not spec.outer}
        return _Update(item, parameters, parameters.grad[part.grad], arrays)

    def _as_blocks(
        self, part: WholeMatrix, update: _Update, flat: dict[str, Array], decay: float
    ) -> tuple:
        value = flat.pop(_VALUE).reshape(part.shape)
        states = {
            spec.name: flat[spec.name].reshape(self.block(spec, part.item))
            for spec in self.inner
            if spec.name in flat
        }
        arrays = value, states.get(MASTER.name), update.grad.reshape(part.shape)
        return part, arrays, states, update.keep(decay)

    def outer(
        self, items: Sequence[Parameter] | None = None
    ) -> Iterator[tuple[Array, Array, Array, dict[str, Array]]]:
        """Yield the arrays of the outer optimizer for each parameter that this rank updates.

        `items` selects parameters; by default, all are yielded.  Each item holds the exact values
        (the master copy, if there is one), the values, the gradients, and the outer states by
        name, all flat.  The time until the caller requests the next item is recorded as "update"
        in the trace.
        """
        chosen = self.parameters if items is None else items
        units = [[self._outer_update(item)] for item in chosen if not item.frozen]
        for [update], [arrays] in zip(units, self._at_hand(units), strict=True):
            with self.parameters.mesh.trace.span("update"):
                value = arrays[_VALUE]
                yield arrays.get(MASTER.name, value), value, update.grad, arrays

    def _outer_update(self, item: Parameter) -> _Update:
        slices, parameters = self.parameters.slices[item], self.parameters
        arrays = {_VALUE: parameters.flat(item)[slices.own_value]}
        kept = [pair for pair in self.states_of(item) if pair[0].outer or pair[0] is MASTER]
        arrays |= {spec.name: state for spec, state in kept}
        return _Update(item, parameters, parameters.grad[slices.own_grad], arrays)

    def _at_hand(self, units: Sequence[Sequence[_Update]]) -> Iterator[list[dict[str, Array]]]:
        """Load the offloaded arrays of each unit (a group of updates), and yield its arrays."""
        mesh = self.parameters.mesh
        moved = [
            [
                (number, name)
                for number, update in enumerate(unit)
                for name in filter(update.lies_elsewhere, update.arrays)
            ]
            for unit in units
        ]
        kept = [
            [unit[number].arrays[name] for number, name in keys]
            for unit, keys in zip(units, moved, strict=True)
        ]
        copies = walk(store_of(mesh.pool), kept, mesh.trace) if any(kept) else kept
        for unit, keys, arrays in zip(units, moved, copies, strict=True):
            found = [dict(update.arrays) for update in unit]
            for (number, name), array in zip(keys, arrays, strict=True):
                found[number][name] = array
            yield found


class AdamW(Optimizer):
    """AdamW with decoupled weight decay (Loshchilov and Hutter, arXiv:1711.05101)."""

    STATES = (StateSpec("first"), StateSpec("second"))

    def update(self, learning_rate: float, scale: float) -> None:
        """Update the parameters, using `scale` times the gradients.

        m = b1 m + (1 - b1) g;  v = b2 v + (1 - b2) g^2;
        w = (1 - lr decay) w - lr / (1 - b1^t) m / (sqrt(v / (1 - b2^t)) + eps)
        """
        self.steps += 1
        factors = self.factors(learning_rate, scale)
        for arrays, states, keep in self.pieces(learning_rate * self.weight_decay):
            moments = states["first"], states["second"]
            adamw(*arrays, *moments, self.constants, (*factors, keep))

    def factors(self, learning_rate: float, scale: float) -> tuple[float, float, float]:
        """Return AdamW's factors for the gradient, the update, and sqrt(second moment)."""
        rate = learning_rate / (1 - self.constants["beta1"] ** self.steps)
        return scale, rate, 1 / sqrt(1 - self.constants["beta2"] ** self.steps)


class SGD(Optimizer):
    """Stochastic gradient descent, w = (1 - lr decay) w - lr g."""

    def update(self, learning_rate: float, scale: float) -> None:
        self.steps += 1
        for arrays, _, keep in self.pieces(learning_rate * self.weight_decay):
            descend(*arrays, (learning_rate * scale, keep))


# Learning rate decay: functions that map the completed fraction of the decay to a factor between 1
# (peak learning rate) and 0 (lowest rate).
_LEFT: dict[str, Callable[[float], float]] = {
    "cosine": lambda done: (1 + cos(pi * done)) / 2,
    "linear": lambda done: 1 - done,
    "wsd": lambda done: 1 - sqrt(done),
    "wsd-linear": lambda done: 1 - done,
}


def learning_rate(train: TrainConfig, step: int) -> float:
    """Return the learning rate of a step (counted from 0).

    The rate rises linearly over `train.warmup` steps.  It then stays constant, or decays to
    the lowest rate, which it reaches after `train.decaying()` steps: as a cosine, linearly,
    or only in the last steps (WSD) as 1 - sqrt (arXiv:2404.06395, section 4) or
    linearly (arXiv:2405.18392, section 3).
    """
    if step < train.warmup:
        return train.learning_rate * (step + 1) / train.warmup
    if train.decay == "constant":
        return train.learning_rate
    end, falling = train.decaying(), train.falling()
    done = max(0.0, 1 - (end - step) / falling) if step < end else 1.0
    left = _LEFT[train.decay](done)
    least = train.least_rate()
    return least + (train.learning_rate - least) * left
