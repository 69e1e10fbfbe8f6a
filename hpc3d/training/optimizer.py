"""Updates of the flat parameter array, and the learning rate over the steps.

All that others ask of an optimiser is declared by its class.
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

_STRETCH = 1 << 20  # elements of what is offloaded that are in memory at once
_LARGE, _ROWS = "layers.0.up.weight", 1 << 20  # a matrix


def every(name: str, shape: Sequence[int]) -> bool:
    """Any parameter."""
    return True


def is_matrix(name: str, shape: Sequence[int]) -> bool:
    """A parameter [inputs, outputs], or a stack of them, [inputs, experts, outputs]."""
    return len(shape) > 1


def is_vector(name: str, shape: Sequence[int]) -> bool:
    return not is_matrix(name, shape)


class StateSpec(NamedTuple):
    """An array that an optimiser keeps, zero at first, of the type of gradients or of `dtype`.
    `name` is its kind in checkpoints.

    `of(name, shape)` says which parameters have it.  There is one element `per` so many rows and
    columns of a matrix, None being all of them: (1, 1) is elementwise, (1, None) has one element a
    row.  What is not elementwise is of whole matrices alone.
    """

    name: str
    dtype: str | None = None
    per: tuple[int | None, int | None] = (1, 1)
    of: Which = every

    @property
    def elementwise(self) -> bool:
        return self.per == (1, 1)

    def shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The global shape of the state of a parameter of a global `shape`."""
        if self.elementwise:
            return (*shape,)
        ends = [
            -(-size // per) if per else 1
            for size, per in zip((shape[0], shape[-1]), self.per, strict=True)
        ]
        return (ends[0], *shape[1:-1], ends[1])

    def density(self) -> float:
        """The elements that there are for each one of a large matrix of a block."""
        rows, columns = self.per
        held = rows and columns and self.of(_LARGE, (_ROWS, _ROWS))
        return 1 / (rows * columns) if held else 0.0

    def layout(self, layout: Layout) -> Layout:
        """How that lies where the parameter has `layout`: along the axes that cut what is one
        element the ranks have the same."""
        rows, columns = self.per
        dims = [" ".join(dim) for dim in layout]
        dims[0] = dims[0] if rows else ""
        dims[-1] = dims[-1] if columns else ""
        return Layout(*dims, owned=" ".join(layout.owned) if rows else "")


def _keeps(spec: StateSpec, item: Parameter) -> bool:
    """Whether there is such a state of a parameter."""
    return spec.of(item.name, item.shape) and not item.frozen and not item.sign_rate


_VALUE = "value"


class _Update(NamedTuple):
    """The arrays of an update beside the gradient: the value and the states, by name.  `item` is
    the first parameter of those that they are of."""

    item: Parameter
    parameters: Parameters
    grad: Array
    arrays: dict[str, Array]

    def lies_elsewhere(self, name: str) -> bool:
        """Whether an array is offloaded."""
        if name == _VALUE:
            return self.parameters.lies_elsewhere(self.item)
        return "optimizer" in self.parameters.offload

    def keep(self, decay: float) -> float:
        return 1 - decay if self.item.decay else 1.0


MASTER = StateSpec("master")  # of every optimiser, where parameters have 16 bits


class Optimizer:
    """Walks through this rank's own parameters, and has done so `steps` times.  Those of 16 bits
    have a `master` copy in float32, which is updated and then rounded (Micikevicius et al.,
    arXiv:1710.03740, section 3.1).

    `constants` are those of `TrainConfig.constants`.  A subclass declares the STATES that it
    keeps, and which matrices it wants whole: then `matrices` has them as blocks, and `pieces`
    has the others.  `states` are flat arrays by name, and `places` where the state of a
    parameter lies in them.  Where they are offloaded, what `pieces` and `matrices` give are copies
    of a part of them, until the next one is asked for.
    """

    STATES: tuple[StateSpec, ...] = ()
    WHOLE_MATRICES: Which = no_matrix

    def __init__(self, parameters: Parameters, weight_decay: float, **constants: float) -> None:
        self.parameters, self.weight_decay, self.steps = parameters, weight_decay, 0
        self.constants: Mapping[str, float] = constants
        narrow = parameters.wide != parameters.dtype
        self.specs = (MASTER, *self.STATES) if narrow else self.STATES
        self.places: dict[str, Mapping[Parameter, slice]] = {}
        self.states = {spec.name: self._zeros(spec) for spec in self.specs}
        if narrow:
            for (value, master, _), *_ in self._pieces(0.0):
                master[...] = value
            for [(_, (value, master, _), *_)] in self.batches(self._each_matrix(), 0.0):
                master[...] = value

    @classmethod
    def at_once(cls, mesh: Mesh) -> int:
        """How many layers alike are updated together, so that each costs less than one alone."""
        return 1

    def _zeros(self, spec):
        """The array of a state, once its `places` are known."""
        items = [*self.parameters]
        edges = [*accumulate((self._size(spec, item) for item in items), initial=0)]
        self.places[spec.name] = dict(zip(items, map(slice, edges, edges[1:]), strict=False))
        dtype, mesh = spec.dtype or self.parameters.wide, self.parameters.mesh
        if "optimizer" not in self.parameters.offload:
            return mesh.zeros((edges[-1],), dtype, "optimizer")
        state = store_of(mesh.pool).empty((edges[-1],), dtype)
        state.fill(0)
        return state

    def _size(self, spec: StateSpec, item: Parameter) -> int:
        """The elements that this rank has of a state of a parameter."""
        if not _keeps(spec, item):
            return 0
        if spec.elementwise:
            return self.parameters.places[item].own
        return prod(self.block(spec, item)) if self.parameters.updates(item) else 0

    def block(self, spec: StateSpec, item: Parameter) -> tuple[int, ...]:
        """The shape of what a rank has of a state of a matrix that it updates."""
        return spec.layout(item.updated_layout).block(spec.shape(item.shape), self.parameters.mesh)

    def states_of(self, item: Parameter) -> Iterator[tuple[StateSpec, Array]]:
        """The states that there are of a parameter, and this rank's elements of each."""
        for spec in self.specs:
            if _keeps(spec, item):
                yield spec, self.states[spec.name][self.places[spec.name][item]]

    def pieces(
        self, decay: float
    ) -> Iterator[tuple[tuple[Array, Array | None, Array], dict[str, Array], float]]:
        """Values to update, their masters or None, and gradients; name -> the same stretch of a
        state; and the part of a value that stays.  The time until the next one is that of an
        update in the trace."""
        for piece in self._pieces(decay):
            with self.parameters.mesh.trace.span("update"):
                yield piece

    def _pieces(self, decay: float) -> Iterator[tuple]:
        units = [[update] for update in self._stretches()]
        for [update], [states] in zip(units, self._at_hand(units), strict=True):
            value = states.pop(_VALUE)
            yield (value, states.get(MASTER.name), update.grad), states, update.keep(decay)

    def _stretches(self) -> Iterator[_Update]:
        """The pieces; where something of them lies elsewhere, cut into stretches of which few are
        a small part of a large model."""
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
        for spec in self.specs:
            if spec.of(first.name, first.shape):
                places = self.places[spec.name]
                stretch = slice(places[first].start, places[last].stop)
                arrays[spec.name] = self.states[spec.name][stretch]
        return _Update(first, parameters, parameters.grad[piece.grad], arrays)

    def matrices(self, decay: float) -> Iterator[tuple[WholeMatrix, tuple, dict, float]]:
        """The `WholeMatrix` of each; value, master or None and gradient as blocks of its shape;
        name -> the block of a state; and the part of a value that stays.

        The time until the next one is that of an update in the trace.
        """
        for [matrix] in self.batches(self._each_matrix(), decay):
            with self.parameters.mesh.trace.span("update"):
                yield matrix

    def _each_matrix(self) -> list[list[WholeMatrix]]:
        return [[part] for part in self.parameters.matrices]

    def batches(
        self, batches: Sequence[Sequence[WholeMatrix]], decay: float
    ) -> Iterator[list[tuple[WholeMatrix, tuple, dict, float]]]:
        """What `matrices` gives of each matrix of a batch, of all of them at once.

        Ranks that have the other blocks of a matrix walk through the same ones: an update may
        reduce over the axes of its layout.
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
        arrays |= {spec.name: state for spec, state in self.states_of(item)}
        return _Update(item, parameters, parameters.grad[part.grad], arrays)

    def _as_blocks(
        self, part: WholeMatrix, update: _Update, flat: dict[str, Array], decay: float
    ) -> tuple:
        value = flat.pop(_VALUE).reshape(part.shape)
        states = {
            spec.name: flat[spec.name].reshape(self.block(spec, part.item))
            for spec in self.specs
            if spec.name in flat
        }
        arrays = value, states.get(MASTER.name), update.grad.reshape(part.shape)
        return part, arrays, states, update.keep(decay)

    def _at_hand(self, units: Sequence[Sequence[_Update]]) -> Iterator[list[dict[str, Array]]]:
        """The arrays of each update of a unit, unit after unit: copies of what lies elsewhere."""
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
    """Decoupled weight decay (Loshchilov and Hutter, arXiv:1711.05101), on this rank's blocks."""

    STATES = (StateSpec("first"), StateSpec("second"))

    def update(self, learning_rate: float, scale: float) -> None:
        """One step with the gradients times `scale`.

        m = b1 m + (1 - b1) g;  v = b2 v + (1 - b2) g^2;
        w = (1 - lr decay) w - lr / (1 - b1^t) m / (sqrt(v / (1 - b2^t)) + eps)
        """
        self.steps += 1
        factors = self.factors(learning_rate, scale)
        for arrays, states, keep in self.pieces(learning_rate * self.weight_decay):
            moments = states["first"], states["second"]
            adamw(*arrays, *moments, self.constants, (*factors, keep))

    def factors(self, learning_rate: float, scale: float) -> tuple[float, float, float]:
        """Of gradients, of the step, and of the root of the second moment."""
        rate = learning_rate / (1 - self.constants["beta1"] ** self.steps)
        return scale, rate, 1 / sqrt(1 - self.constants["beta2"] ** self.steps)


class SGD(Optimizer):
    """w = (1 - lr decay) w - lr g."""

    def update(self, learning_rate: float, scale: float) -> None:
        self.steps += 1
        for arrays, _, keep in self.pieces(learning_rate * self.weight_decay):
            descend(*arrays, (learning_rate * scale, keep))


# The part of the way down that is left when a part of the decay is done.
_LEFT: dict[str, Callable[[float], float]] = {
    "cosine": lambda done: (1 + cos(pi * done)) / 2,
    "linear": lambda done: 1 - done,
    "wsd": lambda done: 1 - sqrt(done),
    "wsd-linear": lambda done: 1 - done,
}


def learning_rate(train: TrainConfig, step: int) -> float:
    """Linear warm-up over `train.warmup` steps, then constant, or down to the lowest, where it
    stays once `train.decaying()` steps are done: as a cosine, linearly, or in the last of them
    (arXiv:2404.06395, section 4) as 1 - sqrt or linearly (arXiv:2405.18392, section 3)."""
    if step < train.warmup:
        return train.learning_rate * (step + 1) / train.warmup
    if train.decay == "constant":
        return train.learning_rate
    end, falling = train.decaying(), train.falling()
    done = max(0.0, 1 - (end - step) / falling) if step < end else 1.0
    left = _LEFT[train.decay](done)
    least = train.least_rate()
    return least + (train.learning_rate - least) * left
