"""Rules for context parallelism, mixture of experts, gradient compression and offloading."""

from __future__ import annotations

from collections.abc import Iterator

from hpc3d.config.input_file import Config
from hpc3d.console.sanitize import nearest_values
from hpc3d.pipeline.schedule import find


def wrong_context(config: Config) -> Iterator[str]:
    """Report invalid context-parallel settings and sequence lengths that cannot be sharded."""
    parallel, c, u = config.parallel, config.mesh.c, config.parallel.ulysses
    if parallel.context == "both" and not (1 < u < c and c % u == 0):
        fitting = [str(size) for size in range(2, c) if c % size == 0]
        remedy = f"use {' or '.join(fitting)}" if fitting else 'use context = "ring"'
        yield f"parallel.ulysses = {u} must divide mesh.c = {c}, and not be 1 or {c}; {remedy}"
        return
    ring, length = config.context().rings > 1, config.model.sequence
    parts, chunks = (2 * c, " x 2 chunks") if ring else (c, "")  # chunks per sequence
    if length % parts:
        lengths = nearest_values(range(parts, length + parts, parts), length)
        key = f"model.sequence = {length} must be divisible by mesh.c = {c}{chunks}"
        yield f"{key}; use {lengths}, or another mesh.c"
    if parallel.attention == "full" and ring:
        why = f"ring attention (mesh.c = {c}) is always chunked"
        remedy = 'remove the key, or use parallel.context = "all-to-all"'
        yield f"parallel.attention = full: {why}; {remedy}"


def unexchanged_heads(config: Config, members: int) -> Iterator[str]:
    """Report an error if the Ulysses all-to-all cannot split a rank's heads evenly.

    Tensor parallelism has already sharded the heads over `members` ranks. If a rank has fewer KV
    heads than the all-to-all has ranks, several ranks share a KV head and divide its query heads.
    """
    model, u = config.model, config.context().heads
    heads = model.kv_heads or model.heads
    for key, count in {"heads": model.heads, "kv_heads": heads}.items():
        here = max(1, count // members)
        shared = key == "kv_heads" and u % here == 0
        if here % u and not shared:
            also = f", or a divisor of {u} heads per rank" if key == "kv_heads" else ""
            yield (
                f"model.{key} = {count}: the heads per rank ({here}) must be divisible by the {u} "
                f"ranks of an all-to-all; use a multiple of {members * u}{also}, or "
                'parallel.context = "ring"'
            )
            return


def wrong_experts(config: Config) -> Iterator[str]:
    """Report mixture-of-experts settings that conflict with the model, the mesh or the dtype."""
    model, e, dtype = config.model, config.mesh.e, config.train.dtype
    if not model.experts:
        return
    key = f"model.experts = {model.experts}"
    if model.top_k > model.experts:
        yield f"model.top_k = {model.top_k} exceeds {key}; use at most {model.experts}"
    if model.moe_every > model.layers:
        why = f"exceeds model.layers = {model.layers}, so no block would have experts"
        yield f"model.moe_every = {model.moe_every} {why}; use at most {model.layers}"
    if model.experts % e:
        yield f"{key} must be divisible by mesh.e = {e}; use a multiple of {e}, or another mesh.e"
    if owned := config.splits["dense"].own:  # off-diagonal ranks have no tokens to send
        why = f"with {config.parallel.way} only ranks on the diagonal of {owned} have tokens"
        yield f"{key}: {why}; use parallel.scheme = 3d"
    if model.balance_bias and dtype in ("float16", "bfloat16"):
        why = f"{dtype} is not precise enough for the small bias updates"
        remedy = "use model.balance_loss instead of model.balance_bias, or train.dtype = float32"
        yield f"model.balance_bias = {model.balance_bias}: {why}; {remedy}"


def wrong_compression(config: Config) -> Iterator[str]:
    """Report settings that are incompatible with gradient compression."""
    zero, key = config.parallel.zero, f"parallel.compression = {config.parallel.compression}"
    if config.parallel.compression == "none":
        return
    if config.parallel.local_steps and zero:
        yield f"{key}: parallel.zero = {zero} shards the outer gradients; use parallel.zero = 0"
    elif zero > 1:
        yield f"{key}: parallel.zero = {zero} shards the gradients; use parallel.zero = 0 or 1"
    if config.train.dtype == "float16":
        why = "error feedback does not support the varying loss scale of float16"
        yield f"{key}: {why}; use train.dtype = bfloat16 or float32"


def wrong_offload(config: Config) -> Iterator[str]:
    """Report offload settings that are unsupported or have no benefit."""
    train, listed = config.train, config.parallel.offload
    key = f"parallel.offload = {[*listed]}"
    if len({*listed}) < len(listed):
        yield f"{key} has duplicates; list each item once"
    if "optimizer" in listed and train.optimizer in ("sgd", "adafactor"):
        small = f"train.optimizer = {train.optimizer} has almost no state to offload"
        yield f'{key}: {small}; remove "optimizer", or use another optimizer'
    schedule = find(config.parallel.schedule)
    if "parameters" in listed and schedule.asynchronous:
        why = f"schedule {schedule.name} keeps several versions of the weights"
        yield f'{key}: {why}; remove "parameters", or use a synchronous schedule'
