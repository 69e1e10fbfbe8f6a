"""Validation rules for pipeline schedules, model chunks and data parallelism."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hpc3d.comm.grid import divisors
from hpc3d.config.input_file import Config, ParallelConfig
from hpc3d.config.limits import MOST_PASSES
from hpc3d.config.wrong_values import reported
from hpc3d.console.sanitize import counted, nearest_values
from hpc3d.pipeline.schedule import PAIRED, Schedule, find
from hpc3d.runtime.optional_packages import lacking

# Maximum number of forward passes per run if the schedule is asynchronous.
_PASSES_OF_RUN = 50_000


def wrong_pipeline(config: Config) -> Iterator[str]:
    """Report invalid combinations of schedule, scheme, model chunks, recomputation and ZeRO."""
    layers = _wrong_chunks(config), _wrong_layers(config.parallel.recompute, config.model.layers)
    others = _wrong_schedule(config), _wrong_zero(config), _wrong_products(config)
    yield from reported(_wrong_shard(config), *layers, *others, _wrong_pairs(config))


def _wrong_chunks(config: Config) -> Iterator[str]:
    """Report an invalid distribution of layers, or too few layers for an even distribution."""
    parallel, layers = config.parallel, config.model.layers
    parts, stages = config.mesh.p * parallel.chunks, parallel.layers_per_stage
    if stages is None:
        if parts > layers:
            chunks = f" x parallel.chunks = {parallel.chunks}" if parallel.chunks > 1 else ""
            unit = "model chunks" if chunks else "stages"
            key = f"mesh.p = {config.mesh.p}{chunks}"
            why = f"{parts} {unit} need a layer each, but model.layers = {layers}"
            remedy = f"use at most {layers} {unit}, more layers, or parallel.layers_per_stage"
            yield f"{key}: {why}; {remedy}"
        return
    key, found = f"parallel.layers_per_stage = {list(stages)}", counted(sum(stages), "layer")
    if len(stages) != parts:
        yield f"{key}: {counted(len(stages), 'number')} for {parts} chunks; set one per chunk"
    elif min(stages) < 0:
        yield f"{key}: a chunk cannot have {min(stages)} layers; use 0 or more"
    elif sum(stages) != layers:
        yield f"{key}: {found} in total, but model.layers = {layers}; use a total of {layers}"


def _wrong_schedule(config: Config) -> Iterator[str]:
    parallel, stages, schedule = config.parallel, config.mesh.p, find(config.parallel.schedule)
    if problem := schedule.forbids(stages, parallel.microbatches, parallel.chunks):
        yield problem
    elif schedule.update_per_microbatch:
        name = f"schedule {schedule.name}"
        if config.train.clip:
            why = f"{name} updates stages separately, without a global gradient norm"
            yield f"train.clip = {config.train.clip}: {why}; use train.clip = 0"
        if config.model.tied and stages > 1:
            why = f"with {name} the two copies of the embedding would diverge"
            yield f"model.tied = true: {why}; use model.tied = false"
    parts, micros = stages * parallel.chunks, parallel.microbatches
    if parts * micros > MOST_PASSES:
        need = f"{stages} stages x {parallel.chunks} chunks need {parts * micros} forward passes"
        limit = f"more than {MOST_PASSES}; use at most {MOST_PASSES // parts} microbatches"
        yield f"parallel.microbatches = {micros}: {need} per step, {limit}"
    if schedule.asynchronous:
        yield from _wrong_asynchronous(config, schedule)


def _wrong_zero(config: Config) -> Iterator[str]:
    """Report ZeRO-2 with a scheme that stores weights only on the diagonal of the mesh."""
    split = config.splits["dense"]
    diagonal = {*split.own.split()} & {*split.m.split()}
    if config.parallel.zero == 2 and config.mesh.d * config.mesh.c > 1 and diagonal:
        why = f"with {config.parallel.way} only ranks on the diagonal have a weight"
        yield f"parallel.zero = 2: {why}; use parallel.zero = 1 or 3, or parallel.scheme = 3d"


def _wrong_shard(config: Config) -> Iterator[str]:
    """Report groups of replicas that hybrid sharding or local updates cannot use."""
    parallel, shard, replicas = config.parallel, config.parallel.shard, config.mesh.d
    if shard and replicas % shard:
        remedy = f"use {nearest_values(divisors(replicas), shard)}"
        yield f"parallel.shard = {shard} must divide mesh.d = {replicas}; {remedy}"
    elif parallel.local_steps and config.workers == 1 and not _has_outer_update(parallel):
        group = "parallel.shard" if shard else "1"
        key = f"parallel.local_steps = {parallel.local_steps}"
        why = f"mesh.d = {replicas} gives a single worker, so averaging has no effect"
        yield f"{key}: {why}; use 0, or mesh.d above {group}"


def _has_outer_update(parallel: ParallelConfig) -> bool:
    """Return True if the outer optimizer changes the parameters even of a single worker."""
    return parallel.outer_learning_rate != 1 or parallel.outer_momentum > 0


def _wrong_products(config: Config) -> Iterator[str]:
    """Report an error if matrix products are chunked in a scheme that does not support this."""
    split, chunks = config.splits["dense"], config.parallel.chunked_products
    if chunks > 1 and (split.panels or split.own):
        key = f"parallel.chunked_products = {chunks}: with {config.parallel.way}"
        why = "products have panels" if split.panels else "a rank may store no rows to split"
        yield f"{key}, {why}; use 1, or scheme 3d"


def _wrong_pairs(config: Config) -> Iterator[str]:
    """Report an error if no all-to-alls of experts overlap, or passes cannot alternate."""
    parallel, least = config.parallel, 2 * config.mesh.p
    if not parallel.overlap_experts:
        return
    if config.mesh.e == 1 or not config.model.experts:
        key, why = "parallel.overlap_experts = true", "without mesh.e > 1, no tokens are exchanged"
        yield f"{key}: {why}; use false, or mesh.e = 2"
    elif parallel.schedule != PAIRED:
        why = f"schedule {parallel.schedule} has no pairs of passes that can overlap"
        yield f"parallel.overlap_experts = true: {why}; use parallel.schedule = {PAIRED}"
    elif parallel.microbatches < least:
        key = f"parallel.microbatches = {parallel.microbatches}"
        why = f"parallel.overlap_experts with mesh.p = {config.mesh.p} needs at least {least}"
        yield f"{key}: {why}; use {least}, or parallel.overlap_experts = false"
    elif moved := sorted({*parallel.offload} - {"optimizer"}):
        key = f"parallel.offload = {list(parallel.offload)}"
        why = f"{' and '.join(moved)} of two overlapping passes cannot be loaded in advance"
        yield f"{key}: {why}; use parallel.overlap_experts = false"
    yield from lacking("parallel.overlap_experts", "greenlet")


def _wrong_layers(listed: str | Sequence[int] | Sequence[str], layers: int) -> Iterator[str]:
    """Report recomputed blocks that are out of range, and blocks or modules listed twice."""
    if isinstance(listed, str):
        return
    key = f"parallel.recompute = {list(listed)}"
    indices = {each for each in listed if isinstance(each, int)}
    if wrong := sorted(layer for layer in indices if not 0 <= layer < layers):
        remedy = f"with model.layers = {layers}, use 0 to {layers - 1}"
        yield f"{key}: layer {wrong[0]} does not exist; {remedy}"
    elif len({*listed}) < len(listed):
        yield f"{key} has duplicates; list each layer or module once"


def _wrong_asynchronous(config: Config, schedule: Schedule) -> Iterator[str]:
    """Report settings that are invalid for an asynchronous schedule, because its steps overlap."""
    name, steps, saving = f"schedule {schedule.name}", config.train.steps, config.checkpoint
    a_step = config.mesh.p * config.parallel.microbatches
    if steps * a_step > _PASSES_OF_RUN:
        why = f"{name} is generated for all steps in advance, but {steps * a_step} forward passes"
        most = counted(_PASSES_OF_RUN // a_step, "step")
        yield f"train.steps = {steps}: {why} exceed the limit; use at most {most}"
    for key, value, none in (("every", saving.every, 0), ("keep_best", saving.keep_best, "false")):
        if value:
            why = f"{name} always has passes in flight, which cannot be saved"
            remedy = f"use {none}, or a synchronous schedule"
            yield f"checkpoint.{key} = {str(value).lower()}: {why}; {remedy}"
    if local := config.parallel.local_steps:
        why = f"the steps of {name} overlap, so that workers cannot agree between them"
        yield f"parallel.local_steps = {local}: {why}; use 0, or a synchronous schedule"
    if config.train.dtype == "float16":
        why = f"{name} cannot skip a step whose gradient overflows"
        yield f"train.dtype = float16: {why}; use bfloat16, or a synchronous schedule"
