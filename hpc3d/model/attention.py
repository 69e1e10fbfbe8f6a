"""Causal multi-head attention on whole heads and whole sequences: nothing is communicated.

The rows of a block are whole sequences of T tokens, its columns whole heads, and a head's columns
are [q | k | v], each D wide.
"""

from math import sqrt

import numpy as np

SCORES = 1 << 20  # bytes of the scores that are worked on at a time


def heads_of(qkv, sequence, width):
    """q, k, v as [B, heads, T, D] views of qkv [B*T, heads*3*D]."""
    parts = qkv.reshape(-1, sequence, qkv.shape[1] // (3 * width), 3, width)
    return parts.transpose(3, 0, 2, 1, 4)


def chunks(scores):
    """Indices (sample, heads) of `scores` [B, heads, T, T] that stay in the cache."""
    batch, heads = scores.shape[:2]
    step = max(1, SCORES // max(1, scores[:1, :1].nbytes))
    return [(b, slice(h, h + step)) for b in range(batch) for h in range(0, heads, step)]


def attend(qkv, sequence, width, empty, drop=None):
    """softmax(q k' / sqrt(D) + mask) v, and the probabilities that backward needs.

    qkv [B*T, heads*3*D] -> [B*T, heads*D] and [B, heads, T, T].  `drop` [B, heads, T, T] scales
    each probability by 0 or 1 / (1 - rate).
    """
    q, k, v = heads_of(qkv, sequence, width)
    batch, heads = q.shape[:2]
    probabilities = empty((batch, heads, sequence, sequence), qkv.dtype)
    out = empty((batch, sequence, heads, width), qkv.dtype)
    mask = np.triu(np.full((sequence, sequence), -np.inf, qkv.dtype), 1)
    ones, scale = np.ones(sequence, qkv.dtype), 1 / sqrt(width)
    for at in chunks(probabilities):
        p = np.matmul(q[at] * scale, k[at].swapaxes(-1, -2), out=probabilities[at])
        p += mask
        p -= p.max(-1, keepdims=True)
        np.exp(p, out=p)
        p *= (1 / (p @ ones))[..., None]
        weights = p if drop is None else p * drop[at]
        np.matmul(weights, v[at], out=out.swapaxes(1, 2)[at])
    return out.reshape(batch * sequence, heads * width), probabilities


def attend_grad(dout, qkv, probabilities, width, empty, drop=None):
    """The gradient of qkv: ds = p (dp - sum(dp p)), dq = ds k / sqrt(D), dk = ds' q / sqrt(D)."""
    batch, heads, sequence, _ = probabilities.shape
    q, k, v = heads_of(qkv, sequence, width)
    dqkv = empty(qkv.shape, qkv.dtype)
    dq, dk, dv = heads_of(dqkv, sequence, width)
    dout = dout.reshape(batch, sequence, heads, width).swapaxes(1, 2)
    scale = 1 / sqrt(width)
    for at in chunks(probabilities):
        p, d = probabilities[at], dout[at]
        weights = p if drop is None else p * drop[at]
        np.matmul(weights.swapaxes(-1, -2), d, out=dv[at])
        ds = np.matmul(d, v[at].swapaxes(-1, -2))
        if drop is not None:
            ds *= drop[at]
        ds -= np.einsum("htu,htu->ht", ds, p)[..., None]
        ds *= p
        ds *= scale
        np.matmul(ds, k[at], out=dq[at])
        np.matmul(ds.swapaxes(-1, -2), q[at], out=dk[at])
    return dqkv
