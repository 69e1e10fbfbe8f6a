"""Dropout whose random numbers do not depend on the partition, the microbatches or the replicas.

The mask of an element depends only on the seed, the name of the operation, the step, and the index
of the sample in the batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.nn import functional

from hpc3d.ops.random import keep_mask, philox_key

_aten = torch.ops.aten


class Draw(NamedTuple):
    """Key of the random numbers for samples `first` to `first + samples` (exclusive) of a step.

    `denominators` maps names of loss terms to the number of valid targets per sample of the step.
    """

    seed: int
    step: int
    first: int
    samples: int
    denominators: Mapping[str, float] = MappingProxyType({})


def make_reproducible(node: fx.Node, original: fx.Node, draw: fx.Node) -> None:
    """Replace a random operation with a version that uses reproducible random numbers.

    `node` is a copy of the operation `original`. The random numbers depend only on the name of
    `original` and on the seed, step and samples in a `Draw`, which the graph receives at run time
    as its input `draw`. Raises ValueError for random operations without a rule in this module.
    """
    packet = getattr(node.target, "overloadpacket", None)
    if torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
        return
    given = arguments_of(node)
    if not given.get(_RATES.get(packet, ""), 1.0) or given.get("train") is False:
        return
    if packet not in _RULES:
        raise ValueError(
            f"{original.name}: the random numbers of {packet} would depend on the partition; use "
            "dropout instead of this operation"
        )
    sizes = enumerate(original.meta["val"].shape)
    batch_dim = next((dim for dim, size in sizes if isinstance(size, torch.SymInt)), None)
    node.target, node.kwargs = _RULES[packet], given
    node.args = original.name, draw, batch_dim


def arguments_of(node: fx.Node) -> dict[str, Any]:
    """Return all arguments of an operation by name, including default values."""
    schema = node.target._schema.arguments
    given = {each.name: each.default_value for each in schema if each.has_default_value()}
    return given | {each.name: value for each, value in zip(schema, node.args)} | node.kwargs


def _factors(name, draw, dim, rate, shape, dtype):
    """Return a tensor of dropout factors, 0 or 1 / (1 - rate), with the given shape.

    Dimension `dim` contains the samples, with one or several rows per sample.
    """
    rows = 1 if dim is None else shape[dim]
    others = [size for index, size in enumerate(shape) if index != dim]
    first = 0 if dim is None else draw.first * rows // draw.samples
    key = philox_key((draw.seed, name, draw.step))
    width = prod(others)
    kept = keep_mask(key, rate, range(first, first + rows), range(width), width)
    factors = torch.from_numpy(kept).to(dtype).mul_(1 / (1 - rate))
    return factors.view(shape) if dim is None else factors.view(rows, *others).movedim(0, dim)


def _dropout(name, draw, dim, input, p, train):
    return input * _factors(name, draw, dim, p, input.shape, input.dtype)


def _dropout_in_place(name, draw, dim, self, p, train):
    return self.mul_(_factors(name, draw, dim, p, self.shape, self.dtype))


def _feature_dropout(name, draw, dim, input, p, train):
    """Apply dropout that sets entire channels to zero."""
    shape = [*input.shape[:2], *[1] * (input.dim() - 2)]
    return input * _factors(name, draw, dim, p, shape, input.dtype)


def _attention(name, draw, dim, query, key, value, attn_mask, dropout_p, is_causal, **how):
    """Return softmax(q k^T scale + mask) v with dropout applied to the attention probabilities."""
    if how.get("enable_gqa"):
        repeats = query.shape[-3] // key.shape[-3]
        key, value = (each.repeat_interleave(repeats, -3) for each in (key, value))
    scale = how.get("scale") or query.shape[-1] ** -0.5
    scores = query @ key.transpose(-2, -1) * scale
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attn_mask, -torch.inf)
    elif attn_mask is not None:
        scores = scores + attn_mask
    kept = functional.softmax(scores, -1)
    kept = kept * _factors(name, draw, dim, dropout_p, kept.shape, kept.dtype)
    return kept @ value


_RULES = {
    _aten.dropout: _dropout,
    _aten.dropout_: _dropout_in_place,
    _aten.feature_dropout: _feature_dropout,
    _aten.scaled_dot_product_attention: _attention,
}
_RATES = {
    **dict.fromkeys(_RULES, "p"),
    _aten.scaled_dot_product_attention: "dropout_p",
    **dict.fromkeys((_aten.lstm, _aten.gru, _aten.rnn_tanh, _aten.rnn_relu), "dropout"),
}
