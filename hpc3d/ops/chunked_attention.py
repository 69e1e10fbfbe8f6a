"""Chunked attention computes the score matrix tile by tile and never stores it in full.

For each chunk of queries, the contributions of the key chunks to the output rows are merged one
after another. If L is the log-sum-exp of the earlier scores, l and p are the log-sum-exp and the
softmax of the new scores, and L' is the log-sum-exp of the earlier and new scores,

    out <- out exp(L - L') + p v exp(l - L')    L' = log(exp L + exp l)

Keys may therefore be processed in any order and may come from other ranks (Milakov and Gimelshein
2018, arXiv:1805.02867; Dao et al. 2022, arXiv:2205.14135; Liu et al. 2023, arXiv:2310.01889). The
backward pass recomputes the probabilities from L.

On a GPU, one call of cuDNN processes a block of keys if cuDNN supports the attention. The call
returns p v and l, and the backward pass of the block takes the merged output and log-sum-exps.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby
from math import sqrt
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from hpc3d.arrays.narrow import wide
from hpc3d.arrays.primitive import composite, primitive
from hpc3d.arrays.worker_threads import parallel_for
from hpc3d.ops.attention import (
    LEAST,
    HeadForm,
    attend,
    attend_again,
    attend_grad,
    band,
    finite,
    heads_of,
    hide_documents,
    padding_bias,
    queries_of,
    stack_queries,
)
from hpc3d.ops.chunk_tiles import ChunkPair, Chunks, Hop, gpu_tiles
from hpc3d.ops.random import Mask, keep_mask
from hpc3d.ops.rows import soft_cap, soft_cap_grad

if TYPE_CHECKING:
    from hpc3d.arrays.array import Array, Empty
    from hpc3d.cuda.gpu import Gpu

_TILE = 256  # maximum number of queries, and of keys, per score tile (256 KiB in float32)
_SCORES = 1 << 18  # maximum bytes of score tiles per batch of heads


class Merged(NamedTuple):
    """Merged attention output for all keys processed so far, in float32 or wider.

    `out` is the output [B*t, heads*g*D], and `sums` the log-sum-exp of the scores [B, heads, g,
    t], which is -inf before the first key.
    """

    out: Array
    sums: Array


class ChunkGrad(NamedTuple):
    """Inputs of the attention backward pass in addition to q, k and v.

    `dout` is the gradient of the output [B*t, heads*g*D]. `sums` is the log-sum-exp of the scores
    of each query [B, heads, g, t], and `dots` is the result of `row_dots`.
    """

    dout: Array
    sums: Array
    dots: Array


@primitive
def keys_and_values(qkv: Array, sequence: int, form: HeadForm, empty: Empty) -> Array:
    """Copy k and v of qkv [B*t, heads*(g+2)*D] into one message buffer [2, B, heads, t, D]."""
    _, k, v = heads_of(qkv, sequence, form)
    both = empty((2, *k.shape), qkv.dtype)
    both[0], both[1] = k, v
    return both


@keys_and_values.abstract
def _(qkv, sequence, form, empty):
    heads = qkv.shape[1] // form.columns
    return empty((2, qkv.shape[0] // sequence, heads, sequence, form.width), qkv.dtype)


def _empty_merged(qkv: Array, sequence: int, form: HeadForm, empty: Empty) -> Merged:
    heads = qkv.shape[1] // form.columns
    shape = qkv.shape[0] // sequence, heads, form.queries, sequence
    out = empty((qkv.shape[0], heads * form.queries * form.width), wide(qkv.dtype))
    return Merged(out, empty(shape, wide(qkv.dtype)))


@primitive
def begin_merging(qkv: Array, sequence: int, form: HeadForm, empty: Empty) -> Merged:
    """Return the `Merged` state before any keys are processed: output 0, log-sum-exp -inf."""
    merged = _empty_merged(qkv, sequence, form, empty)
    merged.out[...], merged.sums[...] = 0, -np.inf
    return merged


begin_merging.abstract(_empty_merged)


@primitive
def merge_chunks(qkv: Array, kv: Array, merged: Merged, chunks: Chunks) -> None:
    """Compute attention to a block of keys and values, and merge the result into `merged`.

    The queries are taken from qkv [B*t, heads*(g+2)*D]; `kv` [2, B, heads, t, D] holds the keys
    and values.
    """
    sequence, form = kv.shape[3], chunks.form
    q, _, _ = heads_of(qkv, sequence, form)
    out = queries_of(merged.out, sequence, form)

    def block(each):
        at, tile = each
        s, _ = _scores(q[at][:, :, tile.queries], kv[0], at, tile, chunks)
        old = merged.sums[at][:, :, tile.queries]
        top = finite(s.max(0))
        s -= top
        np.exp(s, out=s)
        with np.errstate(divide="ignore"):
            # sum over keys by a product with a vector of ones
            sums = np.ones(len(s), s.dtype) @ s.reshape(len(s), -1)
            new = np.log(sums).reshape(top.shape) + top
        total = np.logaddexp(old, new.reshape(old.shape))
        base = finite(total)
        if chunks.drop is not None:
            s *= _factors(chunks.drop, at, tile, s, form)
        added = s.transpose(1, 2, 0) @ kv[1][at][:, tile.keys]
        added *= np.exp(top - base.reshape(top.shape))[..., None]
        rows = out[at][:, :, tile.queries]
        rows *= np.exp(old - base)[..., None]
        rows += added.reshape(rows.shape)
        old[...] = total

    _for_tiles(block, chunks, kv)


def _for_tiles(
    function: Callable[[tuple[tuple[int, slice], ChunkPair]], object], chunks: Chunks, kv: Array
) -> None:
    """Call `function` for each tile, in parallel for the heads and samples of the same tile."""
    tiles = chunks.tiles(kv, _TILE, _SCORES)
    for _, each in groupby(tiles, key=lambda tile: tile[1]):
        parallel_for(function, [*each])


@merge_chunks.abstract
def _(qkv, kv, merged, chunks):
    chunks.meter(kv, inward=1, outward=1, kernels=[attend.__name__])


@merge_chunks.cuda
def _(gpu, qkv, kv, merged, chunks):
    sequence = kv.shape[3]
    q, _, _ = heads_of(qkv, sequence, chunks.form)
    if chunks.by_cudnn(gpu, kv):
        hop = chunks.hop()
        k, v = kv[:, :, :, hop.keys]
        bias = padding_bias(gpu, chunks.padding, hop.keys, kv.dtype)
        q = q[:, :, :, hop.queries]
        added, sums = gpu.flash.hop(q, k, v, hop.causal, chunks.window, bias)
        least = -np.inf if bias is None else LEAST
        _add_hop(gpu, merged.out, added, hop, (merged.sums, sums), least)
        return
    for tile in gpu_tiles(gpu, chunks, kv):
        (k, v), queries = tile.keys(kv), tile.queries(q)
        p, kept = tile.scores(k, queries), gpu.empty(tile.work, np.float32)
        given = {"sums": merged.sums[tile.at], "kept": kept, **tile.given(sequence)}
        gpu.launch("chunk_softmax", *tile.work, scores=p, **given)
        added = gpu.empty(queries.shape, np.float32)
        gpu.multiply(p.swapaxes(1, 2), v, added)
        tile.add(added, merged.out, sequence, kept)


@composite
def end_merging(merged: Merged, dtype: np.dtype, empty: Empty) -> Array:
    """Return the merged output, converted to `dtype`."""
    if merged.out.dtype == dtype:
        return merged.out
    out = empty(merged.out.shape, dtype)
    out[...] = merged.out
    return out


@primitive
def row_dots(dout: Array, out: Array, sequence: int, chunks: Chunks, empty: Empty) -> Array:
    """Return the dot products of dout and out over the features of a head, [B, heads, g, t].

    If cuDNN is used, return `out`, from which its backward pass computes the dot products.
    """
    a, b = (queries_of(each, sequence, chunks.form) for each in (dout, out))
    dots = empty(a.shape[:-1], wide(dout.dtype))
    np.einsum("bhgtd,bhgtd->bhgt", a, b, out=dots, dtype=dots.dtype)
    return dots


@row_dots.abstract
def _(dout, out, sequence, chunks, empty):
    return empty(queries_of(dout, sequence, chunks.form).shape[:-1], wide(dout.dtype))


@row_dots.cuda
def _(gpu, dout, out, sequence, chunks, empty):
    if chunks.by_cudnn(gpu, dout):
        return out
    form = chunks.form
    dots = empty(queries_of(dout, sequence, form).shape[:-1], np.float32)
    sizes = {"heads": dout.shape[1] // form.width, "width": form.width, "sequence": sequence}
    gpu.launch("row_dots", *dout.shape, x=dout, y=out, dots=dots, **sizes)
    return dots


@primitive
def chunks_grad(
    qkv: Array, kv: Array, grad: ChunkGrad, dq: Array, chunks: Chunks, empty: Empty
) -> Array:
    """Return the contribution of a query block to the gradients of k and v, [2, B, heads, t, D].

    The query gradient is added to `dq` [B*t, heads*g*D]. All gradients are float32 or wider. With
    p = exp(s - L), ds = p (dp - sum(dout out)), dq = ds k / sqrt(D), dk = ds^T q / sqrt(D).
    """
    sequence, form, drop = kv.shape[3], chunks.form, chunks.drop
    q, _, _ = heads_of(qkv, sequence, form)
    dout, dq = queries_of(grad.dout, sequence, form), queries_of(dq, sequence, form)
    dkv = empty(kv.shape, wide(kv.dtype))
    dkv[...], scale = 0, 1 / sqrt(form.width)

    def block(each):
        at, tile = each
        k, v = (each[at][:, tile.keys] for each in kv)
        dk, dv = (each[at][:, tile.keys] for each in dkv)
        p, scaled = _scores(q[at][:, :, tile.queries], kv[0], at, tile, chunks)
        scores = np.maximum(p, -form.cap) if form.cap else None  # finite also for masked keys
        p -= finite(grad.sums[at][:, :, tile.queries]).reshape(p.shape[1:])
        np.exp(p, out=p)
        d = stack_queries(dout[at][:, :, tile.queries])
        dp = _by_columns(v, d)
        weights = p
        if drop is not None:
            factors = _factors(drop, at, tile, p, form)
            weights = p * factors
            dp *= factors
        dv += weights.swapaxes(0, 1) @ d
        dp -= grad.dots[at][:, :, tile.queries].reshape(p.shape[1:])
        dp *= p
        if scores is not None:
            soft_cap_grad(dp, scores, form.cap)
        dk += dp.swapaxes(0, 1) @ scaled
        rows = dq[at][:, :, tile.queries]
        rows += (dp.transpose(1, 2, 0) @ (k * k.dtype.type(scale))).reshape(rows.shape)

    _for_tiles(block, chunks, kv)
    return dkv


@chunks_grad.abstract
def _(qkv, kv, grad, dq, chunks, empty):
    kernels = attend_again.__name__, attend_grad.__name__
    chunks.meter(kv, inward=2, outward=3, kernels=kernels)
    return empty(kv.shape, wide(kv.dtype))


@chunks_grad.cuda
def _(gpu, qkv, kv, grad, dq, chunks, empty):
    sequence, form = kv.shape[3], chunks.form
    if chunks.by_cudnn(gpu, kv):
        return _hop_grad(gpu, qkv, kv, grad, dq, chunks, empty)
    q, dout = heads_of(qkv, sequence, form)[0], queries_of(grad.dout, sequence, form)
    dkv = empty(kv.shape, np.float32)
    dkv.fill(0)
    for tile in gpu_tiles(gpu, chunks, kv):
        (k, v), (dk, dv) = tile.keys(kv), tile.keys(dkv)
        queries, d = tile.queries(q), tile.queries(dout)
        p, ds = tile.scores(k, queries), tile.scores(v, d)
        sums = {"sums": grad.sums[tile.at], "dots": grad.dots[tile.at]}
        given = {**sums, **tile.given(sequence)}
        gpu.launch("chunk_softmax_grad", *tile.work, scores=p, dweights=ds, **given)
        gpu.multiply(p, d, dv, add=dv)
        gpu.multiply(ds, queries, dk, add=dk)
        added = gpu.empty(queries.shape, np.float32)
        gpu.multiply(ds.swapaxes(1, 2), k, added)
        tile.add(added, dq, sequence)
    return dkv


def _hop_grad(
    gpu: Gpu, qkv: Array, kv: Array, grad: ChunkGrad, dq: Array, chunks: Chunks, empty: Empty
) -> Array:
    """Compute the result of `chunks_grad` with cuDNN."""
    sequence, form, hop = kv.shape[3], chunks.form, chunks.hop()
    q, _, _ = heads_of(qkv, sequence, form)
    dout, out = (queries_of(each, sequence, form) for each in (grad.dout, grad.dots))
    q, dout, out = (each[:, :, :, hop.queries] for each in (q, dout, out))
    k, v = kv[:, :, :, hop.keys]
    sums, every = grad.sums, slice(0, sequence)
    if hop.queries != every:  # cuDNN requires an aligned address
        sums = gpu.empty(q.shape[:-1], np.float32)
        sums[...] = grad.sums[:, :, :, hop.queries]
    assert gpu.flash
    mask = {"causal": hop.causal, "window": chunks.window}
    mask["bias"] = padding_bias(gpu, chunks.padding, hop.keys, kv.dtype)
    added, added_kv = gpu.flash.hop_grad(dout, (q, k, v), out, sums, **mask)
    _add_hop(gpu, dq, added, hop)
    dkv = empty(kv.shape, np.float32)
    if hop.keys != every:
        dkv.fill(0)
    dkv[:, :, :, hop.keys] = added_kv
    return dkv


def _add_hop(
    gpu: Gpu,
    out: Array,
    added: Array,
    hop: Hop,
    sums: tuple[Array, Array] | None = None,
    least: float = -np.inf,
) -> None:
    """Add `added` [B, queries, heads, g, D] to the rows of a hop in out [B*t, heads*g*D].

    `sums` are the log-sum-exps of `out` [B, heads, g, t] and of `added` [B, heads, g, queries].
    If they are given, the two outputs are merged, and the first array is updated. If all keys of a
    query are masked, its log-sum-exp is less than `least`, and its output is not added.
    """
    batch, queries, heads, g, width = added.shape
    rows = out.reshape(batch, -1, out.shape[1])
    sizes = {"queries": queries, "heads": heads * g, "width": width, "first": hop.queries.start}
    step = batch if queries == rows.shape[1] else 1  # rows of one launch are contiguous
    for start in gpu.pieces(range(0, batch, step), lambda start: 0):
        samples = slice(start, start + step)
        old, new = (each[samples] for each in sums) if sums else (None, None)
        given = {"out": rows[samples, hop.queries], "added": added[samples], "sums": old}
        given |= {"added_sums": new, "sequence": rows.shape[1], "least": least, **sizes}
        gpu.launch("merge_hop", step * queries, heads * g * width, **given)


@primitive
def join_grads(qkv: Array, dq: Array, dkv: Array, form: HeadForm, empty: Empty) -> Array:
    """Assemble the gradient of qkv from the gradients of q, k and v."""
    sequence = dkv.shape[3]
    dqkv = empty(qkv.shape, qkv.dtype)
    q, k, v = heads_of(dqkv, sequence, form)
    q[...] = queries_of(dq, sequence, form)
    k[...], v[...] = dkv
    return dqkv


@join_grads.abstract
def _(qkv, dq, dkv, form, empty):
    return empty(qkv.shape, qkv.dtype)


for _op in (keys_and_values, begin_merging, end_merging, join_grads):  # only fill and copy arrays
    _op.cuda_as_numpy()
    _op.narrow(_op.numpy)


def _by_columns(k: Array, q: Array) -> Array:
    """Return k q^T, [key, heads, g*query], for k [heads, key, D] and q [heads, g*query, D].

    In this layout, sums and maxima over keys reduce the first dimension, so that every operation
    processes long contiguous rows.
    """
    heads, keys, _ = k.shape
    scores = np.empty((keys, heads, q.shape[1]), q.dtype)
    np.matmul(k, q.swapaxes(1, 2), out=scores.swapaxes(0, 1))
    return scores


def _scores(
    q: Array, k: Array, at: tuple[int, slice], tile: ChunkPair, chunks: Chunks
) -> tuple[Array, Array]:
    """Return the scores S[key, heads, g*query] = k q^T / sqrt(D) of a tile, and the scaled q.

    The scores are capped if the heads have a soft cap. The scores of masked keys are -inf.
    """
    scaled = stack_queries(q) * q.dtype.type(1 / sqrt(q.shape[-1]))
    scores = _by_columns(k[at][:, tile.keys], scaled)
    if chunks.form.cap:
        soft_cap(scores.reshape(len(scores), -1), chunks.form.cap)
    if tile.masked:
        ahead = tile.key_position - tile.query_position
        queries = q.shape[2]
        mask = band((len(scores), queries), ahead, chunks.window, scores.dtype)
        by_query = scores.reshape(len(scores), -1, queries)  # [key, heads*g, query]
        by_query += mask[:, None]
    if chunks.starts is not None:
        hide_documents(scores, tile.key_position, chunks.starts[at[0], tile.queries])
    if chunks.padding is not None:
        scores[chunks.padding[at[0], tile.keys]] = -np.inf
    return scores, scaled


def _factors(
    drop: Mask, at: tuple[int, slice], tile: ChunkPair, scores: Array, form: HeadForm
) -> Array:
    """Return the dropout factors of a tile [key, heads, g*query].

    The random numbers of the mask are ordered as [heads, g, key, query].
    """
    sample, heads = at
    g = form.queries
    each = np.arange(heads.start * g, heads.stop * g)[:, None] * drop.width
    keys = tile.key_position + np.arange(len(scores))
    rows = (drop.rows[sample] + each + keys).ravel()
    queries = range(tile.query_position, tile.query_position + scores.shape[2] // g)
    kept = keep_mask(drop.key, drop.rate, rows, queries, drop.width)
    kept = kept.reshape(scores.shape[1], g, len(keys), -1).transpose(2, 0, 1, 3)
    return kept.reshape(scores.shape) * scores.dtype.type(1 / (1 - drop.rate))
