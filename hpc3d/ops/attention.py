"""Causal multi-head attention on whole heads and whole sequences: nothing is communicated.

The rows of a block are whole sequences of T tokens, its columns whole heads, and a head's columns
are [q | k | v], each D wide.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import sqrt
from typing import TYPE_CHECKING, Any

import numpy as np

from hpc3d.arrays.primitive import primitive
from hpc3d.ops.random import cuda_mask
from hpc3d.ops.rows import dropped

if TYPE_CHECKING:
    from hpc3d.arrays.abstract import AbstractArray
    from hpc3d.arrays.array import Array, Empty
    from hpc3d.cuda.gpu import Gpu
    from hpc3d.ops.random import Mask

SCORES = 1 << 18  # bytes of the probabilities that are worked on at a time


def heads_of(qkv: Array, sequence: int, width: int) -> Array:
    """q, k, v as [B, heads, T, D] views of qkv [B*T, heads*3*D]."""
    parts = qkv.reshape(-1, sequence, qkv.shape[1] // (3 * width), 3, width)
    return parts.transpose(3, 0, 2, 1, 4)


def _chunks_of(batch: int, heads: int, sequence: int, itemsize: int) -> tuple[int, int, int, int]:
    """The shape [chunks, T, heads, T] of all probabilities, where those of a chunk stay in the
    cache: the heads of a chunk are a divisor of `heads`, at least 1."""
    fit = max(1, SCORES // (sequence**2 * itemsize))
    chunk = next(count for count in range(min(fit, heads), 0, -1) if heads % count == 0)
    return batch * heads // chunk, sequence, chunk, sequence


def _places(batch: int, heads: int, chunk: int) -> list[tuple[int, slice]]:
    """The index (sample, heads) of every chunk."""
    return [(b, slice(h, h + chunk)) for b in range(batch) for h in range(0, heads, chunk)]


def _softmaxes(
    q: Array, k: Array, probabilities: Array
) -> Iterator[tuple[tuple[int, slice], Array]]:
    """Computes chunk after chunk of the probabilities softmax(q k' / sqrt(D) + mask).

    Yields the place of each with its P[head, key, query], which lies as [key, head, query]: the
    softmax runs down the columns of a matrix, so that every operation is on long rows.
    """
    _, sequence, chunk, _ = probabilities.shape
    dtype = probabilities.dtype
    future = np.tril(np.full((sequence, sequence), -np.inf, dtype), -1)
    mask = np.repeat(future[:, None], chunk, axis=1).reshape(sequence, -1)
    ones, scale = np.ones(sequence, dtype), dtype.type(1 / sqrt(q.shape[-1]))
    for place, p in zip(_places(*q.shape[:2], chunk), probabilities, strict=True):
        by_head, columns = p.swapaxes(0, 1), p.reshape(sequence, -1)
        np.matmul(k[place], (q[place] * scale).swapaxes(-1, -2), out=by_head)
        columns += mask
        columns -= columns.max(0)
        np.exp(columns, out=columns)
        columns *= 1 / (ones @ columns)
        yield place, by_head


def _factors_of(drop: Mask, place: tuple[int, slice], like: Array) -> np.ndarray:
    """Those of the probabilities [heads, key, query] of a chunk, out of those of all: a row of
    `drop` is a sample, its columns are [head, key, query]."""
    sample, heads = place
    square = like[0].size
    columns = slice(heads.start * square, heads.stop * square)
    return drop.factors(slice(sample, sample + 1), columns, like.dtype).reshape(like.shape)


@primitive
def attend(
    qkv: Array, sequence: int, width: int, empty: Empty, drop: Mask | None = None
) -> tuple[Array, Array]:
    """softmax(q k' / sqrt(D) + mask) v, and the probabilities that backward needs.

    qkv [B*T, heads*3*D] -> [B*T, heads*D] and [chunks, T, heads, T].  What is multiplied with v
    are the probabilities times the factors of `drop`, a `Mask`.
    """
    q, k, v = heads_of(qkv, sequence, width)
    batch, heads = q.shape[:2]
    probabilities = empty(_chunks_of(batch, heads, sequence, qkv.itemsize), qkv.dtype)
    out = empty((batch, sequence, heads, width), qkv.dtype)
    for place, p in _softmaxes(q, k, probabilities):
        weights = p if drop is None else p * _factors_of(drop, place, p)
        np.matmul(weights.swapaxes(-1, -2), v[place], out=out.swapaxes(1, 2)[place])
    return out.reshape(batch * sequence, heads * width), probabilities


@attend.abstract
def _(qkv, sequence, width, empty, drop=None):
    batch, heads, probabilities = _scored(qkv, sequence, width, empty)
    out = empty((batch, sequence, heads, width), qkv.dtype)
    _meter_dropout(drop, probabilities)
    qkv.meter.product(sequence, width, sequence, qkv.dtype, batch * heads)
    return out.reshape(batch * sequence, heads * width), probabilities


@attend.cuda
def _(gpu, qkv, sequence, width, empty, drop=None):
    if _by_cudnn(gpu, qkv, width, drop):
        out, stats = gpu.flash.forward(qkv, sequence, width)
        return out, (out, stats)
    q, k, v = _parted(gpu, qkv, sequence, width, 3)
    p, weights = _softmax(gpu, q, k, empty, drop)
    out = gpu.empty(q.shape, q.dtype)
    gpu.multiply(weights.swapaxes(1, 2), v, out)
    return _joined(out[None], qkv.shape[1] // (3 * width), empty), p


@primitive
def attend_again(
    qkv: Array, sequence: int, width: int, empty: Empty, drop: Mask | None = None
) -> Array:
    """The probabilities of `attend` alone: whether some of them are dropped changes none."""
    q, k, _ = heads_of(qkv, sequence, width)
    probabilities = empty(_chunks_of(*q.shape[:2], sequence, qkv.itemsize), qkv.dtype)
    for _ in _softmaxes(q, k, probabilities):
        pass
    return probabilities


@attend_again.abstract
def _(qkv, sequence, width, empty, drop=None):
    return _scored(qkv, sequence, width, empty)[-1]


@attend_again.cuda
def _(gpu, qkv, sequence, width, empty, drop=None):
    if _by_cudnn(gpu, qkv, width, drop):
        return gpu.flash.forward(qkv, sequence, width)
    q, k, _ = _parted(gpu, qkv, sequence, width, 3)
    return _softmax(gpu, q, k, empty, None)[0]


@primitive
def attend_grad(
    dout: Array,
    qkv: Array,
    probabilities: Array,
    sequence: int,
    width: int,
    empty: Empty,
    drop: Mask | None = None,
) -> Array:
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
    for place, p in zip(_places(batch, heads, chunk), probabilities, strict=True):
        factors = None if drop is None else _factors_of(drop, place, by_head)
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


@attend_grad.abstract
def _(dout, qkv, probabilities, sequence, width, empty, drop=None):
    heads = qkv.size // (3 * width * sequence)
    _meter_dropout(drop, probabilities)
    for m, n, k in 2 * [(sequence, width, sequence), (sequence, sequence, width)]:
        qkv.meter.product(m, n, k, qkv.dtype, heads)
    return empty(qkv.shape, qkv.dtype)


@attend_grad.cuda
def _(gpu, dout, qkv, kept, sequence, width, empty, drop=None):
    if _by_cudnn(gpu, qkv, width, drop):
        return gpu.flash.backward(dout, qkv, *kept, sequence, width)
    q, k, v = _parted(gpu, qkv, sequence, width, 3)
    d = _parted(gpu, dout, sequence, width, 1)[0]
    weights = kept if drop is None else _dropped_again(gpu, kept, drop)
    grads = gpu.empty((3, *q.shape), q.dtype)
    gpu.multiply(weights, d, grads[2])
    ds = gpu.empty(kept.shape, kept.dtype)
    gpu.multiply(v, d.swapaxes(1, 2), ds)
    given = {"p": kept, "dweights": ds, **_masked(kept, q.shape[-1], drop)}
    gpu.launch("causal_softmax_grad", *kept.shape[:2], **given)
    gpu.multiply(ds.swapaxes(1, 2), k, grads[0])
    gpu.multiply(ds, q, grads[1])
    return _joined(grads, qkv.shape[1] // (3 * width), empty)


def _scored(
    qkv: AbstractArray, sequence: int, width: int, empty: Empty
) -> tuple[int, int, AbstractArray]:
    """Samples, heads and probabilities, of q k' and its softmax."""
    batch, heads = qkv.shape[0] // sequence, qkv.shape[1] // (3 * width)
    shape = _chunks_of(batch, heads, sequence, qkv.itemsize)
    qkv.meter.product(sequence, sequence, width, qkv.dtype, batch * heads)
    return batch, heads, empty(shape, qkv.dtype)


def _meter_dropout(drop: Mask | None, probabilities: AbstractArray) -> None:
    """Dropout inside of attention takes the time of a kernel of its own."""
    if drop is not None:
        probabilities.meter.kernel(dropped.__name__, 2 * probabilities.nbytes)


def _by_cudnn(gpu: Gpu, qkv: Array, width: int, drop: Mask | None) -> bool:
    return gpu.flash and qkv.size and gpu.flash.suits(qkv.dtype, width, drop)


def _parted(gpu: Gpu, x: Array, sequence: int, width: int, parts: int) -> Array:
    """[B T, heads parts D] -> [parts, B heads, T, D], each in one piece."""
    batch, heads = x.shape[0] // sequence, x.shape[1] // (parts * width)
    x = x.reshape(batch, sequence, heads, parts, width).transpose(3, 0, 2, 1, 4)
    return gpu.contiguous(x).reshape(parts, batch * heads, sequence, width)


def _joined(x: Array, heads: int, empty: Empty) -> Array:
    """[parts, B heads, T, D] -> [B T, heads parts D]."""
    parts, count, sequence, width = x.shape
    x = x.reshape(parts, count // heads, heads, sequence, width).transpose(1, 3, 2, 0, 4)
    out = empty((x.shape[0] * sequence, heads * parts * width), x.dtype)
    out.reshape(x.shape)[...] = x
    return out


def _softmax(gpu: Gpu, q: Array, k: Array, empty: Empty, drop: Mask | None) -> tuple[Array, Array]:
    """The probabilities [B heads, key, query], and those times dropout's factors."""
    shape = (*q.shape[:2], q.shape[1])
    p = empty(shape, q.dtype)
    gpu.multiply(k, q.swapaxes(1, 2), p)
    weights = p if drop is None else gpu.empty(shape, q.dtype)
    given = {"scores": p, "weights": None if drop is None else weights}
    gpu.launch("causal_softmax", *shape[:2], **given, **_masked(p, q.shape[-1], drop))
    return p, weights


def _masked(p: Array, width: int, drop: Mask | None) -> dict[str, Any]:
    """The arguments of the softmax besides its arrays."""
    given = {"heads": p.shape[0], "sequence": p.shape[1], "scale": 1 / sqrt(width)}
    if drop is None:
        names = "first_row", "first_column", "width", "limit", "factor"
        return {**given, "dropout_key": None, **dict.fromkeys(names, 0)}
    given["heads"] = len(drop.columns) // p.shape[1] ** 2
    return {**given, **cuda_mask(drop, "dropout_key")}


def _dropped_again(gpu: Gpu, p: Array, drop: Mask) -> Array:
    """The probabilities times dropout's factors once more."""
    rows = p.reshape(len(drop.rows), len(drop.columns))
    return dropped(rows, drop, gpu.empty(rows.shape, p.dtype)).reshape(p.shape)
