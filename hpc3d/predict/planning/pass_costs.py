"""Costs of the passes of a layer, the embedding and the head, measured with a simulated clock.

A step repeats a small number of distinct passes. This module runs each of them once on abstract
arrays, and hpc3d.predict.planning.estimate combines their costs into the cost of a step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial, reduce
from itertools import chain
from math import ceil, inf
from operator import add
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from hpc3d.arrays.pool import OFFLOADED
from hpc3d.comm.communicator import Pending
from hpc3d.comm.mesh import COPIES, data_axes, expert_data_axes, plane, queue_of
from hpc3d.model.layers import immediately
from hpc3d.model.microbatch import DeviceCache, Microbatch
from hpc3d.model.stage import FIRST, LAST, LAYER, build
from hpc3d.pipeline.engine import DeferredWeightGrads
from hpc3d.pipeline.gradient_buckets import Buckets
from hpc3d.predict.simulation.abstract_gpu import pool_of
from hpc3d.predict.simulation.simulated_clock import (
    Clock,
    HostDrivenClock,
    representative,
    with_most_scores,
)
from hpc3d.training.gradient_compression import GradientCompression, compression_of
from hpc3d.training.graphed_step import captured
from hpc3d.training.optimizers.catalog import optimizer_for, optimizer_of
from hpc3d.training.optimizers.outer import outer_optimizer_of
from hpc3d.training.trainer import gathers_later, parameters_of, spec_of

if TYPE_CHECKING:
    from hpc3d.arrays.array import Array
    from hpc3d.config.input_file import Config
    from hpc3d.model.parameters import Parameters
    from hpc3d.model.spec import ModelSizes
    from hpc3d.model.stage import LayerRange
    from hpc3d.pipeline.stage_protocol import PipelineStage
    from hpc3d.predict.machine.machine import Machine


class Pass(NamedTuple):
    """Time and memory of a pass.

    `seconds` is the duration of the pass, and `busy` is its CPU time. `waits` maps each axis to
    the duration of the communication calls along this axis. `idle` maps each axis to the time that
    the rank waits for the GPU or the NIC during these calls. All times are in seconds. `left` is
    the number of bytes that remain allocated after the pass, excluding its result, and `peak` is
    the peak memory in bytes; both are relative to the memory use before the pass, and exclude the
    workspaces that all passes share.
    """

    seconds: float
    waits: Counter
    left: int
    peak: int
    busy: float
    idle: Counter

    def __add__(self, other: Pass) -> Pass:
        """Return the cost of two passes that run in sequence.

        Memory that the first pass leaves allocated is added to the peak of the second pass.
        """
        if self is NOTHING:
            return other
        if other is NOTHING and self.left <= self.peak:
            return self
        left, peak = self.left + other.left, max(self.peak, self.left + other.peak)
        waits, busy = _sum(self.waits, other.waits), self.busy + other.busy
        same = self.idle is self.waits and other.idle is other.waits
        idle = waits if same else _sum(self.idle, other.idle)
        return Pass(self.seconds + other.seconds, waits, left, peak, busy, idle)

    def __mul__(self, times: float) -> Pass:
        """Return the cost of running this pass `times` times in sequence."""
        if not times or self is NOTHING:
            return NOTHING
        waits = _multiplied(self.waits, times)
        idle = waits if self.idle is self.waits else _multiplied(self.idle, times)
        peak = (times - 1) * max(0, self.left) + self.peak
        busy = times * self.busy
        return Pass(times * self.seconds, waits, times * self.left, peak, busy, idle)


def _sum(counts: Counter, others: Counter) -> Counter:
    return counts + others if counts and others else counts or others


def _multiplied(counts: Mapping[str, float], times: float) -> Counter:
    return Counter({axis: times * seconds for axis, seconds in counts.items()})


_NONE = Counter()
NOTHING = Pass(0.0, _NONE, 0, 0, 0.0, _NONE)


def replicas_of(config: Config, waits: Mapping[str, float]) -> Counter:
    """Return the entries of `waits` for the axes over which gradients are reduced."""
    sizes = config.sizes()
    planes = {plane(data_axes(sizes)), plane(expert_data_axes(sizes)), COPIES}
    return Counter({axis: waits[axis] for axis in planes if axis in waits})


class PassSeconds(NamedTuple):
    """Costs of the passes of a section of the model.

    `forward` is the forward pass, and `whole` the full backward pass. If the backward pass is
    split, `backward` computes the gradient of the input and `weight` that of the weights.
    """

    forward: Pass
    whole: Pass
    backward: Pass
    weight: Pass

    def __add__(self, other: PassSeconds) -> PassSeconds:
        return PassSeconds(*(one + two for one, two in zip(self, other)))

    def __mul__(self, times: float) -> PassSeconds:
        return PassSeconds(*(each * times for each in self))


class _WaitClock(Clock):
    """Simulated clock that records the time of communication calls by axis, in ns.

    `waited` maps each axis to the time of the calls along this axis. `idle` maps each axis to the
    part of this time in which the rank's core is idle. The clock can simulate repeated work: it
    multiplies the time of kernels and the bytes of calls by `times`, and the time of matrix
    products by `products`. Calls are split so that each has at most `most` bytes.
    """

    def __init__(self, machine: Machine) -> None:
        super().__init__(machine)
        self.waited, self.latest = Counter(), None
        self.idle = Counter() if machine.cores else self.waited
        self.times, self.most, self.products = 1.0, inf, 1.0

    @contextmanager
    def repeated(self, times: float, most: float, products: float = 1) -> Iterator[None]:
        """Context manager that multiplies matrix products by `products`, other work by `times`.

        Communication calls are split so that each has at most `most` bytes.
        """
        self.times, self.most, self.products = times, most, products
        try:
            yield
        finally:
            self.times, self.most, self.products = 1, inf, 1

    def product(self, m: int, n: int, k: int, dtype: np.dtype, batch: int = 1) -> None:
        before = self.now, self.busy, self.host
        super().product(m, n, k, dtype, batch)
        if self.products != 1:
            self._again(self.products, *before)

    def _again(self, times: float, begin: int, busy: int, host: int) -> None:
        """Advance the clock as if the work since time `begin` had been repeated `times` times."""
        self.now += round((times - 1) * (self.now - begin))
        self.busy += round((times - 1) * (self.busy - busy))
        self.host += round((times - 1) * (self.host - host))

    def kernel(self, name: str, nbytes: int) -> None:
        before = self.now, self.busy, self.host
        super().kernel(name, nbytes)
        if self.times != 1:
            self._again(self.times, *before)

    def cut(self, nbytes: int) -> tuple[int, float]:
        """Split a call into calls of at most `most` bytes.

        Returns the number of calls, and the number of bytes per call.
        """
        calls = ceil(self.times * nbytes / self.most) or 1
        return calls, self.times * nbytes / calls

    def post(self, op: str, nbytes: int, members: Sequence[int], axis: str) -> int:
        self.latest, queue = axis, queue_of(axis)
        calls, nbytes = self.cut(nbytes)
        others = (calls - 1) * self.call(op, nbytes, members)
        if calls > 1:
            self.work((calls - 1) * self.machine.dispatch_s)
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
        # A call's Pending is created right after the call is posted, so `latest` is the axis of
        # this call.
        axis = self.latest

        def finish():
            before = self.now
            block = ended.wait()
            self.waited[axis] += self.now - before
            return block

        return Pending(finish)


class _HostDrivenWaitClock(_WaitClock, HostDrivenClock):
    """Variant of _WaitClock for machines without GPUs.

    The time of a call includes the CPU time that the rank spends on it.
    """

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


@cache
def _blocks_by_kind(sizes: ModelSizes) -> list[dict[LayerRange, int]]:
    """Return the entries of `LayerSample.kinds`."""
    every = sizes.experts.every if sizes.experts else 1
    found: dict[bool, dict[int, list[int]]] = {}  # mixture -> window -> numbers of blocks
    for number in range(max(sizes.layers, every)):
        windows = found.setdefault(sizes.mixes(number), {})
        windows.setdefault(sizes.window_of(number), []).append(number)
    return [
        {LAYER._replace(layers=range(first, first + 1)): 1 + len(rest) for first, *rest in numbers}
        for numbers in (windows.values() for windows in found.values())
    ]


class LayerSample:
    """One layer, the embedding and the head of a model, on the first rank of an abstract mesh.

    If only every n-th block has a mixture of experts, `layers` contains n layers. `kinds` has one
    entry if all blocks are dense or all have a mixture of experts, otherwise one for the dense
    blocks and one for the others. An entry maps one block of each attention window to the
    number of such blocks in the model. Each section of the model has its own parameters, as on
    different pipeline stages. `ends` is ((FIRST,), (LAST,)) if the embedding and the head are on
    different stages, and ((FIRST, LAST),) if they are on the same stage.
    """

    def __init__(
        self,
        config: Config,
        vocabulary: int,
        machine: Machine,
        ends: Iterable[tuple[LayerRange, ...]],
    ) -> None:
        self.config, grid, self.captured = config, config.grid(), captured(config)
        self.spec = spec_of(config, vocabulary)
        self.clock = (_HostDrivenWaitClock if machine.cores else _WaitClock)(machine)
        self.context, pool = config.context(), pool_of(config, self.clock)
        self.mesh = representative(grid, pool, context=self.context)
        self.pool = self.mesh.pool
        self.stages, self.held = {}, {(): Counter(self.pool.live)}
        self.held_by = cache(self._held_by)
        self.layers = LAYER._replace(layers=range(config.model.moe_every))
        self.layer = self.add(self.layers)
        self.kinds = _blocks_by_kind(self.spec.sizes)
        for part in chain(*self.kinds):
            if part != self.layers:
                self.add(part)
        for parts in ends:
            self.add(*parts)

    def _held_by(self, stage: StageContent) -> Counter:
        held = self.held
        ends = tuple(part for part, here in ((FIRST, stage.first), (LAST, stage.last)) if here)
        counts = (stage.layers - stage.mixtures, stage.mixtures)
        total = held[()] + (held[ends] if ends else Counter())
        for (part, *_), count in zip(
            self.kinds, counts if len(self.kinds) > 1 else (stage.layers,)
        ):
            total += Counter({kind: int(count * size) for kind, size in held[(part,)].items()})
        return total

    @property
    def layer_gradient(self) -> int:
        """Size in bytes of the gradients of all layers in the sample."""
        return self.held[(self.layers,)]["gradient"]

    def add(self, *parts: LayerRange) -> tuple[Parameters, Any, GradientCompression | None]:
        """Build sections of the model, and record their memory use in `held[parts]`.

        `held[parts]` is a dict from memory kind to bytes, excluding offloaded data. `held[()]`
        is the memory allocated before any section is built.
        """
        before = Counter(self.pool.live)
        parameters, optimizer, stages = self.built(parts)
        compression = compression_of(self.config, parameters)
        self.held[parts] = Counter(self.pool.live) - before
        del self.held[parts][OFFLOADED]
        self.stages |= dict(zip(parts, stages))
        return parameters, optimizer, compression

    def built(self, parts: Sequence[LayerRange]) -> tuple[Parameters, Any, list[PipelineStage]]:
        """Build sections of the model; return their parameters, the optimizer and the stages."""
        config = self.config
        parameters = parameters_of(self.mesh, config)
        stages = build(self.mesh, parameters, self.spec, parts)
        with_most_scores(stages)
        parameters.allocate(config.seed)
        return parameters, optimizer_for(config, parameters), stages

    @contextmanager
    def graphed(self) -> Iterator[None]:
        """Context manager for the work that the CUDA graph of a step contains, if it has one."""
        if self.captured:
            self.clock.begin_graph()
        yield
        if self.captured:
            self.clock.end_graph()

    def passes(self, part: LayerRange, sequences: int, halves: bool) -> PassSeconds:
        """Measure the passes of a section of the model for one microbatch.

        If `halves` is true, the split backward pass is measured as well.
        """
        self.pool.workspaces.clear()
        context, stage = self.context, self.stages[part]
        zeros = np.zeros((context.parts * sequences, context.tokens), np.int32)
        micro = Microbatch(0, 0, zeros, zeros, 1.0, DeviceCache(self.pool))
        with self.graphed():
            forward, saved = self.forward(stage, micro, part)
            whole = self.backward(stage, micro, part, saved, immediately)
            if not halves:
                return PassSeconds(forward, whole, NOTHING, NOTHING)
            _, saved = self.forward(stage, micro, part)
            defer = DeferredWeightGrads(self.mesh.trace)
            backward = self.backward(stage, micro, part, saved, defer)
            _, weight = self.measured(defer.run)
            return PassSeconds(forward, whole, backward, weight)

    def layer_passes(
        self, sequences: int, halves: bool
    ) -> tuple[PassSeconds, tuple[PassSeconds, ...]]:
        """Return the average costs of a block's passes, and those of each entry of `kinds`.

        The second result is empty if `kinds` has one entry.
        """
        costs = {part: self.passes(part, sequences, halves) for part in chain(*self.kinds)}

        def average(blocks):
            total = sum(blocks.values())
            return reduce(add, (costs[part] * (n / total) for part, n in blocks.items()))

        kinds = tuple(map(average, self.kinds)) if len(self.kinds) > 1 else ()
        if kinds and all(len(blocks) == 1 for blocks in self.kinds):
            every = len(self.layers.layers)
            return self.passes(self.layers, sequences, halves) * (1 / every), kinds
        return average({part: n for blocks in self.kinds for part, n in blocks.items()}), kinds

    @property
    def _used(self) -> int:
        """Bytes in use, excluding the workspaces that all passes share."""
        return self.pool.held - self.pool.shared_workspace

    def forward(
        self, stage: PipelineStage, micro: Microbatch, part: LayerRange
    ) -> tuple[Pass, Any]:
        """Run a forward pass of `stage`; return its cost and the saved activations."""
        before = self._used
        x = None if part.first else self.block(stage, micro)
        (y, saved), done = self.measured(partial(stage.forward, x, micro))
        del x
        left = self._used - before - getattr(y, "nbytes", 0)
        return done._replace(left=left), saved

    def backward(
        self,
        stage: PipelineStage,
        micro: Microbatch,
        part: LayerRange,
        saved: Any,
        defer: Callable[..., None],
    ) -> Pass:
        """Run a backward pass of `stage`, and return its cost.

        The field `left` of the cost includes the data of weight gradients deferred by `defer`.
        """
        dy = None if part.last else self.block(stage, micro)
        before = self._used - getattr(dy, "nbytes", 0)
        dx, done = self.measured(partial(stage.backward, dy, saved, micro, defer))
        del dy
        left = self._used - before - getattr(dx, "nbytes", 0)
        return done._replace(left=left)

    def block(self, stage: PipelineStage, micro: Microbatch) -> Array:
        ((shape, dtype),) = stage.incoming("F", micro)
        return self.mesh.empty(shape, dtype)

    def measured(self, work: Callable[[], Any]) -> tuple[Any, Pass]:
        """Call `work()`; return the result of the call, and a Pass with the measured cost."""
        clock, live = self.clock, self._used
        waited, idle, same = Counter(clock.waited), Counter(clock.idle), clock.idle is clock.waited
        start, busy = clock.now, clock.busy
        clock.ends.clear()
        clock.synchronize()
        self.pool.reset_peak()
        result = work()
        waits = _seconds(clock.waited - waited)
        idle = waits if same else _seconds(clock.idle - idle)
        left = self._used - live
        peak = self.pool.peak["all"] - self.pool.shared_workspace - live
        seconds, busy = (clock.now - start) / 1e9, (clock.busy - busy) / 1e9
        return result, Pass(seconds, waits, left, peak, busy, idle)

    def update(self, times: float, most: float, layers: int) -> tuple[Pass, Pass, Pass]:
        """Return the costs of the gradient reductions, of the optimizer update, and of the
        all-gathers of updated values that overlap with the next forward pass.

        With local updates, the update includes the mean cost of the agreements per step.
        All costs are extrapolated from the measured layers by the factor `times`, with gradient
        buckets of at most `most` bytes. As an exception, the matrix products in the update are
        extrapolated to `layers` layers.
        """
        first, _, compression = self.layer
        with self.clock.repeated(times, most, times), self.graphed():
            _, sums = self.measured(Buckets(first, most, compression).wait)
        every, at_once = len(self.layers.layers), optimizer_of(self.config).at_once(self.mesh)
        together = max(1, min(at_once, layers // every))
        several = self.layers._replace(layers=range(together * every))
        parameters, optimizer, *_ = self.built([several]) if together > 1 else self.layer
        buckets = Buckets(parameters, most, gathers_later=gathers_later(self.config))

        def update():
            parameters.sum_of_squares()
            optimizer.update(1.0, 1.0)
            buckets.gather()
            buckets.begin()

        with self.clock.repeated(times / together, most, layers / (together * every)):
            _, rest = self.measured(update)
            with self.graphed():
                gathers = self.measured(buckets.complete)[1] if buckets.outdated else NOTHING
        return sums, rest + self._agreement(times, most), gathers

    def _agreement(self, times: float, most: float) -> Pass:
        """Return the mean cost per step of the agreements of workers with local updates.

        If they are stale, the field `left` contains the bytes of a full agreement in flight.
        """
        every, (parameters, optimizer, compression) = self.config.parallel.local_steps, self.layer
        if not every:
            return NOTHING
        parallel = replace(self.config.parallel, local_steps=1)
        train = replace(self.config.train, steps=3)
        config = replace(self.config, parallel=parallel, train=train)
        buckets = Buckets(parameters, most, compression)
        outer = outer_optimizer_of(config, optimizer, buckets)
        assert outer
        with self.clock.repeated(times, most):
            _, first = self.measured(partial(outer.after, 0))
            _, done = self.measured(partial(outer.after, 1))
        return (done * (1 / every))._replace(left=first.left)


class StageContent(NamedTuple):
    """Content of a model chunk or stage.

    `layers` is the number of layers. `first` is True if the content includes the embedding, and
    `last` is True if it includes the head. `mixtures` is the number of mixture-of-experts layers,
    or 0 if all layers of the model are of the same type.
    """

    layers: int
    first: bool
    last: bool
    mixtures: float = 0


@dataclass(frozen=True, eq=False)
class PartCosts:
    """Costs of the passes of a layer, the embedding (`first`) and the head (`last`).

    `block` is the size in bytes of the activation between two layers. If only some layers have a
    mixture of experts, `layer` contains the average cost of a layer, and `kinds` the costs of a
    dense layer and of a mixture-of-experts layer. `workspace` is the size in bytes of the
    workspaces that all passes share.
    """

    layer: PassSeconds
    first: PassSeconds
    last: PassSeconds
    block: int
    kinds: tuple[PassSeconds, ...] = ()
    workspace: int = 0
