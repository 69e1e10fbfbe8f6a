"""Layouts with context parallelism, and the communication volume along the context axis."""

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
_SPARE = 4  # largest ratio of context ranks to those that memory requires
_FEW, _ENOUGH = 2, 4  # microbatches per stage that leave a large and a small bubble

_FORWARD_AND_BACKWARD = 3.5  # FLOPs of both passes over those of forward: 14 / 4


def contexts(c: int) -> Iterator[tuple[str, int]]:
    """Yield (parallel.context, parallel.ulysses) for c context ranks."""
    yield from (("ring", 1), ("all-to-all", 1))
    yield from (("both", size) for size in divisors(c)[1:-1])


def with_context(config: Config, c: int, context: str, ulysses: int) -> Config:
    """Return a layout with context parallelism."""
    parallel = replace(config.parallel, context=context, ulysses=ulysses)
    return replace(config, mesh=replace(config.mesh, c=c), parallel=parallel)


def may_cut(config: Config, c: int, memory: float) -> bool:
    """Return True if a layout may gain from c-way context parallelism.

    With c times as many replicas instead, ranks do the same work with less communication. That is
    not possible if the batch does not divide over them, if too few microbatches remain for a
    pipeline, or if the saved activations of full sequences, as many as a pipeline has in flight,
    exceed _FULL of `memory`. Many more context ranks than memory requires do not help.
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
    """Return the bytes of saved activations per rank and sequence."""
    model, mesh, family = config.model, config.mesh, family_of(config.model)
    sizes = family.sizes(model, model.vocabulary)
    stage = family.blocks_kept(sizes, "none", True) / mesh.p
    elements = model.sequence * stage / (mesh.x * mesh.y * mesh.z)
    return elements * np.dtype(config.train.dtype).itemsize


def ring_words(config: Config) -> float:
    """Return the elements of keys, values and their gradients that a rank receives in its ring.

    The count is per step. Gradients have at least 32 bits.
    """
    itemsize = np.dtype(config.train.dtype).itemsize
    wide = max(4, itemsize) / itemsize
    hops = config.context().rings - 1
    return 2 * hops * (2 + wide) * _elements(config, keys=True)


def exchange_words(config: Config) -> float:
    """Return the elements that a rank receives per step in its all-to-all (Ulysses) group."""
    share = 1 - 1 / config.context().heads
    elements = _elements(config, keys=True) + _elements(config, keys=False)
    return 4 * share * elements


def attention_flops(config: Config) -> float:
    """Return the FLOPs of chunked attention per rank and step.

    The backward pass recomputes the scores, and a causal mask hides half of them.
    """
    model, mesh, family = config.model, config.mesh, family_of(config.model)
    square = family.attention(family.sizes(model, model.vocabulary))
    rows = config.train.batch * model.sequence / mesh.replicas()
    share = model.layers / (mesh.p * mesh.x * mesh.y * mesh.z)
    return _FORWARD_AND_BACKWARD * square * rows * share * (0.5 if family.causal else 1.0)


def _elements(config: Config, keys: bool) -> float:
    """Return the elements of a rank's keys, or queries, in all layers and microbatches."""
    model, mesh = config.model, config.mesh
    width = model.hidden * (model.kv_heads or model.heads) / model.heads if keys else model.hidden
    rows = config.train.batch * model.sequence / mesh.replicas()
    return rows * width * model.layers / (mesh.p * mesh.x * mesh.y * mesh.z)
