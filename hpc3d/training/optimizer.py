"""Updates of the flat parameter array, and the learning rate over the steps.

All that others ask of an optimiser is declared by its class.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import cos, pi, sqrt
from typing import TYPE_CHECKING, NamedTuple

from hpc3d.ops.update import adamw, descend

if TYPE_CHECKING:
    from hpc3d.arrays.array import Array
    from hpc3d.config.input_file import TrainConfig
    from hpc3d.model.parameters import Parameters

FLOOR = 0.1  # the part of the learning rate that is left when it has decayed


class StateSpec(NamedTuple):
    """An array that an optimiser keeps, zero at first: one element per element that it updates,
    of the type of gradients or of `dtype`.  `name` is its kind in checkpoints."""

    name: str
    dtype: str | None = None


MASTER = StateSpec("master")  # of every optimiser, where parameters have 16 bits


class Optimizer:
    """Walks through this rank's own parameters, and has done so `steps` times.  Those of 16 bits
    have a `master` copy in float32, which is updated and then rounded (Micikevicius et al.,
    arXiv:1710.03740, section 3.1).

    `constants` are those of `TrainConfig.constants`.  A subclass declares the `states` that it
    keeps, name -> array, and whether it wants whole matrices: then `matrices` has them as blocks,
    and `pieces` has the vectors alone.
    """

    STATES: tuple[StateSpec, ...] = ()
    WHOLE_MATRICES = False

    def __init__(self, parameters: Parameters, weight_decay: float, **constants: float) -> None:
        self.parameters, self.weight_decay, self.steps = parameters, weight_decay, 0
        self.constants: Mapping[str, float] = constants
        narrow = parameters.wide != parameters.dtype
        specs = (MASTER, *self.STATES) if narrow else self.STATES
        self.states = {spec.name: self._zeros(spec) for spec in specs}
        self.master = self.states.get(MASTER.name)
        if narrow:
            for part in [*parameters.pieces, *parameters.matrices]:
                self.master[part.state] = parameters.value[part.value]

    def _zeros(self, spec):
        shape, dtype = (self.parameters.states,), spec.dtype or self.parameters.wide
        return self.parameters.mesh.zeros(shape, dtype, "optimizer")

    def pieces(
        self, decay: float
    ) -> Iterator[tuple[tuple[Array, Array | None, Array], slice, float]]:
        """Values to update, their masters or None, gradients and the slice of their state; and
        the part of a value that stays."""
        for piece in self.parameters.pieces:
            keep = 1 - decay if piece.decay else 1.0
            value, grad = self.parameters.value[piece.value], self.parameters.grad[piece.grad]
            master = None if self.master is None else self.master[piece.state]
            yield (value, master, grad), piece.state, keep

    def matrices(self, decay: float) -> Iterator[tuple]:
        """The `WholeMatrix` of each; value, master or None and gradient as blocks of its shape;
        name -> the block of a state; and the part of a value that stays.

        Ranks that have the other blocks of a matrix walk through the same ones: an update may
        reduce over the axes of its layout.
        """
        for part in self.parameters.matrices:
            value, grad = self.parameters.value[part.value], self.parameters.grad[part.grad]
            states = {
                name: state[part.state].reshape(part.shape) for name, state in self.states.items()
            }
            arrays = value.reshape(part.shape), states.get(MASTER.name), grad.reshape(part.shape)
            yield part, arrays, states, 1 - decay if part.item.decay else 1.0


class AdamW(Optimizer):
    """Decoupled weight decay (Loshchilov and Hutter, arXiv:1711.05101), on this rank's blocks."""

    STATES = (StateSpec("first"), StateSpec("second"))

    def update(self, learning_rate: float, scale: float) -> None:
        """One step with the gradients times `scale`.

        m = b1 m + (1 - b1) g;  v = b2 v + (1 - b2) g^2;
        w = (1 - lr decay) w - lr / (1 - b1^t) m / (sqrt(v / (1 - b2^t)) + eps)
        """
        self.steps += 1
        rate = learning_rate / (1 - self.constants["beta1"] ** self.steps)
        root = 1 / sqrt(1 - self.constants["beta2"] ** self.steps)
        for arrays, state, keep in self.pieces(learning_rate * self.weight_decay):
            moments = self.states["first"][state], self.states["second"][state]
            adamw(*arrays, *moments, self.constants, (scale, rate, root, keep))


class SGD(Optimizer):
    """w = (1 - lr decay) w - lr g."""

    def update(self, learning_rate: float, scale: float) -> None:
        self.steps += 1
        for arrays, _, keep in self.pieces(learning_rate * self.weight_decay):
            descend(*arrays, (learning_rate * scale, keep))


def learning_rate(train: TrainConfig, step: int) -> float:
    """Linear warm-up over `train.warmup` steps, then constant, or cosine or linear to a tenth,
    where it stays once `train.decaying()` steps are done."""
    if step < train.warmup:
        return train.learning_rate * (step + 1) / train.warmup
    end = train.decaying()
    done = (step - train.warmup) / (end - train.warmup) if step < end else 1.0
    left = {"cosine": (1 + cos(pi * done)) / 2, "linear": 1 - done, "constant": 1.0}[train.decay]
    return train.learning_rate * (FLOOR + (1 - FLOOR) * left)
