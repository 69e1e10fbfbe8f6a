"""Local updates: workers train on their own, and an outer optimizer averages their parameters.

A worker is a group of replicas along the axis d. The workers are numbered along the axis COPIES.
Every H steps, the workers agree: with their parameters w_i, the agreed parameters a of the last
agreement, and the outer learning rate and momentum (lr, mu), they compute

    D = a - mean of w_i,   u = mu u + D,   a = a - lr (D + mu u),   w_i = a.

With lr = 1 and mu = 0, this is the mean of the workers (local SGD; Stich, arXiv:1805.09767). With
Nesterov momentum, it is DiLoCo (Douillard et al., arXiv:2311.08105). The states of the inner
optimizer remain with each worker.

A stale agreement is applied H steps later, so that its communication overlaps with training. With
the parameters s_i of the workers at its start, it keeps the updates of the H steps:

    D = a - mean of s_i,   u = mu u + D,   a = a - lr (D + mu u),   w_i = a + (w_i - s_i).

With lr = 1 and mu = 0, this is CoCoD-SGD (Shen et al., arXiv:1906.12043). The model is divided
into fragments, whose reductions are spread over the H steps, as in Streaming DiLoCo (Douillard et
al., arXiv:2501.18512).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Sequence
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, NamedTuple

from hpc3d.comm.mesh import COPIES
from hpc3d.ops.update import descend, nesterov
from hpc3d.training.optimizers.optimizer import MASTER, StateSpec

if TYPE_CHECKING:
    from hpc3d.arrays.array import Array
    from hpc3d.config.input_file import Config, ParallelConfig
    from hpc3d.pipeline.gradient_buckets import Buckets, GradientBucket
    from hpc3d.training.optimizers.optimizer import Optimizer

_AGREED = StateSpec("agreed", outer=True)
_MOMENTUM = StateSpec("outer_momentum", outer=True)
_DEVIATION = StateSpec("deviation", outer=True)
OUTER_STATES = _AGREED, _MOMENTUM, _DEVIATION
# Kinds of arrays that are identical on all workers only if these have agreed
OF_WORKERS = "value", MASTER.name, _DEVIATION.name


def outer_states(parallel: ParallelConfig) -> tuple[StateSpec, ...]:
    """Return the states of the outer optimizer, which are empty without local updates."""
    if not parallel.local_steps:
        return ()
    momentum, stale = parallel.outer_momentum > 0, parallel.sync == "stale"
    return _AGREED, *[_MOMENTUM] * momentum, *[_DEVIATION] * stale


def common_kinds(agreed: bool) -> set[str]:
    """Return the kinds of arrays that are identical on all workers.

    `agreed` is true if the workers have the same parameters.
    """
    return {_AGREED.name, _MOMENTUM.name, *(OF_WORKERS if agreed else ())}


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

    def is_agreed(self, number: int) -> bool:
        """Return True if all workers have the same parameters after step `number`."""
        return agrees_after(number, self.every, self.steps)

    def after(self, number: int) -> bool:
        """Agree after step `number` if it is due; return True if the parameters have changed."""
        if agreed := self.is_agreed(number):
            self.agree()
        return agreed

    def complete(self) -> None:
        """Complete the collectives in flight, so that the states can be saved."""

    def agree(self) -> None:
        """Set the parameters of all workers to the new agreed parameters."""
        for exact, _, grad, states in self.optimizer.outer():
            grad[...] = states[_AGREED.name]
            grad -= exact
        self.buckets.sum_over_workers()
        for exact, value, grad, states in self.optimizer.outer():
            self._move(grad, states)
            exact[...] = states[_AGREED.name]
            if value is not exact:
                value[...] = exact

    def _move(self, total: Array, states: dict[str, Array]) -> None:
        """Update the agreed parameters, given the sum of the differences over the workers."""
        agreed, velocity = states[_AGREED.name], states.get(_MOMENTUM.name)
        if velocity is None:
            descend(agreed, None, total, (self.rate / self.workers, 1.0))
            return
        nesterov(total, velocity, total, 1 / (self.workers * (1 - self.momentum)), self.momentum)
        descend(agreed, None, total, (self.rate, 1.0))


class _Fragment(NamedTuple):
    """Bucket whose reduction starts `first` and ends `last` steps after the start of a round."""

    bucket: GradientBucket
    first: int
    last: int


class StaleOuterOptimizer(OuterOptimizer):
    """Outer optimizer whose agreements end H steps after their start.

    The last step of a run completes the agreement in flight, and then all workers agree. The state
    `deviation` contains the parameters s_i of the worker at the start of an agreement, and s_i - a
    as soon as the new agreed parameters a are known.
    """

    def __init__(self, config: Config, optimizer: Optimizer, buckets: Buckets) -> None:
        super().__init__(config, optimizer, buckets)
        for bucket in buckets.of_workers:
            bucket.copied = True
        self.fragments = [*_fragments(buckets.of_workers, self.every)]
        self.waiting: deque[_Fragment] = deque()
        self.in_flight: deque[_Fragment] = deque()

    def keep_largest(self, steps: int) -> None:
        """Reduce only the fragments that are in flight at the same time in an agreement.

        An agreement of `steps` steps is divided into fragments, and the largest part of it that is
        in flight in one step is kept. Predictions use this method, which leaves out the rest.
        """
        fragments = [*_fragments(self.buckets.of_workers, steps)]
        parts = [
            [other.bucket for other in fragments if other.first <= each.first < other.last]
            for each in fragments
        ]
        largest = max(parts, key=lambda part: sum(each.nbytes for each in part), default=[])
        self.fragments = [*_fragments(largest, self.every)]

    def is_agreed(self, number: int) -> bool:
        return number + 1 == self.steps

    def after(self, number: int) -> bool:
        offset, last = (number + 1) % self.every, self.is_agreed(number)
        self._receive(offset or self.every)
        if last:
            self.complete()
        if ends := last or not offset:
            self._begin()
        if last:
            self.agree()
        else:
            self._post(offset)
        return ends

    def complete(self) -> None:
        for fragment in self.fragments:
            self._receive(fragment.first)
            self._post(fragment.first)
        self._receive(self.every)
        self.buckets.begin()

    def agree(self) -> None:
        super().agree()
        self.waiting.clear()
        for *_, states in self.optimizer.outer():
            states[_DEVIATION.name].fill(0)

    def _begin(self) -> None:
        """Apply the agreement that ends, if any, and start the next one."""
        for exact, value, _, states in self.optimizer.outer():
            deviation = states[_DEVIATION.name]
            exact -= deviation
            deviation[...] = exact
            if value is not exact:
                value[...] = exact
        self.waiting.extend(self.fragments)

    def _post(self, offset: int) -> None:
        """Start the reductions that are due `offset` steps after the start of the agreement."""
        while self.waiting and self.waiting[0].first <= offset:
            fragment = self.waiting.popleft()
            for _, _, grad, states in self.optimizer.outer(fragment.bucket.items):
                grad[...] = states[_AGREED.name]
                grad -= states[_DEVIATION.name]
            fragment.bucket.post()
            self.in_flight.append(fragment)

    def _receive(self, offset: int) -> None:
        """Complete the reductions that are due, and update the agreed parameters."""
        while self.in_flight and self.in_flight[0].last <= offset:
            bucket = self.in_flight.popleft().bucket
            bucket.wait()
            for _, _, grad, states in self.optimizer.outer(bucket.items):
                self._move(grad, states)
                deviation = states[_DEVIATION.name]
                deviation -= states[_AGREED.name]


def outer_optimizer_of(
    config: Config, optimizer: Optimizer, buckets: Buckets
) -> OuterOptimizer | None:
    """Create the outer optimizer of a run, or return `None` without local updates."""
    if not config.parallel.local_steps:
        return None
    kinds = {"blocking": OuterOptimizer, "stale": StaleOuterOptimizer}
    return kinds[config.parallel.sync](config, optimizer, buckets)


def _fragments(buckets: Sequence[GradientBucket], steps: int) -> Iterator[_Fragment]:
    """Spread the reductions of buckets over `steps` steps, each in proportion to its size."""
    edges = [*accumulate((bucket.nbytes for bucket in buckets), initial=0)]
    total = max(1, edges[-1])
    for bucket, (start, stop) in zip(buckets, pairwise(edges), strict=True):
        first = min(start * steps // total, steps - 1)
        yield _Fragment(bucket, first, max(first + 1, -(-stop * steps // total)))


def agrees_after(number: int, every: int, steps: int) -> bool:
    """Return True if workers agree after step `number` of a run with `steps` steps."""
    return (number + 1) % every == 0 or number + 1 == steps
