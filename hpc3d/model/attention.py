"""Causal multi-head attention on whole heads and whole sequences: nothing is communicated.

The rows of a block are whole sequences of T tokens, its columns whole heads, and a head's columns
are [q | k | v], each D wide.
"""

from math import sqrt

import numpy as np

from hpc3d.cluster.arrays import kernel

SCORES = 1 << 18  # bytes of the probabilities that are worked on at a time


def heads_of(qkv, sequence, width):
    """q, k, v as [B, heads, T, D] views of qkv [B*T, heads*3*D]."""
    parts = qkv.reshape(-1, sequence, qkv.shape[1] // (3 * width), 3, width)
    return parts.transpose(3, 0, 2, 1, 4)


def chunk_of(heads, sequence, itemsize):
    """How many heads' probabilities stay in the cache: a divisor of `heads`, at least 1."""
    fit = max(1, SCORES // (sequence**2 * itemsize))
    return next(count for count in range(min(fit, heads), 0, -1) if heads % count == 0)


def places(batch, heads, chunk):
    """The index (sample, heads) of every chunk."""
    return [(b, slice(h, h + chunk)) for b in range(batch) for h in range(0, heads, chunk)]


@kernel
def attend(qkv, sequence, width, empty, drop=None):
    """softmax(q k' / sqrt(D) + mask) v, and the probabilities that backward needs.

    qkv [B*T, heads*3*D] -> [B*T, heads*D].  The probabilities lie as P[key, head, query] in chunks
    of heads, [chunks, T, heads, T]: the softmax runs down the columns of a matrix, so that every
    operation is on long rows.  `drop` [B, heads, key, query] scales each by 0 or 1 / (1 - rate).
    """
    q, k, v = heads_of(qkv, sequence, width)
    batch, heads = q.shape[:2]
    chunk = chunk_of(heads, sequence, qkv.itemsize)
    at = places(batch, heads, chunk)
    probabilities = empty((len(at), sequence, chunk, sequence), qkv.dtype)
    out = empty((batch, sequence, heads, width), qkv.dtype)
    future = np.tril(np.full((sequence, sequence), -np.inf, qkv.dtype), -1)
    mask = np.repeat(future[:, None], chunk, axis=1).reshape(sequence, -1)
    ones, scale = np.ones(sequence, qkv.dtype), qkv.dtype.type(1 / sqrt(width))
    for place, p in zip(at, probabilities, strict=True):
        by_head, columns = p.swapaxes(0, 1), p.reshape(sequence, -1)
        np.matmul(k[place], (q[place] * scale).swapaxes(-1, -2), out=by_head)
        columns += mask
        columns -= columns.max(0)
        np.exp(columns, out=columns)
        columns *= 1 / (ones @ columns)
        weights = by_head if drop is None else by_head * drop[place]
        np.matmul(weights.swapaxes(-1, -2), v[place], out=out.swapaxes(1, 2)[place])
    return out.reshape(batch * sequence, heads * width), probabilities


@kernel
def attend_grad(dout, qkv, probabilities, width, empty, drop=None):
    """The gradient of qkv: ds = p (dp - sum(dp p)), dq = ds k / sqrt(D), dk = ds' q / sqrt(D)."""
    sequence, chunk = probabilities.shape[1:3]
    q, k, v = heads_of(qkv, sequence, width)
    batch, heads = q.shape[:2]
    dqkv = empty(qkv.shape, qkv.dtype)
    dq, dk, dv = heads_of(dqkv, sequence, width)
    dout = dout.reshape(batch, sequence, heads, width).swapaxes(1, 2)
    ones, scale = np.ones(sequence, qkv.dtype), qkv.dtype.type(1 / sqrt(width))
    ds = np.empty((sequence, chunk, sequence), qkv.dtype)
    by_head, columns = ds.swapaxes(0, 1), ds.reshape(sequence, -1)
    for place, p in zip(places(batch, heads, chunk), probabilities, strict=True):
        weights = p.swapaxes(0, 1) if drop is None else p.swapaxes(0, 1) * drop[place]
        np.matmul(weights, dout[place], out=dv[place])
        np.matmul(v[place], dout[place].swapaxes(-1, -2), out=by_head)
        if drop is not None:
            by_head *= drop[place]
        columns *= p.reshape(sequence, -1)
        columns -= p.reshape(sequence, -1) * (ones @ columns)
        np.matmul(by_head.swapaxes(-1, -2), k[place] * scale, out=dq[place])
        np.matmul(by_head, q[place] * scale, out=dk[place])
    return dqkv
