"""Layouts with context parallelism, and their communication volume along the context axis."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from hpc3d.comm.grid import divisors
from hpc3d.model.families import family_of

if TYPE_CHECKING:
    from hpc3d.config.input_file import Config

# Saved activations that exceed this fraction of the memory justify context parallelism.
_FULL = 0.5
# Maximum ratio of the context-parallel size c to the smallest c with which a layout fits.
_SPARE = 4
# The bubble is considered large with fewer than _FEW microbatches per stage, and small with
# _ENOUGH or more.
_FEW, _ENOUGH = 2, 4

# Ratio of forward + backward FLOPs to forward FLOPs of attention: 2 GEMMs in the forward pass, and
# 5 in the backward pass, one of which recomputes the scores.
_FORWARD_AND_BACKWARD = 3.5


def contexts(c: int) -> Iterator[tuple[str, int]]:
    """Yield all valid pairs (parallel.context, parallel.ulysses) for c context-parallel ranks."""
    yield from (("ring", 1), ("all-to-all", 1))
    yield from (("both", size) for size in divisors(c)[1:-1])


def with_context(config: Config, c: int, context: str, ulysses: int) -> Config:
    """Return the layout with c-way context parallelism of type `context`."""
    parallel = replace(config.parallel, context=context, ulysses=ulysses)
    return replace(config, mesh=replace(config.mesh, c=c), parallel=parallel)


def may_cut(config: Config, c: int, memory: float) -> bool:
    """Return True if a layout may benefit from c-way context parallelism.

    Data parallelism with c times as many replicas gives each rank the same work with less
    communication. Context parallelism is therefore useful only in three cases: the batch is not
    divisible by this number of replicas, too few microbatches would remain for the pipeline, or
    the saved activations of full sequences exceed the fraction _FULL of `memory` bytes. In the
    last case, c should not be much larger than necessary to fit in memory.
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
    """Return the bytes of saved activations per sequence on a rank."""
    model, mesh, family = config.model, config.mesh, family_of(config.model)
    sizes = family.sizes(model, model.vocabulary)
    stage = family.blocks_kept(sizes, "none", True) / mesh.p
    elements = model.sequence * stage / mesh.tensor_ranks()
    return elements * np.dtype(config.train.dtype).itemsize


def ring_words(config: Config) -> float:
    """Return the communication volume of ring attention per rank and step.

    The volume includes keys, values and their gradients, in units of `train.dtype` elements.
    Gradients are communicated with at least 32 bits per element.
    """
    itemsize = np.dtype(config.train.dtype).itemsize
    wide = max(4, itemsize) / itemsize
    return 2 * mean_hops(config) * (2 + wide) * _elements(config, keys=True)


def mean_hops(config: Config) -> float:
    """Return the number of hops around the ring, on average over the layers."""
    model, context = config.model, config.context()
    windows = family_of(model).sizes(model, model.vocabulary).windows()
    hops = sum(count * len(context.hops(window)) for window, count in windows.items())
    return hops / model.layers


def exchange_words(config: Config) -> float:
    """Return the communication volume of Ulysses all-to-alls per rank and step, in elements."""
    share = 1 - 1 / config.context().heads
    elements = _elements(config, keys=True) + _elements(config, keys=False)
    return 4 * share * elements


def attention_flops(config: Config) -> float:
    """Return the FLOPs of chunked attention per rank and step.

    The FLOPs include those for recomputing the scores in the backward pass. A causal mask halves
    the FLOPs.
    """
    model, mesh, family = config.model, config.mesh, family_of(config.model)
    square = family.attention(family.sizes(model, model.vocabulary))
    rows = config.train.batch * model.sequence / mesh.replicas()
    share = model.layers / (mesh.p * mesh.tensor_ranks())
    return _FORWARD_AND_BACKWARD * square * rows * share * (0.5 if family.causal else 1.0)


def _elements(config: Config, keys: bool) -> float:
    """Return the number of query elements that a rank computes per step, over all its layers.

    If `keys` is true, return the number of key elements instead.
    """
    model, mesh = config.model, config.mesh
    width = ((model.kv_heads or model.heads) if keys else model.heads) * model.head_width
    rows = config.train.batch * model.sequence / mesh.replicas()
    return rows * width * model.layers / (mesh.p * mesh.tensor_ranks())
