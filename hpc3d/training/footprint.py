"""Lower bound on the memory of a rank; runs that cannot fit are rejected before they start.

Notation: Psi parameters of e bytes each are sharded over p t ranks, with t = x y z. There are L
layers, a heads, and r ranks with different tokens (context, data and expert axes). The activations
of a microbatch have n = b s h elements.

    parameters      (e + g + g states) Psi / (p t) bytes.  parallel.zero shards terms of this sum
                    over r.  With 16-bit types, g = 4 bytes, and the master copy is an additional
                    state.  States of another type have their own size, and states per row or
                    column are negligible.  Experts are sharded over the expert axis, and
                    parallel.zero shards them over the context and data axes.  parallel.shard
                    limits the data axis to the replicas of a group
    residual        g bytes per element of the block matrices that parallel.compression selects
    activations     k n e L / (p t r) bytes for one microbatch, with e for parallel.keep_dtype and
                    k = 16 + a s / h, 16 + a / h (chunked), or less with recomputation, down to 1
                    (full); a mixture of experts also has its capacity slots
    logits          b s V e / (p t r) bytes, on the last stage; with model.logit_cap, twice as many
                    in training, because the head saves a copy
    batch           8 b s bytes for inputs and targets of the full batch in int32, on every rank

All values are means over the ranks. With any partition, at least one rank needs this much or more.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

from hpc3d.arrays.narrow import itemsize
from hpc3d.console.sanitize import counted
from hpc3d.model import families
from hpc3d.model.families import expert_parameters, family_of
from hpc3d.model.kept import stored_type
from hpc3d.runtime import host_memory
from hpc3d.training.gradient_compression import compression_spec
from hpc3d.training.optimizers.catalog import states_of

if TYPE_CHECKING:
    from hpc3d.config.input_file import Config


def refuse_what_cannot_fit(config: Config, here: int, training: bool = True) -> None:
    """Raise ValueError if this machine has too little memory for the `here` ranks that it runs.

    `config` must be resolved. If `training` is false, the ranks only run evaluations. Also raises
    ValueError if the folder for offloaded data is not writable.
    """
    for line in unwritable(config):
        raise ValueError(line)
    need, memory = here * least(config, training), host_memory.total()
    remedy = "parallel.recompute, more parallel.microbatches" if training else "parallel.zero = 3"
    if config.train.backend == "numpy" and need > memory:
        raise ValueError(
            f"model and train: {counted(here, 'rank')} would use at least {need / 1e9:.4g} "
            f"GB, but this machine has {memory / 1e9:.4g} GB; use more machines, {remedy}, or a "
            "smaller model or batch (python -m hpc3d.plan INPUT.toml --ranks N finds layouts that "
            "fit)"
        )


def unwritable(config: Config) -> Iterator[str]:
    """Report an error if data is offloaded, but the folder for this data is not writable."""
    wanted = os.environ.get("TMPDIR")
    if config.parallel.offload and wanted and not os.access(wanted, os.W_OK | os.X_OK):
        yield (
            f"parallel.offload: TMPDIR = {wanted!r:.200} is not writable; set TMPDIR to a "
            "folder on a disk"
        )


def least(config: Config, training: bool = True) -> float:
    """Return a lower bound on the bytes used by a rank; `config` must contain the vocabulary."""
    batch = 8 * config.train.batch * config.model.sequence
    return parameters(config, training) + _activations(config, training) + batch


def parameters(config: Config, training: bool = True) -> float:
    """Return the bytes of parameters on a rank and, in `training`, of gradients and states."""
    mesh, experts = config.mesh, expert_parameters(config.model)
    dense = families.parameters(config.model).total - experts
    shards = (config.parallel.group or mesh.d) * mesh.c
    held = dense * _bytes_held(config, shards * mesh.e, training)
    held += experts / mesh.e * _bytes_held(config, shards, training)
    held += _residual(config) if training else 0
    return held / (mesh.p * mesh.tensor_ranks())


def _bytes_held(config: Config, shards: int, training: bool) -> float:
    """Return the bytes per parameter of the values, gradients and optimizer states on a rank.

    ZeRO splits the data that its stage covers into `shards` shards.
    """
    e, wide, zero = itemsize(config.train.dtype), _wide(config), config.parallel.zero
    specs = states_of(config)
    states = sum((itemsize(spec.dtype) if spec.dtype else wide) * spec.density() for spec in specs)
    states += wide * (wide > e)
    states *= "optimizer" not in config.parallel.offload
    values = e * ("parameters" not in config.parallel.offload)
    # (bytes per parameter, lowest ZeRO stage that shards these bytes), for the parameter values,
    # the gradients and the optimizer states
    shares = [(values, 3), *([(wide, 2), (states, 1)] if training else [])]
    return sum(size / (shards if zero >= stage else 1) for size, stage in shares)


def _residual(config: Config) -> float:
    """Return the total bytes of gradient compression residuals for dense blocks.

    The total covers all ranks that process the same tokens (one replica).
    """
    model, local = config.model, config.parallel.local_steps
    copies = config.workers if local else config.mesh.replicas()
    spec = compression_spec(config)
    least = min(model.hidden, model.heads * model.head_width)
    narrowest = least // config.mesh.tensor_ranks(), least
    if spec is None or copies == 1 or not all(narrowest):
        return 0.0
    if not spec.saves(narrowest, copies, _wide(config)):
        return 0.0
    return (families.block_weights(model).total - expert_parameters(model)) * _wide(config)


def _activations(config: Config, training: bool) -> float:
    """Return the bytes of logits and, in `training`, of saved activations of one microbatch."""
    model, mesh = config.model, config.mesh
    rows = config.train.batch * model.sequence / config.parallel.microbatches
    family = family_of(model)
    sizes = family.sizes(model, model.vocabulary)
    kept = family.blocks_kept(sizes, config.parallel.recompute, config.chunked()) * training
    waiting = stored_type(config.parallel.keep_dtype, config.train.dtype).itemsize
    if "activations" in config.parallel.offload:
        kept /= model.layers
    logits = model.vocabulary * (1 + (training and model.logit_cap > 0))
    size = rows * (kept * waiting + logits * itemsize(config.train.dtype))
    return size / (mesh.p * mesh.replicas() * mesh.tensor_ranks())


def _wide(config: Config) -> int:
    return max(4, itemsize(config.train.dtype))
