"""Estimates of layouts that differ in schedule, microbatches, ZeRO stage and recomputation."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, product
from math import inf, log
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from hpc3d.cuda.cudnn_attention import takes
from hpc3d.pipeline.schedule import find
from hpc3d.predict.bucket_size import bucket_mb
from hpc3d.predict.planning import layouts
from hpc3d.predict.planning.layouts import MemoryOption, recomputation
from hpc3d.predict.planning.pass_costs import replicas_of

if TYPE_CHECKING:
    from hpc3d.config.input_file import Config
    from hpc3d.predict.planning.bounds import Candidate
    from hpc3d.predict.planning.estimate import Estimate, Estimator

NEAR = 0.1  # a layout may fit if its estimated peak exceeds the memory by at most this fraction
SURE = 0.95  # a layout is assumed to fit if its estimated peak is below this fraction of memory
_LONG = 1024  # minimum sequence length for which chunked attention is tried


class TimedCandidate(NamedTuple):
    """Candidate layout and its estimates, for different schedules and memory options.

    `fits` is True if any of the estimated layouts may fit in memory. `offers` lists all estimates
    that may fit, fastest first, or else only the estimate with the lowest peak. `sure` is the
    shortest estimated step time, in seconds, of a layout that is assumed to fit, or inf.
    """

    candidate: Candidate
    offers: list
    fits: bool
    sure: float

    @property
    def best(self) -> Estimate:
        return self.offers[0]


class Candidates:
    """Generator of estimates for layouts on `ranks` ranks with `memory` bytes per rank.

    `count` is the number of estimates that have been made. `bucket` is the size of gradient
    buckets in MB; by default, the machine model chooses it for each mesh.
    """

    def __init__(
        self, estimator: Estimator, ranks: int, memory: float, bucket: float | None = None
    ) -> None:
        self.estimator, self.ranks, self.memory, self.count = estimator, ranks, memory, 0
        self.bucket = bucket
        self._buckets: dict[tuple, float] = {}

    def ways(self, config: Config) -> list[MemoryOption]:
        """Return the memory options that have an effect on a layout.

        Without tensor parallelism, no operands are gathered, except weights with ZeRO 3, which are
        never saved.
        """
        if config.parallel.attention:
            config = replace(config, parallel=replace(config.parallel, attention=None))
        options = layouts.MEMORY_OPTIONS
        if config.chunked() or _fuses(config, self.estimator.machine.max_fused_head_dim):
            options = layouts.WITHOUT_SCORES
        elif config.model.sequence >= _LONG:
            options = layouts.WITH_CHUNKS[config.train.backend]
        gathers = config.mesh.tensor_ranks() > 1
        return [way for way in options if way.keep_gathered or gathers]

    def promising(self, config: Config) -> list[Estimate]:
        """Estimate layouts on the mesh of `config`, for a comparison with other meshes.

        Recomputation costs time, so layouts recompute only as much as the memory limit requires.
        Without pipeline parallelism, fewer microbatches with more recomputation are also tried.
        ZeRO 2 and 3 are tried only if layouts would otherwise recompute products with weights.
        """
        mesh, found = config.mesh, []
        counts = layouts.microbatches(config, self.ranks)
        counts = tuple(micros for micros in counts if 2 * micros >= mesh.p) or counts[-1:]
        ways = self.ways(config)
        for group in layouts.zeros(config, self.ranks):
            way = self._first_that_fits(config, counts[-1], group, ways, found)
            if way is not None:
                tries = [*self._tries(config, counts, group, way)]
                found += tries
                if mesh.p == 1:
                    best = min(filter(self.fits, tries), key=seconds_of)
                    found += [*self._with_fewer(best, counts, group, found)]
                ways = ways[: ways.index(way)]
            if not ways or (way and not _repeats_products(way)):
                break
        fitting = [each for each in found if self.fits(each)]
        if not fitting:
            group, way = layouts.zeros(config, self.ranks)[-1], self.ways(config)[-1]
            return [*found, *self.options(config, counts[-1], group, way)]
        return [*found, *self.split(min(fitting, key=seconds_of))]

    def every(self, best: Estimate, limit: Callable[[], float]) -> Iterator[list[Estimate]]:
        """Yield estimates of all layouts on the mesh of `best` that may beat a time limit.

        `limit()` returns the current limit on the step time in seconds. All estimates in a list
        have the same number of microbatches. The lists are sorted by the distance of this number
        from that of `best`. Each layout uses the least recomputation that fits in memory.
        """
        config, start = best.config, best.config.parallel.microbatches
        counts = layouts.microbatches(config, self.ranks)
        groups = layouts.zeros(config, self.ranks)
        for micros in sorted(counts, key=lambda count: abs(log(count / start))):
            whole = self.options(config, micros, groups[0], layouts.MEMORY_OPTIONS[0])
            if min(map(_floor, whole)) < limit():
                for group, splits in product(groups, (False, True)):
                    yield [*self._needed(config, micros, group, splits, limit())]

    def _needed(
        self, config: Config, micros: int, group: Sequence[int], splits: bool, limit: float
    ) -> Iterator[Estimate]:
        """Yield estimates with a step time below `limit` seconds.

        Layouts that save more memory than necessary are excluded.
        """
        sure = {}  # maps (schedule, chunks, ZeRO stage) to memory options assumed to fit
        for way in self.ways(config):
            quick = False
            for each in self.options(config, micros, group, way, splits):
                parallel = each.config.parallel
                ways = sure.setdefault((parallel.schedule, parallel.chunks, parallel.zero), [])
                if each.seconds < limit and not any(_keeps_more(other, way) for other in ways):
                    quick = True
                    ways.extend([way] * self.fits(each, SURE))
                    yield each
            if not quick:
                return

    def _first_that_fits(
        self,
        config: Config,
        micros: int,
        group: Sequence[int],
        ways: Sequence[MemoryOption],
        found: list[Estimate],
    ) -> MemoryOption | None:
        """Return the first option in `ways` for which a layout fits in memory, or `None`.

        The layout has `micros` microbatches. `ways` must be sorted by increasing memory savings.
        The estimates made by this search are appended to `found`.
        """
        low, high = 0, len(ways)
        while low < high:
            middle = (low + high) // 2 if low else 0
            options = [*self.options(config, micros, group[-1:], ways[middle])]
            found += options
            low, high = (low, middle) if any(map(self.fits, options)) else (middle + 1, high)
            if min(each.held for each in options) > self.memory:
                return None
        return ways[low] if low < len(ways) else None

    def _tries(
        self, config: Config, counts: Sequence[int], group: Sequence[int], way: MemoryOption
    ) -> Iterator[Estimate]:
        """Yield estimates for increasing numbers of microbatches.

        The generator stops when layouts that fit in memory become slower or, without pipeline
        parallelism, after the first number of microbatches for which a layout fits.
        """
        best = inf
        for micros in counts:
            options = [*self.options(config, micros, group, way)]
            yield from options
            seconds = min((each.seconds for each in options if self.fits(each)), default=inf)
            if seconds > best or (seconds < inf and config.mesh.p == 1):
                return
            best = seconds

    def _with_fewer(
        self, best: Estimate, counts: Sequence[int], group: Sequence[int], found: list[Estimate]
    ) -> Iterator[Estimate]:
        """Yield estimates with fewer microbatches and more recomputation than in `best`.

        Weights are gathered once per microbatch, so fewer microbatches can save more time than
        the recomputation takes. The generator stops when layouts that fit in memory become slower.
        The estimates made to find the least recomputation are appended to `found`.
        """
        config, ways, seconds = best.config, self.ways(best.config), best.seconds
        way = MemoryOption.of(config.parallel)
        for micros in reversed(counts[: counts.index(config.parallel.microbatches)]):
            ways = ways[ways.index(way) :]
            way = self._first_that_fits(config, micros, group, ways, found)
            if way is None:
                return
            options = [*self.options(config, micros, group, way)]
            yield from options
            last, seconds = seconds, min(map(seconds_of, filter(self.fits, options)))
            if seconds > last:
                return

    def split(self, best: Estimate) -> Iterator[Estimate]:
        """Yield estimates of the layout in `best` with schedules that split the backward pass."""
        config, parallel = best.config, best.config.parallel
        way = MemoryOption.of(parallel)
        yield from self.options(config, parallel.microbatches, (parallel.zero,), way, True)

    def options(
        self,
        config: Config,
        micros: int,
        group: Sequence[int],
        way: MemoryOption,
        splits: bool = False,
    ) -> Iterator[Estimate]:
        """Yield an estimate for each schedule and each ZeRO stage in `group`.

        If `splits` is true, only schedules that split the backward pass are considered; otherwise,
        only schedules that do not split it. With at least one microbatch per stage, lean
        schedules are slower than other V-shaped ones, and are omitted if all of these fit in
        memory.
        """
        named = layouts.schedules(config.mesh.p, micros, config.model.layers)
        named = [each for each in named if find(each[0]).splits_backward == splits]
        short = set()  # ZeRO stages with which a V-shaped schedule may not fit
        for (name, chunks), zero in product(named, group):
            schedule = find(name)
            if schedule.lean and micros >= config.mesh.p and zero not in short:
                continue
            changes = {"microbatches": micros, "chunks": chunks, "schedule": name}
            found = self._with(config, zero, way, **changes)
            if schedule.v_shaped and not self.fits(found, SURE):
                short.add(zero)
            yield found

    def with_higher_stages(self, config: Config) -> Iterator[Estimate]:
        """Yield estimates of a layout for each ZeRO stage from that of `config` on.

        The estimates of a stage have the least recomputation with which the layout fits in memory,
        and less recomputation with which it may fit. If the layout fits without recomputation,
        higher stages are tried only with prefetching, because they communicate more. Hybrid
        sharding requires ZeRO 1.
        """
        parallel, ways = config.parallel, self.ways(config)
        least = max(parallel.zero, parallel.shard > 0)
        whole = replace(config, parallel=replace(parallel, shard=0))
        for zero in chain.from_iterable(layouts.zeros(whole, self.ranks)):
            if zero < least:
                continue
            if self.fits(found := self._with(config, zero, ways[0])):
                yield found
                if not parallel.prefetch:
                    return
            else:
                fits = (partial(self._fits_with, config, zero, share) for share in (1 + NEAR, 1.0))
                first, last = (bisect_left(ways, True, key=each) for each in fits)
                yield from (self._with(config, zero, way) for way in ways[first : last + 1])

    def with_each_way(self, config: Config) -> Iterator[Estimate]:
        """Yield an estimate of a layout for each of its memory options."""
        return (self._with(config, config.parallel.zero, way) for way in self.ways(config))

    def _fits_with(self, config: Config, zero: int, share: float, way: MemoryOption) -> bool:
        return self.fits(self._with(config, zero, way), share)

    def _with(self, config: Config, zero: int, way: MemoryOption, **changes: Any) -> Estimate:
        """Estimate a layout with another ZeRO stage, memory option and changes in `[parallel]`."""
        self.count += 1
        changes |= {"zero": zero, "bucket_mb": self._bucket_mb(config, zero), **way._asdict()}
        parallel = replace(config.parallel, **changes)
        return self.estimator.estimate(replace(config, parallel=parallel))

    def _bucket_mb(self, config: Config, zero: int) -> float:
        """Return the size of gradient buckets in MB for a ZeRO stage."""
        if self.bucket is not None:
            return self.bucket
        key = config.mesh, zero > 0, config.parallel.group
        if key not in self._buckets:
            here = replace(config, parallel=replace(config.parallel, zero=zero))
            self._buckets[key] = bucket_mb(here, self.estimator.machine)
        return self._buckets[key]

    def fits(self, estimate: Estimate, share: float = 1.0) -> bool:
        return estimate.peak <= share * self.memory


def seconds_of(estimate: Estimate) -> float:
    return estimate.seconds


def _floor(estimate: Estimate) -> float:
    """Return a lower bound on the step time, in seconds, for all schedules and ZeRO stages.

    The bound excludes the bubble and the gradient reductions.
    """
    sums = replicas_of(estimate.config, estimate.waits)
    return estimate.seconds - estimate.bubble - sums.total()


def _repeats_products(way: MemoryOption) -> bool:
    return "mlp" in way.recompute or way.recompute == "full"


def _keeps_more(way: MemoryOption, other: MemoryOption) -> bool:
    """Return True if memory option `other` saves at least as much memory as `way`."""
    less = recomputation(way.recompute) <= recomputation(other.recompute)
    chunks_too = other.attention is not None or way.attention is None
    return way.keep_gathered >= other.keep_gathered and less and chunks_too


def _fuses(config: Config, widest: int) -> bool:
    """Return True if attention runs as a fused kernel, which stores no probabilities.

    `widest` is the largest head size supported by fused attention.
    """
    model, train = config.model, config.train
    if train.backend == "numpy" or config.data.boundaries:
        return False
    dtype, width = np.dtype(train.dtype), model.head_width
    return takes(dtype, width, model.dropout or None, widest)
