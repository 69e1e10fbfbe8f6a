"""Multi-head attention on complete heads and complete sequences, without communication.

The rows of a block are complete sequences of T tokens; its columns are complete heads of width D.
Without grouped-query attention, the columns are [q | k | v] for each head. With grouped-query
attention (Ainslie et al. 2023, arXiv:2305.13245), g query heads share one KV head. The columns are
then all of q, all of k and all of v, and query heads 0 to g - 1 use KV head 0.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import pairwise
from math import prod, sqrt
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from hpc3d.arrays.narrow import wide, widened
from hpc3d.arrays.primitive import primitive
from hpc3d.arrays.worker_threads import parallel_for, thread_count
from hpc3d.ops.random import Mask, cuda_mask
from hpc3d.ops.rows import dropped, soft_cap, soft_cap_grad

if TYPE_CHECKING:
    from hpc3d.arrays.abstract import AbstractArray
    from hpc3d.arrays.array import Array, Empty
    from hpc3d.cuda.gpu import Gpu

SCORES = 1 << 18  # maximum size in bytes of a block of attention probabilities
# Bias of masked keys in fused attention, which float16 and bfloat16 represent exactly. The bias is
# finite, because the softmax of scores of -inf is NaN. If all keys of a query are masked, its
# log-sum-exp is less than LEAST.
_MASKED, LEAST = -(2.0**15), -(2.0**14)
# With a causal mask: the minimum number of queries in a block, and the maximum number of blocks.
_QUERIES, _BLOCKS = 64, 8


class HeadForm(NamedTuple):
    """Form of attention heads: head width D, g query heads per KV head, and soft cap of scores.

    With a cap, the scores s = q k^T / sqrt(D) are replaced with cap tanh(s / cap) before the mask
    and the softmax (0: no cap).
    """

    width: int
    queries: int = 1
    cap: float = 0.0

    @property
    def columns(self) -> int:
        """Number of qkv columns per KV head."""
        return (self.queries + 2) * self.width

    def turned(self, columns: int) -> tuple[int, int]:
        """Return the column layout of qkv for rotary embeddings as a tuple (parts, turned).

        The columns of qkv consist of groups of `parts` vectors of width D. The first `turned`
        vectors in a group belong to q and k, which are rotated.
        """
        heads = 1 if self.queries == 1 else columns // self.columns
        return heads * (self.queries + 2), heads * (self.queries + 1)

    def stretches(self, columns: int) -> list[slice]:
        """Return the column slices of qkv in which the heads are contiguous.

        With grouped-query attention, the slices are q, k and v; otherwise, one slice contains all
        columns.
        """
        if self.queries == 1:
            return [slice(0, columns)]
        keys = columns // self.columns * self.width
        edges = 0, self.queries * keys, (self.queries + 1) * keys, columns
        return [slice(start, stop) for start, stop in pairwise(edges)]


class AttentionMask(NamedTuple):
    """Attention mask: causal, padding, or both.

    With `causal`, a query attends only to keys up to its own position. With `window`, it attends
    only to the last `window` of these keys (0: all of them). `padding`, bool [B, T] for the
    samples of this rank, marks masked keys. If all keys of a query are masked, its output is 0.

    `starts`, int64 [B, T], is the position of the first token in the document of each query. A
    query does not attend to earlier keys. `None` if sequences are not divided into documents.
    """

    causal: bool = True
    padding: Array | None = None
    window: int = 0
    starts: Array | None = None

    def of_sample(self, sample: slice) -> AttentionMask:
        """Return the mask of some samples."""
        padding, starts = (None if x is None else x[sample] for x in (self.padding, self.starts))
        return self._replace(padding=padding, starts=starts)

    def keys(self, queries: slice, sequence: int) -> slice:
        """Return the range of keys that some query in `queries` attends to."""
        first = max(0, queries.start - self.window + 1) if self.window else 0
        return slice(first, queries.stop if self.causal else sequence)


CAUSAL = AttentionMask()


def heads_of(qkv: Array, sequence: int, form: HeadForm) -> tuple[Array, Array, Array]:
    """Return views q [B, heads, g, T, D], k and v [B, heads, T, D] of qkv.

    The shape of qkv is [B*T, heads*(g+2)*D].
    """
    width, g = form[:2]
    if g == 1:
        q, k, v = _by_kind(qkv, sequence, form)
        return q[:, :, None], k, v
    heads = qkv.shape[1] // form.columns
    parts = qkv.reshape(-1, sequence, (g + 2) * heads, width).swapaxes(1, 2)
    edges = pairwise((0, g * heads, (g + 1) * heads, (g + 2) * heads))
    q, k, v = (parts[:, start:stop] for start, stop in edges)
    return q.reshape(-1, heads, g, sequence, width), k, v


def queries_of(x: Array, sequence: int, form: HeadForm) -> Array:
    """Return x [B*T, heads*g*D] as a view [B, heads, g, T, D]."""
    width, g = form[:2]
    heads = x.shape[1] // (g * width)
    return x.reshape(-1, sequence, heads, g, width).transpose(0, 2, 3, 1, 4)


def stack_queries(q: Array) -> Array:
    """Stack the queries that share a KV head: reshape [heads, g, T, D] to [heads, g*T, D]."""
    heads, g, sequence, width = q.shape
    return q.reshape(heads, g * sequence, width)


def _block_width(sequence: int, causal: bool) -> int:
    """Return the number of queries in a block of scores."""
    return min(sequence, max(_QUERIES, -(-sequence // _BLOCKS))) if causal else sequence


def _empty_probabilities(
    qkv: Array, sequence: int, form: HeadForm, empty: Empty, mask: AttentionMask
) -> Array:
    """Allocate the attention probabilities [chunks, T, heads, g*T].

    The number of heads per chunk is the largest divisor of the number of heads for which a block
    (see `_blocks`), in float32 or wider, fits in the cache, or 1 if none fits.
    """
    batch, heads = qkv.shape[0] // sequence, qkv.shape[1] // form.columns
    block = form.queries * sequence * _block_width(sequence, mask.causal)
    fit = max(1, SCORES // (block * wide(qkv.dtype).itemsize))
    chunk = next(count for count in range(min(fit, heads), 0, -1) if heads % count == 0)
    return empty((batch * heads // chunk, sequence, chunk, form.queries * sequence), qkv.dtype)


def _chunks(k: Array, probabilities: Array) -> list[tuple[tuple[int, slice], Array]]:
    """Return the index (sample, heads) and the probabilities of each chunk of heads."""
    (batch, heads), chunk = k.shape[:2], probabilities.shape[2]
    indices = ((b, slice(h, h + chunk)) for b in range(batch) for h in range(0, heads, chunk))
    return [*zip(indices, probabilities, strict=True)]


def _ranges(sequence: int, mask: AttentionMask) -> list[tuple[slice, slice]]:
    """Return the queries and the keys of each block of scores."""
    width = _block_width(sequence, mask.causal)
    starts = range(0, sequence, width)
    blocks = (slice(first, min(first + width, sequence)) for first in starts)
    return [(queries, mask.keys(queries, sequence)) for queries in blocks]


def _blocks(p: Array, mask: AttentionMask) -> list[tuple[slice, slice, Array]]:
    """Split the probabilities [T, heads, g*T] of a chunk into blocks of queries.

    Returns the queries and the keys of each block, and its probabilities [key, heads, g*query],
    which are contiguous. The blocks are adjacent in memory, and the remaining elements of `p` are
    0.
    """
    sequence, heads, columns = p.shape
    flat, start, blocks = p.reshape(-1), 0, []
    for queries, keys in _ranges(sequence, mask):
        shape = length(keys), heads, columns // sequence * length(queries)
        blocks.append((queries, keys, flat[start : start + prod(shape)].reshape(shape)))
        start += prod(shape)
    return blocks


def length(rows: slice) -> int:
    """Return the number of rows in a slice."""
    return rows.stop - rows.start


def _apart(p: Array, g: int) -> Array:
    """Return P[head, key, g*query] as a view [head, g, query, key]."""
    heads, keys, queries = p.shape
    return p.reshape(heads, keys, g, queries // g).transpose(0, 2, 3, 1)


def _scores(q: Array, k: Array, out: Array, cap: float) -> None:
    """Compute the scores [key, heads, g*query] of a block, before the mask."""
    np.matmul(k, stack_queries(q).swapaxes(-1, -2), out=out.swapaxes(0, 1))
    columns = out.reshape(len(out), -1)
    columns *= out.dtype.type(1 / sqrt(q.shape[-1]))
    if cap:
        soft_cap(columns, cap)


def _softmaxes(
    q: Array, k: Array, p: Array, cap: float, mask: AttentionMask, sample: int
) -> Iterator[tuple[slice, slice, Array]]:
    """Compute the probabilities softmax(q k^T / sqrt(D) + mask) of a chunk of heads.

    Yields the queries and the keys of each block, and its probabilities P[head, key, g*query]. The
    memory layout is [key, head, g*query]: the softmax reduces over the first dimension, so that
    every operation processes long contiguous rows.
    """
    blocks = _blocks(p, mask)
    p.reshape(-1)[sum(block.size for *_, block in blocks) :] = 0
    for queries, keys, block in blocks:
        by_head, columns = block.swapaxes(0, 1), block.reshape(len(block), -1)
        _scores(q[:, :, queries], k[:, keys], block, cap)
        if mask.causal:
            # Without a window, the mask changes only the keys at the positions of the queries.
            some = slice(keys.start if mask.window else queries.start, keys.stop)
            sizes = length(some), length(queries)
            masked = block[some.start - keys.start :].reshape(sizes[0], -1, sizes[1])
            masked += band(sizes, some.start - queries.start, mask.window, p.dtype)[:, None]
        if mask.starts is not None:
            hide_documents(columns, keys.start, mask.starts[sample, queries])
        if mask.padding is not None:
            columns[mask.padding[sample, keys]] = -np.inf
        columns -= finite(columns.max(0))
        np.exp(columns, out=columns)
        sums = np.ones(len(block), p.dtype) @ columns
        columns *= 1 / np.where(sums == 0, 1, sums)  # 0: all keys of the query are masked
        yield queries, keys, by_head


@lru_cache(64)
def band(sizes: tuple[int, int], ahead: int, window: int, dtype: np.dtype) -> np.ndarray:
    """Return the causal mask [key, query] with these sizes: -inf for masked keys, else 0.

    The first key is `ahead` positions after the first query. A query attends to the last `window`
    keys up to its own position, or to all of them if `window` is 0.
    """
    keys, queries = sizes
    back = np.arange(queries) - np.arange(keys)[:, None] - ahead
    masked = (back < 0) | (back >= window) if window else back < 0
    return np.where(masked, -np.inf, 0).astype(dtype)


def hide_documents(scores: Array, first: int, starts: Array) -> None:
    """Set the scores of keys in earlier documents to -inf, in place.

    The scores have the memory layout [key, ..., query]. The first key is at position `first`, and
    the document of query i begins at position `starts[i]`.
    """
    positions = first + np.arange(len(scores))
    earlier = np.where(positions[:, None] < starts, -np.inf, 0).astype(scores.dtype)
    by_query = scores.reshape(len(scores), -1, len(starts))
    by_query += earlier[:, None]


def finite(scores: Array) -> Array:
    """Replace -inf with 0.

    If all keys of a query are masked, its maximum score and its log-sum-exp are -inf.
    """
    return np.where(np.isneginf(scores), 0, scores)


def _factors_of(drop: Mask, index: tuple[int, slice], p: Array) -> np.ndarray:
    """Return the dropout factors [head, key, g, query] of a chunk of probabilities.

    `drop` has one row per sample, whose columns are ordered as [head, g, key, query].
    """
    (sample, heads), (sequence, _, queries) = index, p.shape
    of_head = sequence * queries
    columns = slice(heads.start * of_head, heads.stop * of_head)
    factors = drop.factors(slice(sample, sample + 1), columns, p.dtype)
    return factors.reshape(-1, queries // sequence, sequence, sequence).swapaxes(1, 2)


def _times(p: Array, factors: np.ndarray, queries: slice, keys: slice) -> Array:
    """Return the product of a block P[head, key, g*query] and its dropout factors."""
    part = factors[:, keys, :, queries]
    return (p.reshape(part.shape) * part).reshape(p.shape)


@primitive
def attend(
    qkv: Array,
    sequence: int,
    form: HeadForm,
    empty: Empty,
    drop: Mask | None = None,
    mask: AttentionMask = CAUSAL,
) -> tuple[Array, Array]:
    """Compute softmax(q k^T / sqrt(D) + mask) v from qkv [B*T, heads*(g+2)*D].

    Returns the output [B*T, heads*g*D], and the probabilities [chunks, T, heads, g*T] for the
    backward pass. Before the product with v, the probabilities are multiplied by the factors of
    the dropout mask `drop`. If cuDNN is used, the second result is (out, stats) from
    `Flash.forward` instead.
    """
    q, k, v = heads_of(qkv, sequence, form)
    batch, heads, g, _, width = q.shape
    probabilities = _empty_probabilities(qkv, sequence, form, empty, mask)
    out = empty((batch * sequence, heads * g * width), qkv.dtype)
    by_query = queries_of(out, sequence, form)

    def chunk(each):
        at, p = each
        factors = None if drop is None else _factors_of(drop, at, p)
        for queries, keys, block in _softmaxes(q[at], k[at], p, form.cap, mask, at[0]):
            weights = block if factors is None else _times(block, factors, queries, keys)
            np.matmul(_apart(weights, g), v[at][:, None, keys], out=by_query[at][:, :, queries])

    parallel_for(chunk, _chunks(k, probabilities))
    return out, probabilities


@attend.narrow
def _(qkv, sequence, form, empty, drop=None, mask=CAUSAL):
    probabilities = _empty_probabilities(qkv, sequence, form, empty, mask)
    out = empty((qkv.shape[0], _out_columns(qkv, form)), qkv.dtype)
    for rows, chunks, of_sample in _samples(qkv, probabilities, sequence, drop, mask):
        block = widened(qkv[rows])
        out[rows], probabilities[chunks] = attend(block, sequence, form, np.empty, **of_sample)
    return out, probabilities


@attend.abstract
def _(qkv, sequence, form, empty, drop=None, mask=CAUSAL):
    heads, probabilities = _scored(qkv, sequence, form, empty, mask)
    out = empty((qkv.shape[0], _out_columns(qkv, form)), qkv.dtype)
    _meter_dropout(drop, probabilities)
    for (queries, keys), blocks in _sizes(sequence, mask).items():
        qkv.meter.product(queries, form.width, keys, qkv.dtype, blocks * heads)
    return out, probabilities


@attend.cuda
def _(gpu, qkv, sequence, form, empty, drop=None, mask=CAUSAL):
    if by_cudnn(gpu, qkv, form, drop, mask.starts):
        out, stats = _fused(gpu, qkv, sequence, form, mask)
        return out, (out, stats)
    q, k, v = _contiguous(gpu, qkv, sequence, form)
    p, weights = _softmax(gpu, (q, k), form, empty, drop, mask)
    out = gpu.empty(q.shape, q.dtype)
    gpu.multiply(weights.swapaxes(1, 2), v, out)
    joined = empty((qkv.shape[0], _out_columns(qkv, form)), qkv.dtype)
    by_query = queries_of(joined, sequence, form)
    by_query[...] = out.reshape(by_query.shape)
    return joined, p


@primitive
def attend_again(
    qkv: Array,
    sequence: int,
    form: HeadForm,
    empty: Empty,
    drop: Mask | None = None,
    mask: AttentionMask = CAUSAL,
) -> Array:
    """Recompute the probabilities, without dropout; with cuDNN, recompute (out, stats)."""
    q, k, _ = heads_of(qkv, sequence, form)
    probabilities = _empty_probabilities(qkv, sequence, form, empty, mask)

    def chunk(each):
        at, p = each
        for _ in _softmaxes(q[at], k[at], p, form.cap, mask, at[0]):
            pass

    parallel_for(chunk, _chunks(k, probabilities))
    return probabilities


@attend_again.narrow
def _(qkv, sequence, form, empty, drop=None, mask=CAUSAL):
    probabilities = _empty_probabilities(qkv, sequence, form, empty, mask)
    for rows, chunks, of_sample in _samples(qkv, probabilities, sequence, drop, mask):
        block = widened(qkv[rows])
        probabilities[chunks] = attend_again(block, sequence, form, np.empty, **of_sample)
    return probabilities


@attend_again.abstract
def _(qkv, sequence, form, empty, drop=None, mask=CAUSAL):
    return _scored(qkv, sequence, form, empty, mask)[-1]


@attend_again.cuda
def _(gpu, qkv, sequence, form, empty, drop=None, mask=CAUSAL):
    if by_cudnn(gpu, qkv, form, drop, mask.starts):
        return _fused(gpu, qkv, sequence, form, mask)
    q, k, _ = _contiguous(gpu, qkv, sequence, form)
    return _softmax(gpu, (q, k), form, empty, None, mask)[0]


@primitive
def attend_grad(
    dout: Array,
    qkv: Array,
    probabilities: Array,
    sequence: int,
    form: HeadForm,
    empty: Empty,
    drop: Mask | None = None,
    mask: AttentionMask = CAUSAL,
) -> Array:
    """Compute the gradient of qkv.

    With the probabilities p, ds = p (dp - sum(dp p)), dq = ds k / sqrt(D), dk = ds^T q / sqrt(D).
    The gradients of k and v are summed over the query heads that share a KV head. With a soft cap,
    ds is multiplied by 1 - (s / cap)^2, and the scores s are recomputed from q and k.
    """
    heads = heads_of(qkv, sequence, form)
    dqkv = empty(qkv.shape, qkv.dtype)
    grads = heads_of(dqkv, sequence, form)
    dout = queries_of(dout, sequence, form)

    # Each thread reuses its workspace, because new allocations cause page faults.
    spare = [_Spare.of(probabilities, form, mask) for _ in range(thread_count())]

    def chunk(each):
        at, p = each
        factors = None if drop is None else _factors_of(drop, at, p)
        here = [[array[at] for array in arrays] for arrays in (heads, grads, [dout])]
        mine = spare.pop()
        _chunk_grad(*here, _blocks(p, mask), factors, mine, form.cap)
        spare.append(mine)

    parallel_for(chunk, _chunks(heads[1], probabilities))
    return dqkv


class _Spare(NamedTuple):
    """Workspace of a thread: two blocks of scores, and the gradients of k and v."""

    blocks: Array
    sums: Array

    @classmethod
    def of(cls, probabilities: Array, form: HeadForm, mask: AttentionMask) -> _Spare:
        _, keys, heads, queries = probabilities.shape
        columns = max(form.width, queries // keys * _block_width(keys, mask.causal))
        dtype = probabilities.dtype
        sums = np.empty((2, heads, keys, form.width), dtype)
        return cls(np.empty((2, keys * heads * columns), dtype), sums)


def _chunk_grad(
    qkv: Sequence[Array],
    dqkv: Sequence[Array],
    dout: Sequence[Array],
    blocks: Sequence[tuple[slice, slice, Array]],
    factors: np.ndarray | None,
    spare: _Spare,
    cap: float,
) -> None:
    """Compute the gradients of q, k and v of a chunk of heads.

    Without a window, the last block of queries attends to all keys. It is processed first, so that
    its gradients of k and v initialize the sums to which the other blocks add.
    """
    (q, k, v), (dq, dk, dv), [dout] = qkv, dqkv, dout
    g, scale = q.shape[1], q.dtype.type(1 / sqrt(q.shape[-1]))
    sums, every = (dk, dv) if len(blocks) == 1 else spare.sums, slice(0, k.shape[1])
    if blocks[-1][1] != every:
        spare.sums[...] = 0
    for queries, keys, p in reversed(blocks):
        ds, temporary = spare.blocks[:, : p.size].reshape(2, *p.shape)
        by_head, weights = (each.swapaxes(0, 1) for each in (ds, p))
        of_p, of_ds, spared = (each.reshape(len(p), -1) for each in (p, ds, temporary))
        d = stack_queries(dout[:, :, queries])
        np.matmul(v[:, keys], d.swapaxes(-1, -2), out=by_head)
        if factors is not None:
            weights = _times(weights, factors, queries, keys)
            by_head[...] = _times(by_head, factors, queries, keys)
        _softmax_grad(of_p, of_ds, spared)
        if cap:
            _scores(q[:, :, queries], k[:, keys], temporary, cap)
            soft_cap_grad(of_ds, spared, cap)
        of_ds *= scale
        np.matmul(_apart(by_head, g), k[:, None, keys], out=dq[:, :, queries])
        factors_of_sums = (by_head, stack_queries(q[:, :, queries])), (weights, d)
        for total, (a, b) in zip(sums, factors_of_sums, strict=True):
            _add_product(a, b, total, keys, spare.blocks[1])
    if len(blocks) > 1:
        dk[...], dv[...] = sums


def _add_product(a: Array, b: Array, total: Array, keys: slice, spare: Array) -> None:
    """Add a b to the rows `keys` of `total`; if these are all rows, overwrite `total`."""
    rows = total[:, keys]
    if rows.shape == total.shape:
        np.matmul(a, b, out=total)
    else:
        rows += np.matmul(a, b, out=spare[: rows.size].reshape(rows.shape))


def _softmax_grad(p: Array, dp: Array, spare: Array) -> None:
    """Replace dp [key, column] with ds = p (dp - sum(dp p)), with a workspace of the same size."""
    dp *= p
    dots = np.ones(len(p), p.dtype) @ dp
    dp -= np.multiply(p, dots, out=spare)


@attend_grad.narrow
def _(dout, qkv, probabilities, sequence, form, empty, drop=None, mask=CAUSAL):
    dqkv = empty(qkv.shape, qkv.dtype)
    for rows, chunks, of_sample in _samples(qkv, probabilities, sequence, drop, mask):
        d, block, p = widened((dout[rows], qkv[rows], probabilities[chunks]))
        dqkv[rows] = attend_grad(d, block, p, sequence, form, np.empty, **of_sample)
    return dqkv


@attend_grad.abstract
def _(dout, qkv, probabilities, sequence, form, empty, drop=None, mask=CAUSAL):
    heads = dout.size // (form.width * sequence)
    _meter_dropout(drop, probabilities)
    width, capped = form.width, bool(form.cap)
    if capped:
        probabilities.meter.kernel(soft_cap_grad.__name__, 3 * probabilities.nbytes)
    for (queries, keys), blocks in _sizes(sequence, mask).items():
        scored = (2 + capped) * [(queries, keys, width)]
        for m, n, k in 2 * [(queries, width, keys)] + scored:
            qkv.meter.product(m, n, k, qkv.dtype, blocks * heads)
    return empty(qkv.shape, qkv.dtype)


@attend_grad.cuda
def _(gpu, dout, qkv, kept, sequence, form, empty, drop=None, mask=CAUSAL):
    if by_cudnn(gpu, qkv, form, drop, mask.starts):
        bias = padding_bias(gpu, mask.padding, slice(0, sequence), qkv.dtype)
        seen = mask.causal, mask.window
        return gpu.flash.backward(dout, qkv, *kept, sequence, form, *seen, bias=bias)
    q, k, v = _contiguous(gpu, qkv, sequence, form)
    d = gpu.contiguous(queries_of(dout, sequence, form)).reshape(q.shape)
    weights = kept if drop is None else _dropped_again(gpu, kept, drop)
    grads = gpu.empty((3, *q.shape), q.dtype)
    gpu.multiply(weights, d, grads[2])
    ds = gpu.empty(kept.shape, kept.dtype)
    gpu.multiply(v, d.swapaxes(1, 2), ds)
    scores = None
    if form.cap:
        scores = gpu.empty(kept.shape, kept.dtype)
        gpu.multiply(k, q.swapaxes(1, 2), scores)
    given = {"p": kept, "dweights": ds, "scores": scores, **_masked(kept, form, drop, mask)}
    del given["padding"], given["starts"]  # the saved probabilities of masked keys are already 0
    gpu.launch("causal_softmax_grad", *kept.shape[:2], **given)
    gpu.multiply(ds.swapaxes(1, 2), k, grads[0])
    gpu.multiply(ds, q, grads[1])
    return _gradient_of(qkv, grads, sequence, form, empty)


def _samples(
    qkv: Array,
    probabilities: Array,
    sequence: int,
    drop: Mask | None,
    mask: AttentionMask,
) -> Iterator[tuple[slice, slice, dict[str, Any]]]:
    """Yield the slice of rows, the slice of chunks, and the masks of each sample.

    The dropout and attention masks are a dict of keyword arguments for `attend`.
    """
    batch = qkv.shape[0] // sequence
    each = len(probabilities) // max(1, batch)
    for sample in range(batch):
        one = slice(sample, sample + 1)
        of_drop = None if drop is None else drop._replace(rows=drop.rows[one])
        rows = slice(sample * sequence, (sample + 1) * sequence)
        chunks = slice(sample * each, (sample + 1) * each)
        yield rows, chunks, {"drop": of_drop, "mask": mask.of_sample(one)}


def _scored(
    qkv: AbstractArray, sequence: int, form: HeadForm, empty: Empty, mask: AttentionMask
) -> tuple[int, AbstractArray]:
    """Record the cost of q k^T; return the number of score matrices and their array."""
    count = qkv.shape[0] // sequence * (qkv.shape[1] // form.columns) * form.queries
    for (queries, keys), blocks in _sizes(sequence, mask).items():
        qkv.meter.product(queries, keys, form.width, qkv.dtype, blocks * count)
    probabilities = _empty_probabilities(qkv, sequence, form, empty, mask)
    if form.cap:
        qkv.meter.kernel(soft_cap.__name__, 2 * probabilities.nbytes)
    return count, probabilities


def _sizes(sequence: int, mask: AttentionMask) -> Counter[tuple[int, int]]:
    """Return the numbers of queries and keys whose products are counted, with their frequency.

    Without a window, all scores are counted, including masked ones.
    """
    if not mask.window:
        return Counter([(sequence, sequence)])
    return Counter((length(queries), length(keys)) for queries, keys in _ranges(sequence, mask))


def _out_columns(qkv: Array, form: HeadForm) -> int:
    return qkv.shape[1] // form.columns * form.queries * form.width


def _meter_dropout(drop: Mask | None, probabilities: AbstractArray) -> None:
    if drop is not None:
        probabilities.meter.kernel(dropped.__name__, 2 * probabilities.nbytes)


def by_cudnn(gpu: Gpu, x: Array, form: HeadForm, drop: Mask | None, starts: Array | None) -> bool:
    """Return True if cuDNN can compute attention for operands like `x`.

    Sequences that are divided into documents (`starts`) and soft caps are not supported.
    """
    flash = gpu.flash and starts is None and not form.cap
    return flash and x.size and gpu.flash.suits(x.dtype, form.width, drop)


def padding_bias(gpu: Gpu, padding: Array | None, keys: slice, dtype: np.dtype) -> Array | None:
    """Return the bias [B, keys] for fused attention with padding, or `None` without padding."""
    if padding is None:
        return None
    bias = gpu.empty((len(padding), length(keys)), dtype)
    sizes = {"keys": length(keys), "first": keys.start, "sequence": padding.shape[1]}
    gpu.launch("padding_bias", *bias.shape, bias=bias, padding=padding, masked=_MASKED, **sizes)
    return bias


def _fused(
    gpu: Gpu, qkv: Array, sequence: int, form: HeadForm, mask: AttentionMask
) -> tuple[Array, Array]:
    """Compute attention with cuDNN; return the output and the statistics of `Flash.forward`.

    If all keys of a query are masked, its output is 0, and its log-sum-exp is `LEAST`.
    """
    assert gpu.flash
    bias = padding_bias(gpu, mask.padding, slice(0, sequence), qkv.dtype)
    out, stats = gpu.flash.forward(qkv, sequence, form, mask.causal, mask.window, bias)
    if bias is not None:
        sizes = {"heads": stats.shape[1], "width": form.width, "sequence": sequence}
        gpu.launch("clear_masked", *out.shape, out=out, sums=stats, least=LEAST, **sizes)
    return out, stats


def _contiguous(gpu: Gpu, qkv: Array, sequence: int, form: HeadForm) -> Array:
    """Return a contiguous copy [3, B heads g, T, D] of q, k and v.

    k and v are repeated for each query head that shares them.
    """
    q, k, v = heads_of(qkv, sequence, form)
    if form.queries == 1:
        whole = gpu.contiguous(_by_kind(qkv, sequence, form))
    else:
        whole = gpu.empty((3, *q.shape), q.dtype)
        for part, each in zip(whole, (q, k[:, :, None], v[:, :, None]), strict=True):
            part[...] = each
    return whole.reshape(3, -1, sequence, form.width)


def _gradient_of(qkv: Array, grads: Array, sequence: int, form: HeadForm, empty: Empty) -> Array:
    """Assemble dqkv from the gradients [3, B heads g, T, D] of q, k and v."""
    dqkv = empty(qkv.shape, qkv.dtype)
    if form.queries == 1:
        kinds = _by_kind(dqkv, sequence, form)
        kinds[...] = grads.reshape(kinds.shape)
        return dqkv
    dq, *others = heads_of(dqkv, sequence, form)
    by_query = grads.reshape(3, *dq.shape)
    dq[...] = by_query[0]
    for gradient, parts in zip(others, by_query[1:], strict=True):
        gradient[...] = parts[:, :, 0]
        for query in range(1, form.queries):
            gradient += parts[:, :, query]
    return dqkv


def _by_kind(qkv: Array, sequence: int, form: HeadForm) -> Array:
    """Return a view [3, B, heads, T, D] of q, k and v if g = 1 (no grouped-query attention)."""
    return qkv.reshape(-1, sequence, qkv.shape[1] // form.columns, 3, form.width).transpose(
        3, 0, 2, 1, 4
    )


def _softmax(
    gpu: Gpu,
    qk: tuple[Array, Array],
    form: HeadForm,
    empty: Empty,
    drop: Mask | None,
    mask: AttentionMask,
) -> tuple[Array, Array]:
    """Return the probabilities [B heads, key, query] before and after dropout."""
    q, k = qk
    shape = (*q.shape[:2], q.shape[1])
    p = empty(shape, q.dtype)
    gpu.multiply(k, q.swapaxes(1, 2), p)
    weights = p if drop is None else gpu.empty(shape, q.dtype)
    given = {"scores": p, "weights": None if drop is None else weights}
    gpu.launch("causal_softmax", *shape[:2], **given, **_masked(p, form, drop, mask))
    return p, weights


def _masked(p: Array, form: HeadForm, drop: Mask | None, mask: AttentionMask) -> dict[str, Any]:
    given = {"heads": p.shape[0], "sequence": p.shape[1], "scale": 1 / sqrt(form.width)}
    given["cap"] = form.cap
    given |= {"causal": mask.causal, "window": mask.window}
    given |= {"padding": mask.padding, "starts": mask.starts}
    for of_sample in (mask.padding, mask.starts):
        if of_sample is not None:
            given["heads"] = p.shape[0] // max(1, len(of_sample))
    if drop is not None:
        given["heads"] = len(drop.columns) // p.shape[1] ** 2
    return {**given, **cuda_mask(drop, "dropout_key")}


def _dropped_again(gpu: Gpu, p: Array, drop: Mask) -> Array:
    rows = p.reshape(len(drop.rows), len(drop.columns))
    return dropped(rows, drop, gpu.empty(rows.shape, p.dtype)).reshape(p.shape)
