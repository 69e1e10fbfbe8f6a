"""Rules about schedules, model chunks and data parallelism."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from hpc3d.config import limits
from hpc3d.console.sanitize import counted
from hpc3d.pipeline.schedule import find

if TYPE_CHECKING:
    from hpc3d.config.input_file import Config
    from hpc3d.pipeline.schedule import Schedule

_PASSES_OF_RUN = 50_000  # most forward passes of a schedule for the full run


def wrong_pipeline(config: Config) -> Iterator[str]:
    """Report incompatible schedules, model chunks and data parallelism."""
    parallel, layers, parts = config.parallel, config.model.layers, config.mesh.p
    parts *= parallel.chunks
    split = config.splits["dense"]
    if parts > layers:
        chunks = f" x parallel.chunks = {parallel.chunks}" if parallel.chunks > 1 else ""
        remedy = f"use at most {layers} parts or more layers"
        key = f"mesh.p = {config.mesh.p}{chunks}"
        yield f"{key}: {parts} parts, but model.layers = {layers}: {remedy}"
    elif parallel.layers_per_stage is not None:
        yield from _wrong_stages(parallel.layers_per_stage, parts, layers)
    if not isinstance(parallel.recompute, str):
        yield from _wrong_layers(parallel.recompute, layers)
    schedule = find(parallel.schedule)
    problem = schedule.forbids(config.mesh.p, parallel.microbatches, parallel.chunks)
    yield from [problem] if problem else _wrong_updates(config, schedule)
    yield from limits.too_many_passes(parallel, config.mesh.p)
    if schedule.asynchronous:
        yield from _wrong_asynchronous(config, schedule)
    diagonal = {*split.own.split()} & {*split.m.split()}
    if parallel.zero == 2 and config.mesh.d * config.mesh.c > 1 and diagonal:
        where = f"where a weight is on the diagonal only ({parallel.way})"
        yield f"parallel.zero = 2: not {where}; use parallel.zero = 1 or 3, or scheme 3d"


def _wrong_layers(listed: Sequence[int], layers: int) -> Iterator[str]:
    """Report blocks to recompute that do not exist or are named twice."""
    key = f"parallel.recompute = {list(listed)}"
    if wrong := sorted({layer for layer in listed if not 0 <= layer < layers}):
        known = f"model.layers = {layers} are those from 0 to {layers - 1}"
        yield f"{key}: no layer {wrong[0]}; {known}"
    elif len({*listed}) < len(listed):
        yield f"{key}: names a layer twice; name each once"


def _wrong_asynchronous(config: Config, schedule: Schedule) -> Iterator[str]:
    """Report settings that need a step to end, under a schedule with overlapping steps."""
    a_step = config.mesh.p * config.parallel.microbatches
    passes = config.train.steps * a_step
    if passes > _PASSES_OF_RUN:
        most = counted(_PASSES_OF_RUN // a_step, "step")
        yield (
            f"train.steps = {config.train.steps}: schedule {schedule.name} is laid out for the "
            f"whole run, here {passes} forward passes; use at most {most}"
        )
    saving = config.checkpoint
    for key, value, none in (("every", saving.every, 0), ("keep_best", saving.keep_best, "false")):
        if value:
            yield (
                f"checkpoint.{key} = {str(value).lower()}: schedule {schedule.name} has passes in "
                f"flight whenever a step ends; use {none}, or a schedule that is synchronous"
            )
    if config.train.dtype == "float16":
        yield (
            f"train.dtype = float16: under schedule {schedule.name} no step can be left out when "
            "its gradient overflows; use bfloat16, or a schedule that is synchronous"
        )


def _wrong_stages(stages: Sequence[int], parts: int, layers: int) -> Iterator[str]:
    """Report an invalid distribution of the layers."""
    key, found = f"parallel.layers_per_stage = {list(stages)}", counted(sum(stages), "layer")
    if len(stages) != parts:
        yield f"{key}: {len(stages)} numbers for {parts} parts: give one per part"
    elif min(stages) < 0:
        yield f"{key}: a part with {min(stages)} layers; use 0 or more"
    elif sum(stages) != layers:
        yield f"{key}: {found}, but model.layers = {layers}: give each part its layers"


def _wrong_updates(config: Config, schedule: Schedule) -> Iterator[str]:
    """Report settings that need all stages at once, under a schedule that updates per stage."""
    if not schedule.update_per_microbatch:
        return
    if config.train.clip:
        why = f"under schedule {schedule.name} no stage knows the global norm of the gradient"
        yield f"train.clip = {config.train.clip}: {why}; use train.clip = 0"
    if config.model.tied and config.mesh.p > 1:
        why = f"under schedule {schedule.name} the two copies of the table would part"
        yield f"model.tied = true: {why}; use model.tied = false"
