"""What may be done on a mesh: estimates of its schedules, microbatches, ZeRO and recomputation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import product
from math import inf, log
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from hpc3d.cuda.cudnn_attention import takes
from hpc3d.pipeline.schedule import find
from hpc3d.predict.planning import layouts
from hpc3d.predict.planning.layouts import MemoryOption
from hpc3d.predict.planning.pass_costs import replicas_of

if TYPE_CHECKING:
    from hpc3d.config.input_file import Config
    from hpc3d.predict.planning.bounds import Candidate
    from hpc3d.predict.planning.estimate import Estimate, Estimator

NEAR = 0.1  # of the memory above it: what needs no more may fit, which a simulation tells
SURE = 0.95  # of the memory: what needs no more fits in any case
_LONG = 1024  # tokens of sequences whose probabilities are worth looking for other ways
RECOMPUTE = ("none", "selective", "full")  # more and more


class TimedCandidate(NamedTuple):
    """What a candidate gives: of what may fit the memory the `offers`, fastest first; else what
    comes closest alone.  What is `sure` to fit takes so many seconds; inf where nothing is."""

    candidate: Candidate
    offers: list
    fits: bool
    sure: float

    @property
    def best(self) -> Estimate:
        return self.offers[0]


class Candidates:
    """Estimates by an `estimator` for layouts on so many ranks with `memory` bytes each."""

    def __init__(self, estimator: Estimator, ranks: int, memory: float) -> None:
        self.estimator, self.ranks, self.memory, self.count = estimator, ranks, memory, 0

    def ways(self, config: Config) -> list[MemoryOption]:
        """What backward may do again.  Without tensor axes there is nothing to gather again, and
        chunk by chunk there are no probabilities to be made again."""
        config = replace(config, parallel=replace(config.parallel, attention=None))
        mesh, chunked = config.mesh, config.chunked()
        gathers, widest = mesh.x * mesh.y * mesh.z > 1, self.estimator.machine.max_fused_head_dim
        options = layouts.MEMORY_OPTIONS
        if _chunks_save(config, widest):
            options = layouts.WITH_CHUNKS[config.train.backend]
        return [
            way
            for way in options
            if (way.keep_gathered or gathers) and not (chunked and way.recompute == "selective")
        ]

    def promising(self, config: Config) -> list[Estimate]:
        """Estimates that tell how good the sizes of `config` are.

        What keeps more is faster, so that backward does no more again than it must, and ZeRO 2
        and 3 are tried where it would do whole layers again.
        """
        mesh, found = config.mesh, []
        counts = layouts.microbatches(config, self.ranks)
        counts = [micros for micros in counts if 2 * micros >= mesh.p] or counts[-1:]
        ways = self.ways(config)
        for group in layouts.zeros(config, self.ranks):
            way = self._first_that_fits(config, counts[-1], group, ways, found)
            if way is not None:
                found += self._tries(config, counts, group, way)
                ways = ways[: ways.index(way)]
            if not ways or (way and way.recompute != "full"):
                break
        fitting = [each for each in found if self.fits(each)]
        if not fitting:
            group, way = layouts.zeros(config, self.ranks)[-1], self.ways(config)[-1]
            return [*found, *self.options(config, counts[-1], group, way)]
        return [*found, *self.split(min(fitting, key=seconds_of))]

    def every(self, best: Estimate, limit: Callable[[], float]) -> Iterator[list[Estimate]]:
        """Lists of estimates of all that may take less than `limit()` seconds on the mesh of
        `best`, what is most like it first, with no more done again than memory asks for."""
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
        """Estimates with the ways to save memory that are needed and take less than `limit`."""
        sure = {}  # what fits in any case: schedule, chunks and ZeRO -> the ways
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
        """The first of `ways` to save memory that fits with so many microbatches, or None; they
        save more and more.  Adds the estimates that it needs to `found`."""
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
        """Estimates with more and more microbatches, until they fit and are no longer faster."""
        best = inf
        for micros in counts:
            options = [*self.options(config, micros, group, way)]
            yield from options
            seconds = min((each.seconds for each in options if self.fits(each)), default=inf)
            if seconds > best or (seconds < inf and config.mesh.p == 1):
                return
            best = seconds

    def split(self, best: Estimate) -> Iterator[Estimate]:
        """Estimates of the schedules that split the backward pass, in place of that of `best`."""
        config, parallel = best.config, best.config.parallel
        way = MemoryOption(parallel.keep_gathered, parallel.recompute, parallel.attention)
        yield from self.options(config, parallel.microbatches, (parallel.zero,), way, True)

    def options(
        self,
        config: Config,
        micros: int,
        group: Sequence[int],
        way: MemoryOption,
        splits: bool = False,
    ) -> Iterator[Estimate]:
        """Estimates for the schedules that split the backward pass, or for the others, and the
        values of ZeRO in `group`."""
        named = layouts.schedules(config.mesh.p, micros, config.model.layers)
        named = [each for each in named if find(each[0]).splits_backward == splits]
        for (name, chunks), zero in product(named, group):
            self.count += 1
            changes = {"microbatches": micros, "chunks": chunks, "zero": zero}
            parallel = replace(config.parallel, **changes, **way._asdict(), schedule=name)
            yield self.estimator.estimate(replace(config, parallel=parallel))

    def fits(self, estimate: Estimate, share: float = 1.0) -> bool:
        return estimate.peak <= share * self.memory


def seconds_of(estimate: Estimate) -> float:
    return estimate.seconds


def _floor(estimate: Estimate) -> float:
    """Seconds that no other schedule nor ZeRO saves."""
    sums = replicas_of(estimate.config, estimate.waits)
    return estimate.seconds - estimate.bubble - sums.total()


def _keeps_more(way: MemoryOption, other: MemoryOption) -> bool:
    """Whether a way to save memory does nothing again that the other does not."""
    less = RECOMPUTE.index(way.recompute) <= RECOMPUTE.index(other.recompute)
    chunks_too = other.attention is not None or way.attention is None
    return way.keep_gathered >= other.keep_gathered and less and chunks_too


def _chunks_save(config: Config, widest: int) -> bool:
    """Whether attention chunk by chunk, which is not the usual one, keeps less: a device's fused
    attention, for heads up to `widest`, keeps no probabilities either."""
    model, train = config.model, config.train
    if config.chunked() or model.sequence < _LONG:
        return False
    if train.backend == "numpy":
        return True
    shared = (model.kv_heads or model.heads) < model.heads or model.padding is not None
    dtype, width = np.dtype(train.dtype), model.hidden // model.heads
    return shared or not takes(dtype, width, model.dropout or None, widest)
