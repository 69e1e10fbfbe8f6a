"""Causal attention with a key/value cache: new tokens attend to cached and new tokens."""

from __future__ import annotations

from math import sqrt
from typing import TYPE_CHECKING

import numpy as np

from hpc3d.arrays.narrow import wide
from hpc3d.arrays.primitive import primitive
from hpc3d.ops.attention import HeadForm, heads_of, queries_of

if TYPE_CHECKING:
    from hpc3d.arrays.array import Array, Empty

SCORES = 1 << 22  # maximum bytes of scores per batch of heads


@primitive
def attend_cached(
    qkv: Array, sequence: int, form: HeadForm, cache: Array, first: int, empty: Empty
) -> Array:
    """Compute softmax(q k^T / sqrt(D) + mask) v for `sequence` = t new tokens per sample.

    Returns the output [B*t, heads*g*D] for qkv [B*t, heads*(g+2)*D]. The first new token is at
    position `first`. `cache` [2, B, heads, T, D] contains the keys and values of the earlier
    positions; the new keys and values are appended. The function saves nothing for a backward
    pass, because it is only used for inference.
    """
    q, k, v = heads_of(qkv, sequence, form)
    batch, heads, g, _, width = q.shape
    keys, values = _extended(cache, k, v, first)
    out = empty((batch * sequence, heads * g * width), qkv.dtype)
    by_query = queries_of(out, sequence, form)
    real = wide(qkv.dtype)
    future = np.triu(np.full((sequence, first + sequence), -np.inf, real), first + 1)
    fit = max(1, SCORES // (g * future.nbytes))
    scale = real.type(1 / sqrt(width))
    for sample in range(batch):
        for start in range(0, heads, fit):
            here = sample, slice(start, start + fit)
            scores = (q[here] * scale) @ keys[here][:, None].swapaxes(-1, -2)
            scores += future
            scores -= scores.max(-1, keepdims=True)
            np.exp(scores, out=scores)
            scores /= scores.sum(-1, keepdims=True)
            np.matmul(scores, values[here][:, None], out=by_query[here])
    return out


attend_cached.narrow(attend_cached.numpy)


@attend_cached.abstract
def _(qkv, sequence, form, cache, first, empty):
    rows, heads = qkv.shape[0], qkv.shape[1] // form.columns * form.queries
    count, seen = rows // sequence * heads, first + sequence
    qkv.meter.product(sequence, seen, form.width, qkv.dtype, count)
    qkv.meter.product(sequence, form.width, seen, qkv.dtype, count)
    return empty((rows, heads * form.width), qkv.dtype)


@attend_cached.cuda
def _(gpu, qkv, sequence, form, cache, first, empty):
    q, k, v = heads_of(qkv, sequence, form)
    batch, heads, g, _, width = q.shape
    seen = first + sequence
    keys, values = (
        gpu.contiguous(part).reshape(-1, seen, width) for part in _extended(cache, k, v, first)
    )
    queries = gpu.contiguous(q).reshape(batch * heads, g * sequence, width)
    scores = gpu.empty((batch * heads, g * sequence, seen), qkv.dtype)
    gpu.multiply(queries, keys.swapaxes(1, 2), scores)
    sizes = {"queries": sequence, "first": first, "columns": seen, "scale": 1 / sqrt(width)}
    gpu.launch("cached_softmax", batch * heads * g * sequence, seen, scores=scores, **sizes)
    out = gpu.empty(queries.shape, qkv.dtype)
    gpu.multiply(scores, values, out)
    joined = empty((batch * sequence, heads * g * width), qkv.dtype)
    by_query = queries_of(joined, sequence, form)
    by_query[...] = out.reshape(q.shape)
    return joined


def _extended(cache: Array, k: Array, v: Array, first: int) -> list[Array]:
    """Append the keys `k` and values `v` of new tokens to the cache.

    Returns the keys and the values of all positions so far, each [B, heads, first + t, D].
    """
    seen = first + k.shape[2]
    for kept, new in zip(cache, (k, v), strict=True):
        kept[:, :, first:seen] = new
    return [kept[:, :, :seen] for kept in cache]
