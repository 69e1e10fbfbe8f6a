"""Layouts with context parallelism, and their communication volume along the context axis."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from hpc3d.config.size_rules import divisors
from hpc3d.model.families import family_of

if TYPE_CHECKING:
    from hpc3d.config.input_file import Config

_FULL = 0.5  # fraction of memory that saved activations may use without context parallelism
_SPARE = 4  # maximum ratio of c to the smallest c that fits in memory
# The bubble is large with fewer than _FEW microbatches per stage, and small with at least _ENOUGH.
_FEW, _ENOUGH = 2, 4

_FORWARD_AND_BACKWARD = 3.5  # (forward + backward FLOPs) / forward FLOPs = 14 / 4


def contexts(c: int) -> Iterator[tuple[str, int]]:
    """Yield the values of (parallel.context, parallel.ulysses) for c context-parallel ranks."""
    yield from (("ring", 1), ("all-to-all", 1))
    yield from (("both", size) for size in divisors(c)[1:-1])


def with_context(config: Config, c: int, context: str, ulysses: int) -> Config:
    """Return a copy of the layout with c-way context parallelism of the given kind."""
    parallel = replace(config.parallel, context=context, ulysses=ulysses)
    return replace(config, mesh=replace(config.mesh, c=c), parallel=parallel)


def may_cut(config: Config, c: int, memory: float) -> bool:
    """Return True if a layout may benefit from c-way context parallelism.

    Data parallelism with c times as many replicas gives each rank the same work with less
    communication. Context parallelism is therefore useful only in three cases: the batch is not
    divisible by the larger number of replicas, too few microbatches remain for a pipeline, or the
    saved activations of full sequences exceed the fraction _FULL of `memory` bytes. In the last
    case, values of c far above the smallest one that fits in memory are not useful.
    """
    mesh = config.mesh
    batch, copies, stages = config.train.batch, mesh.d * mesh.e * c, mesh.p
    if config.model.sequence % c:
        return False
    if batch % copies:
        return True
    micros = batch // copies
    if stages > 1 and micros < _FEW * stages and micros * c <= _ENOUGH * stages:
        return True
    needed = min(stages, micros) * _kept(config) / (_FULL * memory)
    return needed > 1 and c <= _SPARE * needed


def _kept(config: Config) -> float:
    """Return the size in bytes of the saved activations of a sequence on a rank."""
    model, mesh, family = config.model, config.mesh, family_of(config.model)
    sizes = family.sizes(model, model.vocabulary)
    stage = family.blocks_kept(sizes, "none", True) / mesh.p
    elements = model.sequence * stage / (mesh.x * mesh.y * mesh.z)
    return elements * np.dtype(config.train.dtype).itemsize


def ring_words(config: Config) -> float:
    """Return the number of elements that a rank receives per step in ring attention.

    The number includes keys, values and their gradients, and counts in elements of `train.dtype`.
    Gradients have at least 32 bits per element.
    """
    itemsize = np.dtype(config.train.dtype).itemsize
    wide = max(4, itemsize) / itemsize
    hops = config.context().rings - 1
    return 2 * hops * (2 + wide) * _elements(config, keys=True)


def exchange_words(config: Config) -> float:
    """Return the number of elements received by a rank per step in Ulysses all-to-all calls."""
    share = 1 - 1 / config.context().heads
    elements = _elements(config, keys=True) + _elements(config, keys=False)
    return 4 * share * elements


def attention_flops(config: Config) -> float:
    """Return the FLOPs of chunked attention per rank and step.

    The number includes the recomputation of the scores in the backward pass. With a causal mask,
    half of the scores are skipped.
    """
    model, mesh, family = config.model, config.mesh, family_of(config.model)
    square = family.attention(family.sizes(model, model.vocabulary))
    rows = config.train.batch * model.sequence / mesh.replicas()
    share = model.layers / (mesh.p * mesh.x * mesh.y * mesh.z)
    return _FORWARD_AND_BACKWARD * square * rows * share * (0.5 if family.causal else 1.0)


def _elements(config: Config, keys: bool) -> float:
    """Return the number of key (or query) elements of a rank per step, summed over all layers."""
    model, mesh = config.model, config.mesh
    width = model.hidden * (model.kv_heads or model.heads) / model.heads if keys else model.hidden
    rows = config.train.batch * model.sequence / mesh.replicas()
    return rows * width * model.layers / (mesh.p * mesh.x * mesh.y * mesh.z)
