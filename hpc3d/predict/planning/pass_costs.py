"""What a layer and the two ends of a model cost: the program itself, on a machine's clock, once.

A step is made of few different passes.  Those of one layer, of the embeddings and of the head are
run on arrays without data, and hpc3d.predict.planning.estimate puts a step together from them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from math import ceil, inf
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from hpc3d.arrays.pool import OFFLOADED
from hpc3d.comm.communicator import Pending
from hpc3d.comm.mesh import data_axes, expert_data_axes, plane, queue_of
from hpc3d.model.layers import immediately
from hpc3d.model.microbatch import Microbatch
from hpc3d.model.parameters import Parameters
from hpc3d.model.stage import LAYER, build
from hpc3d.pipeline.engine import DeferredWeightGrads
from hpc3d.pipeline.gradient_buckets import Buckets
from hpc3d.predict.simulation.abstract_gpu import pool_of
from hpc3d.predict.simulation.simulated_clock import Clock, HostDrivenClock, representative
from hpc3d.training.gradient_compression import GradientCompression, compression_of
from hpc3d.training.microbatch_loader import DeviceCache
from hpc3d.training.optimizers import optimizer_of
from hpc3d.training.trainer import spec_of

if TYPE_CHECKING:
    from hpc3d.arrays.array import Array
    from hpc3d.config.input_file import Config
    from hpc3d.model.stage import LayerRange
    from hpc3d.pipeline.stage_protocol import PipelineStage
    from hpc3d.predict.machine.machine import Machine


class SingleStage(NamedTuple):
    """The place of a stage that has no others around it."""

    rank: int = 0
    size: int = 1


class Pass(NamedTuple):
    """Seconds of a pass, and those of its calls, by axis; its bytes, more than there were before:
    those it leaves behind, its result left out, and those of its peak.  Of the seconds those in
    which a core is `busy`, and by axis those of calls in which the rank does nothing, `idle`:
    it waits for its device, or for the card of its host."""

    seconds: float
    waits: Counter
    left: int
    peak: int
    busy: float
    idle: Counter

    def __add__(self, other: Pass) -> Pass:
        """One pass after the other; the second has its peak on top of what the first left."""
        left, peak = self.left + other.left, max(self.peak, self.left + other.peak)
        waits, busy = self.waits + other.waits, self.busy + other.busy
        same = self.idle is self.waits and other.idle is other.waits
        idle = waits if same else self.idle + other.idle
        return Pass(self.seconds + other.seconds, waits, left, peak, busy, idle)

    def __mul__(self, times: float) -> Pass:
        """As many of it, one after the other."""
        if not times:
            return NOTHING
        waits = _multiplied(self.waits, times)
        idle = waits if self.idle is self.waits else _multiplied(self.idle, times)
        peak = (times - 1) * max(0, self.left) + self.peak
        busy = times * self.busy
        return Pass(times * self.seconds, waits, times * self.left, peak, busy, idle)


def _multiplied(counts: Mapping[str, float], times: float) -> Counter:
    return Counter({axis: times * seconds for axis, seconds in counts.items()})


_NONE = Counter()
NOTHING = Pass(0.0, _NONE, 0, 0, 0.0, _NONE)


def replicas_of(config: Config, waits: Mapping[str, float]) -> Counter:
    """Of waits by axis those for sums over replicas."""
    sizes = config.mesh.sizes()
    planes = {plane(data_axes(sizes)), plane(expert_data_axes(sizes))}
    return Counter({axis: waits[axis] for axis in planes if axis in waits})


class PassSeconds(NamedTuple):
    """Of a part of the model: forward, the whole backward pass, and its two halves."""

    forward: Pass
    whole: Pass
    backward: Pass
    weight: Pass

    def __add__(self, other: PassSeconds) -> PassSeconds:
        return PassSeconds(*(one + two for one, two in zip(self, other)))

    def __mul__(self, times: float) -> PassSeconds:
        return PassSeconds(*(each * times for each in self))


class _WaitClock(Clock):
    """A clock that adds up along which axes it waits.

    `times` as many kernels run on it, and calls have `times` as many bytes, cut where they have
    more than `most`; products are made `products` times.  `idle` are the waits without what the
    rank does for them itself.
    """

    def __init__(self, machine: Machine) -> None:
        super().__init__(machine)
        self.waited, self.latest = Counter(), None
        self.idle = Counter() if machine.cores else self.waited
        self.times, self.most, self.products = 1.0, inf, 1.0

    @contextmanager
    def repeated(self, times: float, most: float, products: float = 1) -> Iterator[None]:
        """Here all is done so many times as often, in calls of no more than `most` bytes."""
        self.times, self.most, self.products = times, most, products
        try:
            yield
        finally:
            self.times, self.most, self.products = 1, inf, 1

    def product(self, m: int, n: int, k: int, dtype: np.dtype, batch: int = 1) -> None:
        begin, busy = self.now, self.busy
        super().product(m, n, k, dtype, batch)
        if self.products != 1:
            self._again(self.products, begin, busy)

    def _again(self, times: float, begin: int, busy: int) -> None:
        """Let what was done since `begin` be done so many times in all."""
        self.now += round((times - 1) * (self.now - begin))
        self.busy += round((times - 1) * (self.busy - busy))

    def kernel(self, name: str, nbytes: int) -> None:
        begin, busy = self.now, self.busy
        super().kernel(name, nbytes)
        if self.times != 1:
            self._again(self.times, begin, busy)

    def cut(self, nbytes: int) -> tuple[int, float]:
        """How many calls there are, and the bytes of each."""
        calls = ceil(self.times * nbytes / self.most) or 1
        return calls, self.times * nbytes / calls

    def post(self, op: str, nbytes: int, members: Sequence[int], axis: str) -> int:
        self.latest, queue = axis, queue_of(axis)
        calls, nbytes = self.cut(nbytes)
        others = (calls - 1) * self.call(op, nbytes, members)
        self.ends[queue] = max(self.now, self.ends[queue]) + others
        return super().post(op, nbytes, members, axis)

    def pass_on(self, nbytes: int, pair: Sequence[int], axis: str) -> int:
        self.latest, begin = axis, self.now
        end = super().pass_on(nbytes, pair, axis)
        self.waited[axis] += self.now - begin
        return end

    def taken(self, nbytes: int, pair: Sequence[int], end: int, pending: Pending) -> Pending:
        return self._waiting(super().taken(nbytes, pair, end, pending))

    def until(self, end: int, pending: Pending) -> Pending:
        return self._waiting(super().until(end, pending))

    def _waiting(self, ended: Pending) -> Pending:
        # A call is waited for through what it returns: it is the one that was posted last.
        axis = self.latest

        def finish():
            before = self.now
            block = ended.wait()
            self.waited[axis] += self.now - before
            return block

        return Pending(finish)


class _HostDrivenWaitClock(_WaitClock, HostDrivenClock):
    """The same where no device moves blocks: what the rank does for a call is a part of it."""

    def post(self, op: str, nbytes: int, members: Sequence[int], axis: str) -> int:
        self.latest, begin = axis, self.now
        calls, nbytes = self.cut(nbytes)
        for _ in range(calls):
            end = HostDrivenClock.post(self, op, nbytes, members, axis)
        self.waited[axis] += self.now - begin
        return end

    def _waiting(self, ended: Pending) -> Pending:
        axis, ended = self.latest, super()._waiting(ended)

        def finish():
            before = self.wired
            block = ended.wait()
            self.idle[axis] += self.wired - before
            return block

        return Pending(finish)


def _seconds(nanoseconds: Mapping[str, int]) -> Counter:
    return Counter({axis: spent / 1e9 for axis, spent in nanoseconds.items()})


class LayerSample:
    """One layer and both ends of a model, on the first rank of a mesh without data; of a model
    with mixtures of experts in some blocks as many layers as there are from one to the next, and
    one of both `kinds`, without a mixture and with one.

    Each has parameters of its own, as on stages of a pipeline, and ends that are on one stage
    have theirs together: `ends` are groups of FIRST and LAST.
    """

    def __init__(
        self,
        config: Config,
        vocabulary: int,
        machine: Machine,
        ends: Iterable[tuple[LayerRange, ...]],
    ) -> None:
        self.config, grid = config, config.mesh.grid()
        self.spec = spec_of(config, vocabulary)
        self.clock = (_HostDrivenWaitClock if machine.cores else _WaitClock)(machine)
        self.context, pool = config.context(), pool_of(config, self.clock)
        self.mesh = representative(grid, pool, SingleStage(), self.context)
        self.pool = self.mesh.pool
        self.stages, self.held = {}, {(): Counter(self.pool.live)}
        every = config.model.moe_every
        self.layers = LAYER._replace(layers=range(every))
        self.layer = self.add(self.layers)
        self.kinds = ()
        if every > 1:
            self.kinds = LAYER, LAYER._replace(layers=range(every - 1, every))
            for part in self.kinds:
                self.add(part)
        for parts in ends:
            self.add(*parts)

    def add(self, *parts: LayerRange) -> tuple[Parameters, Any, GradientCompression | None]:
        """Build the stages of `parts`; `held` are the bytes of their parameters, by kind, and
        those that are there without any, but for what is offloaded."""
        before = Counter(self.pool.live)
        parameters, optimizer, stages = self.built(parts)
        compression = compression_of(self.config, parameters)
        self.held[parts] = Counter(self.pool.live) - before
        del self.held[parts][OFFLOADED]
        self.stages |= dict(zip(parts, stages))
        return parameters, optimizer, compression

    def built(self, parts: Sequence[LayerRange]) -> tuple[Parameters, Any, list[PipelineStage]]:
        """The parameters, the optimiser and the stages of `parts`."""
        config = self.config
        kind, parallel = optimizer_of(config), config.parallel
        parameters = Parameters(
            self.mesh,
            config.train.dtype,
            parallel.zero,
            kind.WHOLE_MATRICES,
            parallel.reduce_dtype,
            parallel.offload,
        )
        stages = build(self.mesh, parameters, self.spec, parts)
        parameters.allocate(config.seed)
        return parameters, kind(parameters, 0.0, **config.train.constants()), stages

    def passes(self, part: LayerRange, sequences: int, halves: bool) -> PassSeconds:
        """The PassSeconds of a part on a microbatch of so many sequences; its halves if asked
        for."""
        context, stage = self.context, self.stages[part]
        zeros = np.broadcast_to(np.int32(0), (context.parts * sequences, context.tokens))
        micro = Microbatch(0, 0, zeros, zeros, 1.0, DeviceCache(self.pool))
        forward, saved = self.forward(stage, micro, part)
        whole = self.backward(stage, micro, part, saved, immediately)
        if not halves:
            return PassSeconds(forward, whole, NOTHING, NOTHING)
        _, saved = self.forward(stage, micro, part)
        defer = DeferredWeightGrads(self.mesh.trace)
        backward = self.backward(stage, micro, part, saved, defer)
        _, weight = self.measured(defer.run)
        return PassSeconds(forward, whole, backward, weight)

    def layer_passes(self, sequences: int, halves: bool) -> PassSeconds:
        """The same of a layer, the mean of those that are there."""
        passes, count = self.passes(self.layers, sequences, halves), len(self.layers.layers)
        return passes if count == 1 else passes * (1 / count)

    def forward(
        self, stage: PipelineStage, micro: Microbatch, part: LayerRange
    ) -> tuple[Pass, Any]:
        """The Pass, and what backward needs."""
        before = self.pool.held
        x = None if part.first else self.block(stage, micro)
        (y, saved), done = self.measured(partial(stage.forward, x, micro))
        del x
        left = self.pool.held - before - getattr(y, "nbytes", 0)
        return done._replace(left=left), saved

    def backward(
        self,
        stage: PipelineStage,
        micro: Microbatch,
        part: LayerRange,
        saved: Any,
        defer: Callable[..., None],
    ) -> Pass:
        """The Pass; what it leaves is what `defer` keeps."""
        dy = None if part.last else self.block(stage, micro)
        before = self.pool.held - getattr(dy, "nbytes", 0)
        dx, done = self.measured(partial(stage.backward, dy, saved, micro, defer))
        del dy
        left = self.pool.held - before - getattr(dx, "nbytes", 0)
        return done._replace(left=left)

    def block(self, stage: PipelineStage, micro: Microbatch) -> Array:
        ((shape, dtype),) = stage.incoming("F", micro)
        return self.mesh.empty(shape, dtype)

    def measured(self, work: Callable[[], Any]) -> tuple[Any, Pass]:
        """What `work()` returns, and its Pass."""
        clock, live = self.clock, self.pool.held
        waited, idle, same = Counter(clock.waited), Counter(clock.idle), clock.idle is clock.waited
        start, busy = clock.now, clock.busy
        clock.ends.clear()
        self.pool.reset_peak()
        result = work()
        waits = _seconds(clock.waited - waited)
        idle = waits if same else _seconds(clock.idle - idle)
        left, peak = self.pool.held - live, self.pool.peak["all"] - live
        seconds, busy = (clock.now - start) / 1e9, (clock.busy - busy) / 1e9
        return result, Pass(seconds, waits, left, peak, busy, idle)

    def update(self, times: float, most: float, layers: int) -> tuple[Pass, Pass]:
        """The Pass of the sums of gradients over ranks, and that of the update, so many times of
        what is in `layers`, in buckets of at most `most` bytes, and of products of so many
        layers."""
        first, _, compression = self.layer
        with self.clock.repeated(times, most, times):
            _, sums = self.measured(Buckets(first, most, compression).wait)
        every, at_once = len(self.layers.layers), optimizer_of(self.config).at_once(self.mesh)
        together = max(1, min(at_once, layers // every))
        several = self.layers._replace(layers=range(together * every))
        parameters, optimizer, *_ = self.built([several]) if together > 1 else self.layer
        buckets = Buckets(parameters, most)

        def update():
            parameters.sum_of_squares()
            optimizer.update(1.0, 1.0)
            buckets.gather()
            buckets.begin()

        with self.clock.repeated(times / together, most, layers / (together * every)):
            _, rest = self.measured(update)
        return sums, rest


@dataclass(frozen=True, eq=False)
class PartCosts:
    """The PassSeconds of the parts of a model, and the bytes of a block between them; where some
    layers have mixtures of experts `layer` is their mean, and `kinds` are one without and one with
    a mixture."""

    layer: PassSeconds
    first: PassSeconds
    last: PassSeconds
    block: int
    kinds: tuple[PassSeconds, ...] = ()
