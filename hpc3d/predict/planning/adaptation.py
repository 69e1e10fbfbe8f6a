"""Variants of the best layouts of a search: uneven layers, hybrid sharding, overlap, buckets.

The variants are tried last and only for the best layouts, because they improve a good layout only
slightly. layer_counts.py uses the schedule simulator to find the best number of layers on each
stage, also for layouts that do not fit in memory with an equal number of layers per stage. The
buckets that are tried hold the gradients of 1, 2, 4, ... layers. A hybrid sharding group contains
at least the ranks of one host. Variants with groups, prefetching or overlapping passes have the
lowest ZeRO stage and the least recomputation with which they fit in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from itertools import chain, islice
from math import ceil, inf, log10
from statistics import mean
from typing import TYPE_CHECKING, Any, NamedTuple

from hpc3d.comm.grid import divisors
from hpc3d.comm.mesh import DATA
from hpc3d.pipeline.schedule import PAIRED, find
from hpc3d.pipeline.timeline import Cost
from hpc3d.predict.planning.candidates import Candidates, TimedCandidate, seconds_of
from hpc3d.predict.planning.layer_counts import LayerCounts, LayerPipeline
from hpc3d.predict.planning.layouts import MemoryOption, microbatches
from hpc3d.predict.planning.pass_costs import StageContent
from hpc3d.predict.planning.peak import contents, model_of, stage_bytes, stage_content

if TYPE_CHECKING:
    from hpc3d.config.input_file import Config
    from hpc3d.predict.planning.cost_table import CostTable
    from hpc3d.predict.planning.estimate import Estimate, Estimator

_FEW = 6  # maximum number of layouts for which uneven layers are tried
_SCHEDULES = 3  # maximum number of schedules per candidate
_LESS = 2  # maximum number of variants with lower memory savings to try with uneven layers
_COUNTS = 2  # maximum number of microbatch counts for which an overlap is tried
_PASSES = 12_000_000  # maximum number of simulated passes, summed over all layouts
_WORTH = 0.01  # minimum relative reduction of the step time that justifies non-default keys
_BUCKETS = 6  # maximum number of bucket sizes to try


class Offer(NamedTuple):
    """Estimate of a variant of a candidate; `number` is the candidate's index in `Found.timed`."""

    number: int
    estimate: Estimate


def uneven(candidates: Candidates, timed: Sequence[TimedCandidate]) -> Iterator[Offer]:
    """Yield estimates of layouts that are faster, or fit in memory, only with uneven layers.

    Each estimate follows an estimate of the same layout with even layers from the same simulator,
    so that the two are comparable.
    """
    estimator = candidates.estimator
    layers = timed[0].candidate.config.model.layers
    limit = min((each.best.seconds for each in timed if each.fits), default=inf)
    found = [
        (least_uneven(estimator, offer.estimate), offer) for offer in _bases(candidates, timed)
    ]
    found = sorted((each for each in found if each[0] < limit), key=lambda each: each[0])
    pipelines = (
        (offer, layer_pipeline(estimator, offer.estimate.config, candidates.memory))
        for _, offer in found
    )
    fits = (each for each in pipelines if LayerCounts(each[1], 0).can_fit(layers))
    fitting = [*islice(fits, _FEW)]
    left = _PASSES
    for number, (offer, pipeline) in enumerate(fitting):
        config, share = offer.estimate.config, left // (len(fitting) - number)
        search = LayerCounts(pipeline, share)
        even = tuple(map(len, config.layers()))
        counts = search.best(even)
        left -= share - max(0, search.left)
        if counts:
            candidates.count += 1
            # Both partitions are estimated by the schedule simulator, so their times are
            # comparable.
            clocked = estimator.estimate(_with_layers(config, even))._replace(config=config)
            other = estimator.estimate(_with_layers(config, counts))
            yield offer._replace(estimate=clocked)
            if gains(other.seconds, clocked.seconds) or not candidates.fits(clocked):
                yield offer._replace(estimate=other)


def gains(seconds: float, usual: float) -> bool:
    """Return True if a step time of `seconds` is sufficiently shorter than `usual` seconds."""
    return seconds < (1 - _WORTH) * usual


def _with_layers(config: Config, counts: Sequence[int]) -> Config:
    return replace(config, parallel=replace(config.parallel, layers_per_stage=tuple(counts)))


def _bases(candidates: Candidates, timed: Sequence[TimedCandidate]) -> Iterator[Offer]:
    """Yield layouts with even layers that may become faster with uneven layers.

    These are the layouts with the fastest schedules of each pipeline-parallel candidate. Variants
    of the fastest candidates that save less memory are included, because they may fit with uneven
    layers.
    """
    for number, each in enumerate(timed):
        if each.best.config.mesh.p == 1:
            continue
        schedules = {}
        for offer in each.offers:
            parallel = offer.config.parallel
            schedules.setdefault((parallel.schedule, parallel.chunks), offer)
        yield from (Offer(number, one) for one in [*schedules.values()][:_SCHEDULES])
        if number < _FEW:
            yield from (Offer(number, one) for one in _saving_less(candidates, each.best))


def _saving_less(candidates: Candidates, best: Estimate) -> Iterator[Estimate]:
    """Yield the fastest estimates of layouts that save less memory than `best`.

    Such layouts recompute less, re-gather fewer weights, or use a lower ZeRO stage.
    """
    config, parallel = best.config, best.config.parallel
    ways = candidates.ways(config)
    way = MemoryOption.of(parallel)
    here = ways.index(way)
    others = [(parallel.zero, less) for less in reversed(ways[max(0, here - _LESS) : here])]
    others += [(1, way)] * (parallel.zero > 1)
    splits = find(parallel.schedule).splits_backward
    for zero, less in others:
        options = candidates.options(config, parallel.microbatches, (zero,), less, splits)
        yield min(options, key=seconds_of)


def least_uneven(estimator: Estimator, estimate: Estimate) -> float:
    """Return the step time, in seconds, that a layout would have with equal work on all
    stages."""
    config = estimate.config
    stages = [stage_content(each) for each in contents(config)]
    works = estimator.works(config, estimator.costs.parts(config), stages)
    work = [sum(each.seconds for each in one) for one in works]
    return estimate.seconds - config.parallel.microbatches * (max(work) - mean(work))


def layer_pipeline(estimator: Estimator, config: Config, memory: float) -> LayerPipeline:
    """Return the LayerPipeline of a layout, which may use at most `memory` bytes per rank."""
    parts, model = estimator.costs.parts(config), model_of(config)
    none = _with_layers(config, (0,) * model.placement.parts)
    backward = parts.layer.backward if model.schedule.splits_backward else parts.layer.whole
    passes = (parts.layer.forward, backward, parts.layer.weight)
    return LayerPipeline(
        model,
        bare=estimator.part_costs(none, parts),
        layer=Cost(*(each.seconds for each in passes)),
        sums=cache(_sums_of(estimator, config)),
        held=cache(_held_of(estimator.costs, config)),
        memory=memory,
    )


def _sums_of(estimator: Estimator, config: Config) -> Callable[[int, int], float]:
    """Return a function that computes the exposed time of a stage's gradient reductions.

    The function maps (stage, number of layers) to seconds. It assumes that the time per byte is
    the same on all stages.
    """
    chunks = contents(config)
    first = stage_content(chunks[0])
    shown = estimator.shown_sums(config, estimator.costs.parts(config), first).seconds
    rate = shown / estimator.costs.held(config, first)["gradient"]

    def seconds(stage, layers):
        content = stage_content(chunks[stage])
        content = content._replace(layers=layers, mixtures=_mixtures(config, layers))
        return rate * estimator.costs.held(config, content)["gradient"] if rate else 0.0

    return seconds


def _held_of(costs: CostTable, config: Config) -> Callable[[int, tuple[int, ...]], float]:
    """Return a function that computes the peak memory of a rank.

    The function maps (stage, number of layers of each chunk) to bytes.
    """
    parts, placement = costs.parts(config), model_of(config).placement
    sums, rest, gathers = costs.update(config, stage_content(contents(config)[0]))
    sample = costs.sample(config, config.parallel.zero)

    def held(stage, layers):
        content = tuple(
            StageContent(count, part == 0, part == placement.parts - 1, _mixtures(config, count))
            for part, count in zip(placement.parts_of(stage), layers, strict=True)
        )
        update = sums, rest + gathers
        return stage_bytes(sample, config, parts, content, stage, *update).total()

    return held


def _mixtures(config: Config, layers: int) -> float:
    """Return the average number of mixture-of-experts layers among `layers` layers.

    The result is 0 if all layers of the model are of the same type.
    """
    every = config.model.moe_every
    return layers / every if every > 1 else 0


def with_other_buckets(candidates: Candidates, config: Config) -> list[Estimate]:
    """Estimate a layout with other bucket sizes; return the estimates, fastest first."""
    if config.mesh.replicas() == 1:
        return []
    sizes = bucket_sizes(candidates.estimator, config)
    candidates.count += len(sizes)
    sized = (replace(config.parallel, bucket_mb=size) for size in sizes)
    found = [candidates.estimator.estimate(replace(config, parallel=each)) for each in sized]
    return sorted(found, key=seconds_of)


def with_groups(candidates: Candidates, config: Config) -> list[Estimate]:
    """Estimate a layout with hybrid sharding; return the estimates that may fit, fastest first.

    Groups need more memory than sharding over all replicas, so that a layout may need a higher
    ZeRO stage. With local updates, groups would change the number of workers and the results.
    """
    if config.parallel.compression != "none" or config.parallel.local_steps:
        return []
    sizes = group_sizes(config, candidates.estimator.machine.ranks_per_node)
    return _changed(candidates, config, [{"shard": size} for size in sizes])


def with_prefetch(candidates: Candidates, config: Config) -> list[Estimate]:
    """Estimate a layout that prefetches weights; return the estimates that may fit, fastest first.

    A layout that communicates no weights is estimated with ZeRO 2 and 3, in which it does. With
    prefetching, a higher ZeRO stage may be faster, because its communication overlaps with matrix
    products.
    """
    if config.parallel.prefetch:
        return []
    change = {"prefetch": True}
    if not _communicates_weights(config):
        change["zero"] = 2
    return _changed(candidates, config, [change])


def with_overlap(candidates: Candidates, config: Config) -> list[Estimate]:
    """Estimate a layout that overlaps the all-to-alls of experts with other passes.

    The overlap requires the schedule dualpipe-v, with at least two microbatches per stage. Returns
    the estimates that may fit, fastest first.
    """
    parallel, least = config.parallel, 2 * config.mesh.p
    moved = {*parallel.offload} - {"optimizer"}
    if parallel.overlap_experts or moved or config.mesh.e == 1 or least > config.model.layers:
        return []
    counts = (count for count in microbatches(config, candidates.ranks) if count >= least)
    change = {"overlap_experts": True, "schedule": PAIRED, "chunks": 2, "layers_per_stage": None}
    changes = (change | {"microbatches": count} for count in islice(counts, _COUNTS))
    return _changed(candidates, config, changes)


def _changed(
    candidates: Candidates, config: Config, changes: Iterable[dict[str, Any]]
) -> list[Estimate]:
    """Return estimates of a layout with each dict of changed keys in `[parallel]`.

    The ZeRO stage may be higher than in `config`, and the recomputation is the least with which
    the layout may fit in memory. The fastest estimate is the first one.
    """
    layouts = (replace(config, parallel=replace(config.parallel, **each)) for each in changes)
    return sorted(chain.from_iterable(map(candidates.with_higher_stages, layouts)), key=seconds_of)


def _communicates_weights(config: Config) -> bool:
    """Return True if matrix products gather weights, or reduce their gradients."""
    sizes, rows = config.sizes(), config.splits["dense"].m.split()
    sharded = config.parallel.zero > 1 and config.mesh.replicas() > 1
    return sharded or any(sizes[axis] > 1 for axis in rows if axis in "xyz")


def group_sizes(config: Config, ranks_per_node: int) -> list[int]:
    """Return the sizes of hybrid sharding groups to try, in replicas.

    A group contains at least as many consecutive ranks as a host, but not all replicas.
    """
    replicas, stride = config.mesh.d, config.mesh.grid().stride(DATA)
    return [
        size
        for size in divisors(replicas)
        if 1 < size < replicas and size * stride >= ranks_per_node
    ]


def bucket_sizes(estimator: Estimator, config: Config) -> list[float]:
    """Return the bucket sizes to try, in MB, excluding the configured size.

    A bucket holds the gradients of 1, 2, 4, ... layers, up to those of an entire stage.
    """
    layer = estimator.costs.layer_gradient(config) / config.model.moe_every
    whole = max(
        estimator.costs.held(config, stage_content(each))["gradient"] for each in contents(config)
    )
    sizes = {min(layer * 2**power, whole) for power in range(_BUCKETS - 1)} | {whole}
    megabytes = {_rounded_up(size / 1e6) for size in sizes}
    return sorted(megabytes - {config.parallel.bucket_bytes / 1e6})


def _rounded_up(size: float) -> float:
    """Round a bucket size up to two significant digits, so that its gradients still fit."""
    unit = 10.0 ** (ceil(log10(size)) - 2)
    return round(ceil(size / unit * (1 - 1e-12)) * unit, 12)
