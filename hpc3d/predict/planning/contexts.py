"""Which layouts cut sequences along the context axis, and what they move along it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from hpc3d.config.size_rules import divisors
from hpc3d.model.families import family_of

if TYPE_CHECKING:
    from hpc3d.config.input_file import Config

_FULL = 0.5  # of the memory: what sequences may keep on ranks that do not cut them
_SPARE = 4  # times as many ranks as that needs to cut them
_FEW, _ENOUGH = 2, 4  # times as many microbatches as stages: what leaves a bubble, and what hardly

_FORWARD_AND_BACKWARD = 3.5  # operations of both, over those forward: 14 for 4


def contexts(c: int) -> Iterator[tuple[str, int]]:
    """(parallel.context, parallel.ulysses) for so many ranks."""
    yield from (("ring", 1), ("all-to-all", 1))
    yield from (("both", size) for size in divisors(c)[1:-1])


def with_context(config: Config, c: int, context: str, ulysses: int) -> Config:
    """A layout whose sequences are cut."""
    parallel = replace(config.parallel, context=context, ulysses=ulysses)
    return replace(config, mesh=replace(config.mesh, c=c), parallel=parallel)


def may_cut(config: Config, c: int, memory: float) -> bool:
    """Whether a layout may gain by c ranks for each of its own that share sequences.

    As many more replicas take fewer words for the same work.  They are no way out where the batch
    does not divide over them, where they leave a pipeline too few microbatches, or where what
    whole sequences keep, as many as a pipeline has in flight, leaves little of `memory`; nor are
    many more ranks than these need that share sequences.
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
    """Bytes that a rank keeps of a sequence for its backward pass."""
    model, mesh, family = config.model, config.mesh, family_of(config.model)
    sizes = family.sizes(model, model.vocabulary)
    stage = family.blocks_kept(sizes, "none", True) / mesh.p
    elements = model.sequence * stage / (mesh.x * mesh.y * mesh.z)
    return elements * np.dtype(config.train.dtype).itemsize


def ring_words(config: Config) -> float:
    """Words of keys, values and their gradients that a rank receives in a step from the ranks of
    its ring; those of gradients have 32 bits at least."""
    itemsize = np.dtype(config.train.dtype).itemsize
    wide = max(4, itemsize) / itemsize
    hops = config.context().rings - 1
    return 2 * hops * (2 + wide) * _elements(config, keys=True)


def exchange_words(config: Config) -> float:
    """Words that a rank receives in a step from those with which it exchanges heads."""
    share = 1 - 1 / config.context().heads
    elements = _elements(config, keys=True) + _elements(config, keys=False)
    return 4 * share * elements


def attention_flops(config: Config) -> float:
    """Floating-point operations of attention of a rank in a step, chunk by chunk: backward makes
    the scores again, and half of them are hidden by a causal mask."""
    model, mesh, family = config.model, config.mesh, family_of(config.model)
    square = family.attention(family.sizes(model, model.vocabulary))
    rows = config.train.batch * model.sequence / mesh.replicas()
    share = model.layers / (mesh.p * mesh.x * mesh.y * mesh.z)
    return _FORWARD_AND_BACKWARD * square * rows * share * (0.5 if family.causal else 1.0)


def _elements(config: Config, keys: bool) -> float:
    """Elements of the keys, or of the queries, of a rank in all layers and microbatches."""
    model, mesh = config.model, config.mesh
    width = model.hidden * (model.kv_heads or model.heads) / model.heads if keys else model.hidden
    rows = config.train.batch * model.sequence / mesh.replicas()
    return rows * width * model.layers / (mesh.p * mesh.x * mesh.y * mesh.z)
