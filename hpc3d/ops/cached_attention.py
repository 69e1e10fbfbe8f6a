"""Causal attention with a key/value cache: new tokens attend to cached and new tokens."""

from __future__ import annotations

from math import sqrt
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from hpc3d.arrays.narrow import wide
from hpc3d.arrays.primitive import primitive
from hpc3d.ops.attention import AttentionMask, HeadForm, band, heads_of, length, queries_of
from hpc3d.ops.rows import soft_cap

if TYPE_CHECKING:
    from hpc3d.arrays.array import Array, Empty

SCORES = 1 << 22  # maximum bytes of scores per batch of heads


class Cache(NamedTuple):
    """Keys and values [2, B, heads, T, D] of the positions before `first`, the first new token.

    A token attends to the last `window` positions up to its own (0: to all of them).
    """

    arrays: Array
    first: int
    window: int = 0

    def seen(self, sequence: int) -> slice:
        """Return the positions to which at least one of `sequence` new tokens attends."""
        new = slice(self.first, self.first + sequence)
        return AttentionMask(window=self.window).keys(new, new.stop)

    def extended(self, k: Array, v: Array) -> list[Array]:
        """Append the keys and values of new tokens to the cache.

        Returns the keys and the values of the positions that are `seen`, each [B, heads,
        positions, D].
        """
        seen = self.seen(k.shape[2])
        for kept, new in zip(self.arrays, (k, v), strict=True):
            kept[:, :, self.first : seen.stop] = new
        return [kept[:, :, seen] for kept in self.arrays]


@primitive
def attend_cached(qkv: Array, sequence: int, form: HeadForm, cache: Cache, empty: Empty) -> Array:
    """Compute softmax(q k^T / sqrt(D) + mask) v for `sequence` = t new tokens per sample.

    Returns the output [B*t, heads*g*D] for qkv [B*t, heads*(g+2)*D]. The new keys and values are
    appended to `cache`. The function saves nothing for a backward pass, because it is only used
    for inference.
    """
    q, k, v = heads_of(qkv, sequence, form)
    batch, heads, g, _, width = q.shape
    seen, (keys, values) = cache.seen(sequence), cache.extended(k, v)
    out = empty((batch * sequence, heads * g * width), qkv.dtype)
    by_query = queries_of(out, sequence, form)
    real = wide(qkv.dtype)
    mask = band((length(seen), sequence), seen.start - cache.first, cache.window, real).T
    fit = max(1, SCORES // (g * mask.nbytes))
    scale = real.type(1 / sqrt(width))
    for sample in range(batch):
        for start in range(0, heads, fit):
            here = sample, slice(start, start + fit)
            scores = (q[here] * scale) @ keys[here][:, None].swapaxes(-1, -2)
            if form.cap:
                soft_cap(scores.reshape(-1, scores.shape[-1]), form.cap)
            scores += mask
            scores -= scores.max(-1, keepdims=True)
            np.exp(scores, out=scores)
            scores /= scores.sum(-1, keepdims=True)
            np.matmul(scores, values[here][:, None], out=by_query[here])
    return out


attend_cached.narrow(attend_cached.numpy)


@attend_cached.abstract
def _(qkv, sequence, form, cache, empty):
    rows, heads = qkv.shape[0], qkv.shape[1] // form.columns * form.queries
    count, seen = rows // sequence * heads, length(cache.seen(sequence))
    qkv.meter.product(sequence, seen, form.width, qkv.dtype, count)
    qkv.meter.product(sequence, form.width, seen, qkv.dtype, count)
    return empty((rows, heads * form.width), qkv.dtype)


@attend_cached.cuda
def _(gpu, qkv, sequence, form, cache, empty):
    q, k, v = heads_of(qkv, sequence, form)
    batch, heads, g, _, width = q.shape
    at = cache.seen(sequence)
    seen = length(at)
    keys, values = (gpu.contiguous(part).reshape(-1, seen, width) for part in cache.extended(k, v))
    queries = gpu.contiguous(q).reshape(batch * heads, g * sequence, width)
    scores = gpu.empty((batch * heads, g * sequence, seen), qkv.dtype)
    gpu.multiply(queries, keys.swapaxes(1, 2), scores)
    given = {"queries": sequence, "first": cache.first - at.start, "columns": seen}
    given |= {"scores": scores, "window": cache.window, "scale": 1 / sqrt(width)}
    given["cap"] = form.cap
    gpu.launch("cached_softmax", batch * heads * g * sequence, seen, **given)
    out = gpu.empty(queries.shape, qkv.dtype)
    gpu.multiply(scores, values, out)
    joined = empty((batch * sequence, heads * g * width), qkv.dtype)
    by_query = queries_of(joined, sequence, form)
    by_query[...] = out.reshape(q.shape)
    return joined
