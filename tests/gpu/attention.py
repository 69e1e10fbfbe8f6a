"""Attention and its gradient, compared with NumPy in float64: the fused kernels of cuDNN, and the
program's attention on device arrays, which uses these kernels where they are supported."""

from functools import partial

import numpy as np

from hpc3d.arrays.pool import Pool
from hpc3d.ops.attention import AttentionMask, HeadForm, attend, attend_grad, heads_of
from hpc3d.ops.chunk_tiles import ChunkPair, Chunks
from hpc3d.ops.chunked_attention import (
    ChunkGrad,
    begin_merging,
    chunks_grad,
    end_merging,
    join_grads,
    keys_and_values,
    merge_chunks,
    row_dots,
)
from hpc3d.ops.random import Mask, philox_key
from tests.gpu.notes import Skip

# batch, heads of keys, sequence, (width, queries of a key)
SHAPES = {
    "GPT-2": (2, 12, 1024, HeadForm(64)),
    "Llama-3": (2, 2, 1024, HeadForm(128, 4)),
    "wide heads": (2, 4, 512, HeadForm(128)),
    "odd": (3, 5, 77, HeadForm(32)),
    "odd, three queries a key": (3, 5, 77, HeadForm(32, 3)),
    "tiny": (2, 3, 16, HeadForm(8)),
    "tiny, two queries a key": (2, 3, 16, HeadForm(8, 2)),
}
QUICK = ("tiny", "tiny, two queries a key")
BOUND = {"float32": 2e-5, "float16": 4e-3, "bfloat16": 2e-2}
RATE = 0.25


def cases(device, quick):
    for real in device.reals:
        for name in QUICK if quick else SHAPES:
            place = device, real, SHAPES[name]
            if real != "float32":
                yield f"cuDNN [{real}, {name}]", partial(fused, *place, True)
                yield f"cuDNN [{real}, {name}, no mask]", partial(fused, *place, False)
                yield f"cuDNN [{real}, {name}, window]", partial(fused, *place, True, window=5)
            yield f"the program [{real}, {name}]", partial(ours, *place, 0.0)
            yield f"the program [{real}, {name}, dropout]", partial(ours, *place, RATE)
            yield f"the program [{real}, {name}, padding]", partial(ours, *place, 0.0, padded=True)
            yield f"chunk by chunk [{real}, {name}]", partial(by_chunks, *place, 0.0)
            yield f"chunk by chunk [{real}, {name}, dropout]", partial(by_chunks, *place, RATE)
            chunks = partial(by_chunks, *place, 0.0, padded=True)
            yield f"chunk by chunk [{real}, {name}, padding]", chunks


class Problem:
    """qkv, the gradient of the output, and the expected results.

    With padding, attention is not causal, and all keys of the last sample are masked."""

    def __init__(self, device, real, shape, rate=0.0, causal=True, window=0, padded=False):
        self.shape, random = shape, np.random.default_rng(17)
        batch, keys, self.sequence, self.form = shape
        self.sizes, heads = (self.sequence, self.form), keys * self.form.queries
        rows, self.causal, self.window = batch * self.sequence, causal and not padded, window

        def draw(columns):
            return random.standard_normal((rows, columns), np.float32).astype(np.dtype(real))

        qkv, dout = draw(keys * self.form.columns), draw(heads * self.form.width)
        self.qkv, self.dout = device.upload(qkv), device.upload(dout)
        self.wide = qkv.astype(np.float64), dout.astype(np.float64)
        self.rate, self.row = rate, heads * self.sequence**2
        self.key = philox_key((7, "drop_p", 3))
        padding = random.random((batch, self.sequence)) < 0.3 if padded else None
        if padded:
            padding[-1] = True
        self.padding = device.upload(padding) if padded else None
        mask = AttentionMask(self.causal, padding, window)
        how = *self.sizes, Pool().empty, self.mask(self.key), mask
        self.out, p = attend(self.wide[0], *how)
        self.dqkv = attend_grad(self.wide[1], self.wide[0], p, *how)

    def mask(self, key):
        """Return the dropout mask of the probabilities, [B, heads * T * T], or None."""
        if not self.rate:
            return None
        return Mask(key, self.rate, range(self.shape[0]), range(self.row), self.row)

    def stats(self):
        """Return log(sum(exp(scores))) of every query, [B, heads, T, 1]."""
        q, k, _ = heads_of(self.wide[0], *self.sizes)
        scores = q @ k[:, :, None].swapaxes(-1, -2) / self.form.width**0.5
        if self.causal:
            scores += np.triu(np.full(scores.shape[-2:], -np.inf), 1)
        if self.window:
            scores += np.tril(np.full(scores.shape[-2:], -np.inf), -self.window)
        top = scores.max(-1, keepdims=True)
        sums = top + np.log(np.exp(scores - top).sum(-1, keepdims=True))
        return sums.reshape(self.shape[0], -1, self.sequence, 1)


def fused(device, real, shape, causal, notes, window=0):
    problem = Problem(device, real, shape, causal=causal, window=window)
    flash, width, sizes = device.flash(), problem.form.width, (*problem.sizes, causal, window)
    notes.fact("suits", bool(flash.suits(real, width)))
    if not flash.suits(real, width):
        raise Skip(f"cuDNN does not take {real} with heads of {width}")
    out, stats = flash.forward(problem.qkv, *sizes)
    notes.near("out", device.download(out), problem.out, BOUND[real])
    notes.near("stats", device.download(stats), problem.stats(), 1e-3)
    dqkv = flash.backward(problem.dout, problem.qkv, out, stats, *sizes)
    gradients(device, notes, dqkv, problem, real)


def ours(device, real, shape, rate, notes, padded=False):
    problem, pool = Problem(device, real, shape, rate, padded=padded), device.pool()
    sizes, drop = problem.sizes, problem.mask(pool.bring(problem.key))
    mask = AttentionMask(problem.causal, problem.padding)
    out, p = attend(problem.qkv, *sizes, pool.empty, drop, mask)
    notes.near("out", device.download(out), problem.out, BOUND[real])
    dqkv = attend_grad(problem.dout, problem.qkv, p, *sizes, pool.empty, drop, mask)
    gradients(device, notes, dqkv, problem, real)


def by_chunks(device, real, shape, rate, notes, padded=False):
    """Compute the same with two chunks, each pair separately, as in ring attention."""
    problem, pool = Problem(device, real, shape, rate, padded=padded), device.pool()
    sequence, form = problem.sizes
    heads = shape[1] * form.queries
    how = sequence, form, pool.empty
    drop = problem.mask(pool.bring(problem.key))
    if drop is not None:
        rows = range(0, shape[0] * heads * sequence, heads * sequence)
        drop = drop._replace(rows=rows, columns=range(sequence), width=sequence)
    pairs = two_chunks(sequence, problem.causal)
    chunks = [Chunks((pair,), form, drop, problem.padding) for pair in pairs]
    merged, kv = begin_merging(problem.qkv, *how), keys_and_values(problem.qkv, *how)
    for each in chunks:
        merge_chunks(problem.qkv, kv, merged, each)
    out = end_merging(merged, problem.qkv.dtype, pool.empty)
    notes.near("out", device.download(out), problem.out, BOUND[real])
    dots = row_dots(problem.dout, out, sequence, chunks[0], pool.empty)
    dq = pool.zeros(out.shape, np.float32)
    grad = ChunkGrad(problem.dout, merged.sums, dots)
    dkv = pool.zeros(kv.shape, np.float32)
    for each in chunks:
        dkv += chunks_grad(problem.qkv, kv, grad, dq, each, pool.empty)
    dqkv = join_grads(problem.qkv, dq, dkv, form, pool.empty)
    gradients(device, notes, dqkv, problem, real)


def two_chunks(sequence, causal):
    """Return the pairs of chunks in which queries see keys."""
    halves = slice(0, sequence // 2), slice(sequence // 2, sequence)
    return tuple(
        ChunkPair(queries, keys, causal and queries is keys, queries.start, keys.start)
        for queries in halves
        for keys in halves
        if keys.start <= queries.start or not causal
    )


def gradients(device, notes, dqkv, problem, real):
    """Return the gradients of q, k and v separately."""
    got = heads_of(device.download(dqkv), *problem.sizes)
    for name, mine, right in zip(("dq", "dk", "dv"), got, heads_of(problem.dqkv, *problem.sizes)):
        notes.near(name, mine, right, BOUND[real])
