"""What a rank of a run holds at least: a run that cannot fit is refused before it starts.

With Psi parameters of e bytes on p t ranks (t = x y z) and r = c d e ranks with other tokens,
n = b s h elements of a microbatch's block on t r ranks, L layers and a heads:

    parameters      (e + g + g states) Psi / (p t), what parallel.zero shares out over r; in 16
                    bits gradients and states have g = 4 bytes, and there is a state more, the
                    master copy.  States of another type have bytes of their own, and those of
                    whole rows and columns next to none.  Experts are cut over the axis e, and
                    parallel.zero shares them out over c d
    residual        g of each element of a block's matrices that parallel.compression takes
    activations     one microbatch: k n e L / (p t r), e that of parallel.keep_dtype, k = 16 +
                    a s / h, 16 + a / h (chunked), 16 or 1 (recompute); of a mixture of experts
                    also its slots
    logits          b s V e / (p t r), on the last stage
    batch           inputs and targets of the whole batch in int32, 8 b s, on every rank

These are means over the ranks; whatever the split, some rank holds as much.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from hpc3d.arrays.narrow import itemsize
from hpc3d.console.sanitize import counted
from hpc3d.model import families
from hpc3d.model.families import expert_parameters, family_of
from hpc3d.model.kept import stored_type
from hpc3d.runtime import host_memory
from hpc3d.training.gradient_compression import compression_spec
from hpc3d.training.optimizers.catalog import optimizer_of

if TYPE_CHECKING:
    from hpc3d.config.input_file import Config


def refuse_what_cannot_fit(config: Config, here: int) -> None:
    """ValueError if `here` ranks of a settled `config` on this machine outgrow its memory, or what
    they offload has no place."""
    wanted = os.environ.get("TMPDIR")
    if config.parallel.offload and wanted and not os.access(wanted, os.W_OK | os.X_OK):
        raise ValueError(
            f"parallel.offload: TMPDIR = {wanted!r:.200} cannot be written to; name a "
            "folder on a disk"
        )
    need, memory = here * least(config), host_memory.total()
    if config.train.backend == "numpy" and need > memory:
        raise ValueError(
            f"model and train: {counted(here, 'rank')} here cannot hold less than "
            f"{need / 1e9:.4g} GB, and this machine has {memory / 1e9:.4g} GB: use more machines, "
            "parallel.recompute, more parallel.microbatches or a smaller model or batch "
            "(python -m hpc3d.plan INPUT.toml --ranks N finds what fits)"
        )


def least(config: Config) -> float:
    """Bytes of a rank, with the vocabulary settled."""
    return (
        parameters(config) + _activations(config) + 8 * config.train.batch * config.model.sequence
    )


def parameters(config: Config) -> float:
    """Bytes of values, gradients and the optimiser's states."""
    mesh, experts = config.mesh, expert_parameters(config.model)
    dense = families.parameters(config.model).total - experts
    held = dense * _bytes_held(config, mesh.replicas())
    held += experts / mesh.e * _bytes_held(config, mesh.d * mesh.c)
    return (held + _residual(config)) / (mesh.p * _tensor(config))


def _bytes_held(config: Config, copies: int) -> float:
    """Bytes of a parameter on each of so many ranks that share it out as parallel.zero says."""
    e, wide, zero = itemsize(config.train.dtype), _wide(config), config.parallel.zero
    specs = optimizer_of(config).STATES
    states = sum((itemsize(spec.dtype) if spec.dtype else wide) * spec.density() for spec in specs)
    states += wide * (wide > e)
    states *= "optimizer" not in config.parallel.offload
    values = e * ("parameters" not in config.parallel.offload)
    # Values, gradients, states, and what shares them out.
    shares = [(values, 3), (wide, 2), (states, 1)]
    return sum(size / (copies if zero >= stage else 1) for size, stage in shares)


def _residual(config: Config) -> float:
    """Bytes of what compression leaves out of the gradients of dense blocks, on all ranks that
    have the same tokens."""
    model, copies = config.model, config.mesh.replicas()
    spec = compression_spec(config)
    narrowest = model.hidden // _tensor(config), model.hidden
    if spec is None or copies == 1 or not all(narrowest):
        return 0.0
    if not spec.saves(narrowest, copies, _wide(config)):
        return 0.0
    return (families.block_weights(model).total - expert_parameters(model)) * _wide(config)


def _activations(config: Config) -> float:
    """Bytes of what one microbatch keeps for its backward pass, and of its logits."""
    model, mesh = config.model, config.mesh
    rows = config.train.batch * model.sequence / config.parallel.microbatches
    family = family_of(model)
    sizes = family.sizes(model, model.vocabulary)
    kept = family.blocks_kept(sizes, config.parallel.recompute, config.chunked())
    waiting = stored_type(config.parallel.keep_dtype, config.train.dtype).itemsize
    if "activations" in config.parallel.offload:
        kept /= model.layers
    size = rows * (kept * waiting + model.vocabulary * itemsize(config.train.dtype))
    return size / (mesh.p * mesh.replicas() * _tensor(config))


def _wide(config: Config) -> int:
    """Bytes of an element of what is summed."""
    return max(4, itemsize(config.train.dtype))


def _tensor(config: Config) -> int:
    return config.mesh.x * config.mesh.y * config.mesh.z
