"""Causal multi-head attention on whole heads and whole sequences: nothing is communicated.

The rows of a block are whole sequences of T tokens, its columns whole heads, and a head's columns
are [q | k | v], each D wide.
"""

from math import sqrt

import numpy as np

from hpc3d.arrays.pool import kernel

SCORES = 1 << 18  # bytes of the probabilities that are worked on at a time


def heads_of(qkv, sequence, width):
    """q, k, v as [B, heads, T, D] views of qkv [B*T, heads*3*D]."""
    parts = qkv.reshape(-1, sequence, qkv.shape[1] // (3 * width), 3, width)
    return parts.transpose(3, 0, 2, 1, 4)


def chunks_of(batch, heads, sequence, itemsize):
    """The shape [chunks, T, heads, T] of all probabilities, where those of a chunk stay in the
    cache: the heads of a chunk are a divisor of `heads`, at least 1."""
    fit = max(1, SCORES // (sequence**2 * itemsize))
    chunk = next(count for count in range(min(fit, heads), 0, -1) if heads % count == 0)
    return batch * heads // chunk, sequence, chunk, sequence


def places(batch, heads, chunk):
    """The index (sample, heads) of every chunk."""
    return [(b, slice(h, h + chunk)) for b in range(batch) for h in range(0, heads, chunk)]


def softmaxes(q, k, probabilities):
    """Computes chunk after chunk of the probabilities softmax(q k' / sqrt(D) + mask).

    Yields the place of each with its P[head, key, query], which lies as [key, head, query]: the
    softmax runs down the columns of a matrix, so that every operation is on long rows.
    """
    _, sequence, chunk, _ = probabilities.shape
    dtype = probabilities.dtype
    future = np.tril(np.full((sequence, sequence), -np.inf, dtype), -1)
    mask = np.repeat(future[:, None], chunk, axis=1).reshape(sequence, -1)
    ones, scale = np.ones(sequence, dtype), dtype.type(1 / sqrt(q.shape[-1]))
    for place, p in zip(places(*q.shape[:2], chunk), probabilities, strict=True):
        by_head, columns = p.swapaxes(0, 1), p.reshape(sequence, -1)
        np.matmul(k[place], (q[place] * scale).swapaxes(-1, -2), out=by_head)
        columns += mask
        columns -= columns.max(0)
        np.exp(columns, out=columns)
        columns *= 1 / (ones @ columns)
        yield place, by_head


def factors_of(drop, place, like):
    """Those of the probabilities [heads, key, query] of a chunk, out of those of all: a row of
    `drop` is a sample, its columns are [head, key, query]."""
    sample, heads = place
    square = like[0].size
    columns = slice(heads.start * square, heads.stop * square)
    return drop.factors(slice(sample, sample + 1), columns, like.dtype).reshape(like.shape)


@kernel
def attend(qkv, sequence, width, empty, drop=None):
    """softmax(q k' / sqrt(D) + mask) v, and the probabilities that backward needs.

    qkv [B*T, heads*3*D] -> [B*T, heads*D] and [chunks, T, heads, T].  What is multiplied with v
    are the probabilities times the factors of `drop`, a `Mask`.
    """
    q, k, v = heads_of(qkv, sequence, width)
    batch, heads = q.shape[:2]
    probabilities = empty(chunks_of(batch, heads, sequence, qkv.itemsize), qkv.dtype)
    out = empty((batch, sequence, heads, width), qkv.dtype)
    for place, p in softmaxes(q, k, probabilities):
        weights = p if drop is None else p * factors_of(drop, place, p)
        np.matmul(weights.swapaxes(-1, -2), v[place], out=out.swapaxes(1, 2)[place])
    return out.reshape(batch * sequence, heads * width), probabilities


@kernel
def attend_again(qkv, sequence, width, empty, drop=None):
    """The probabilities of `attend` alone: whether some of them are dropped changes none."""
    q, k, _ = heads_of(qkv, sequence, width)
    probabilities = empty(chunks_of(*q.shape[:2], sequence, qkv.itemsize), qkv.dtype)
    for _ in softmaxes(q, k, probabilities):
        pass
    return probabilities


@kernel
def attend_grad(dout, qkv, probabilities, sequence, width, empty, drop=None):
    """The gradient of qkv: ds = p (dp - sum(dp p)), dq = ds k / sqrt(D), dk = ds' q / sqrt(D)."""
    chunk = probabilities.shape[2]
    q, k, v = heads_of(qkv, sequence, width)
    batch, heads = q.shape[:2]
    dqkv = empty(qkv.shape, qkv.dtype)
    dq, dk, dv = heads_of(dqkv, sequence, width)
    dout = dout.reshape(batch, sequence, heads, width).swapaxes(1, 2)
    ones, scale = np.ones(sequence, qkv.dtype), qkv.dtype.type(1 / sqrt(width))
    ds = np.empty((sequence, chunk, sequence), qkv.dtype)
    by_head, columns = ds.swapaxes(0, 1), ds.reshape(sequence, -1)
    for place, p in zip(places(batch, heads, chunk), probabilities, strict=True):
        factors = None if drop is None else factors_of(drop, place, by_head)
        weights = p.swapaxes(0, 1) if drop is None else p.swapaxes(0, 1) * factors
        np.matmul(weights, dout[place], out=dv[place])
        np.matmul(v[place], dout[place].swapaxes(-1, -2), out=by_head)
        if drop is not None:
            by_head *= factors
        columns *= p.reshape(sequence, -1)
        columns -= p.reshape(sequence, -1) * (ones @ columns)
        np.matmul(by_head.swapaxes(-1, -2), k[place] * scale, out=dq[place])
        np.matmul(by_head, q[place] * scale, out=dk[place])
    return dqkv
