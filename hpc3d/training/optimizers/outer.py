"""Local updates: workers train on their own, and an outer optimizer averages their parameters.

A worker is a group of replicas along the axis d. The workers are numbered along the axis COPIES.
Every H steps, the workers agree: with their parameters w_i, the agreed parameters a of the last
agreement, and the outer learning rate and momentum (lr, mu), they compute

    D = a - mean of w_i,   u = mu u + D,   a = a - lr (D + mu u),   w_i = a.

With lr = 1 and mu = 0, this is the mean of the workers (local SGD; Stich, arXiv:1805.09767). With
Nesterov momentum, it is DiLoCo (Douillard et al., arXiv:2311.08105). The states of the inner
optimizer remain with each worker.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from hpc3d.comm.mesh import COPIES
from hpc3d.ops.update import descend, nesterov
from hpc3d.training.optimizers.optimizer import StateSpec

if TYPE_CHECKING:
    from hpc3d.arrays.array import Array
    from hpc3d.config.input_file import Config, ParallelConfig
    from hpc3d.pipeline.gradient_buckets import Buckets
    from hpc3d.training.optimizers.optimizer import Optimizer

_AGREED = StateSpec("agreed", outer=True)
_MOMENTUM = StateSpec("outer_momentum", outer=True)
OUTER_STATES = _AGREED, _MOMENTUM


def outer_states(parallel: ParallelConfig) -> tuple[StateSpec, ...]:
    """Return the states of the outer optimizer, which are empty without local updates."""
    if not parallel.local_steps:
        return ()
    return OUTER_STATES if parallel.outer_momentum else (_AGREED,)


class OuterOptimizer:
    """Outer optimizer of a run with local updates.

    Its states are stored by `optimizer`, the inner optimizer. `buckets` reduces the differences
    between the agreed and the current parameters, which replace the gradients, over the workers.
    """

    def __init__(self, config: Config, optimizer: Optimizer, buckets: Buckets) -> None:
        parallel = config.parallel
        self.every, self.steps = parallel.local_steps, config.train.steps
        self.rate, self.momentum = parallel.outer_learning_rate, parallel.outer_momentum
        self.optimizer, self.buckets = optimizer, buckets
        self.workers = optimizer.parameters.mesh.size(COPIES)
        self.start()

    def start(self) -> None:
        """Set the agreed parameters to the current parameters."""
        for exact, _, _, states in self.optimizer.outer():
            states[_AGREED.name][...] = exact

    def is_in(self, arrays: Collection[tuple[str, str]]) -> bool:
        """Return True if a checkpoint with these arrays (name, kind) has the agreed parameters."""
        return any(kind == _AGREED.name for _, kind in arrays)

    def is_due(self, number: int) -> bool:
        """Return True if the workers agree after step `number`: every H steps and at the end."""
        return agrees_after(number, self.every, self.steps)

    def agree(self) -> None:
        """Set the parameters of all workers to the new agreed parameters."""
        for exact, _, grad, states in self.optimizer.outer():
            grad[...] = states[_AGREED.name]
            grad -= exact
        self.buckets.sum_over_workers()
        for exact, value, grad, states in self.optimizer.outer():
            agreed = states[_AGREED.name]
            self._move(agreed, states.get(_MOMENTUM.name), grad)
            exact[...] = agreed
            if value is not exact:
                value[...] = agreed

    def _move(self, agreed: Array, velocity: Array | None, total: Array) -> None:
        """Update the agreed parameters, given the sum of the differences over the workers."""
        if velocity is None:
            descend(agreed, None, total, (self.rate / self.workers, 1.0))
            return
        nesterov(total, velocity, total, 1 / (self.workers * (1 - self.momentum)), self.momentum)
        descend(agreed, None, total, (self.rate, 1.0))


def agrees_after(number: int, every: int, steps: int) -> bool:
    """Return True if workers agree after step `number` of a run with `steps` steps."""
    return (number + 1) % every == 0 or number + 1 == steps
