"""Chunked attention with tiles, compared with NumPy in float64."""

import sys

import numpy as np
import pytest

from hpc3d.arrays.pool import Pool
from hpc3d.cuda.cudnn_attention import Flash
from hpc3d.ops import chunk_tiles
from hpc3d.ops.attention import LEAST, HeadForm
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
from tests.cuda import rules
from tests.fakes.fake_cudnn import FakeCudnn
from tests.fakes.fake_device import plain
from tests.strided import strided

# Two places of a ring with chunks of 6 tokens, 0 and 3 here, 1 and 2 at the other one.
LENGTH, CHUNK, BATCH = 24, 6, 2
DOCUMENTS = -1  # stands for a mask of documents instead of a window


def pairs_of(causal, keys, queries=(0, 3)):
    mine, theirs = (
        [(slice(n * CHUNK, (n + 1) * CHUNK), at * CHUNK) for n, at in enumerate(each)]
        for each in (queries, keys)
    )
    return tuple(
        ChunkPair(q, k, causal and at == other, at, other)
        for q, at in mine
        for k, other in theirs
        if other <= at or not causal
    )


def attention(qkv, dout, others, form, chunks, empty):
    """Return output, log-sum-exps and gradients of these queries, for their own and other keys."""
    how = 2 * CHUNK, form, empty
    merged = begin_merging(qkv, *how)
    blocks = keys_and_values(qkv, *how), keys_and_values(others, *how)
    for kv, these in zip(blocks, chunks):
        merge_chunks(qkv, kv, merged, these)
    out = end_merging(merged, qkv.dtype, empty)
    grad = ChunkGrad(dout, merged.sums, row_dots(dout, out, 2 * CHUNK, chunks[0], empty))
    dq = empty(dout.shape, np.promote_types(dout.dtype, np.float32))
    dq.fill(0)
    mine, theirs = (
        chunks_grad(qkv, kv, grad, dq, these, empty) for kv, these in zip(blocks, chunks)
    )
    return out, merged.sums, join_grads(qkv, dq, mine, form, empty), theirs


@pytest.mark.parametrize("dtype", strided([np.float32, np.float16], 2, days=1))
@pytest.mark.parametrize(
    ("queries", "causal", "rate", "padded", "window"),
    strided(
        [
            (1, True, 0, False, 0),
            (2, True, 0, False, 4),
            (3, False, 0.25, True, 0),
            (2, True, 0.25, False, 0),
            (1, True, 0.25, True, 9),
            (1, True, 0, True, 0),
            (2, True, 0.25, False, DOCUMENTS),
        ],
        7,
        2,
    ),
)
def test_tiled_attention_matches_float64(
    queries, causal, rate, padded, window, dtype, launcher, monkeypatch
):
    """Chunks of six tokens are split into tiles of two to six, with one or two key heads each."""
    monkeypatch.setattr(chunk_tiles, "_TILE", max(4, 2 * queries))
    monkeypatch.setattr(chunk_tiles, "_SCORES", 2 * 4 * 4 * 2)
    form, heads, random = HeadForm(8, queries), 3, np.random.default_rng(4)
    qkv, others = random.normal(size=(2, BATCH * 2 * CHUNK, heads * form.columns)).astype(dtype)
    dout = random.normal(size=(len(qkv), heads * queries * form.width)).astype(dtype)
    drop = None
    if rate:
        sample, first = 9 * queries * LENGTH, 3 * queries * LENGTH
        rows = range(5 * sample + first, (5 + BATCH) * sample + first, sample)
        drop = Mask(philox_key("p"), rate, rows, range(LENGTH), LENGTH)
    padding = random.random((2, BATCH, 2 * CHUNK)) < 0.3 if padded else 2 * [None]

    # The chunks begin at positions 0 and 18, and documents at 3, 8, 15 and 20.
    positions = np.r_[0:CHUNK, 3 * CHUNK : 4 * CHUNK]
    begins = np.array([0, 3, 8, 15, 20])
    starts = np.stack(BATCH * [begins[np.searchsorted(begins, positions, "right") - 1]])

    def chunks(kind):
        hidden = [each if each is None else each.view(kind) for each in padding]
        keys = pairs_of(causal, (0, 3)), pairs_of(causal, (1, 2))
        if window > 0:
            keys = [[pair._replace(masked=True) for pair in pairs] for pairs in keys]
        if window == DOCUMENTS:
            given = form, drop, None, 0, True, starts.view(kind)
            return [Chunks(pairs, *given) for pairs in keys]
        return [Chunks(pairs, form, drop, each, window) for pairs, each in zip(keys, hidden)]

    wide = [each.astype(np.float64) for each in (qkv, dout, others)]
    expected = attention(*wide, form, chunks(np.ndarray), Pool().empty)
    given = [each.view(rules.CudaArray) for each in (qkv, dout, others)]
    found = attention(*given, form, chunks(rules.CudaArray), rules.empty)
    atol = 2e-5 if dtype == np.float32 else 2e-2
    for got, right in zip(found, expected, strict=True):
        np.testing.assert_allclose(plain(got), right, rtol=atol, atol=atol)


@pytest.mark.parametrize(
    ("queries", "causal", "first", "padded"),
    strided(
        [
            (3, True, 0, False),
            (1, True, 1, False),
            (2, False, 0, False),
            (2, False, 0, True),
            (1, True, 1, True),
        ],
        3,
    ),
)
def test_fused_hops_match_float64(queries, causal, first, padded, launcher, monkeypatch):
    """On the first rank of the ring, half of the queries see all keys of the other rank; on the
    second, all queries see half of them. With padding, all keys of the first sample are masked,
    and all keys of the second sample on this rank."""
    monkeypatch.setitem(sys.modules, "cudnn", FakeCudnn(lambda pointer, size: True))
    rules.register(launcher, Flash(rules.empty, stream=1, capability="90"))
    form, heads, random = HeadForm(8, queries), 3, np.random.default_rng(4)
    shape = 2, BATCH * 2 * CHUNK, heads * form.columns
    qkv, others = random.normal(size=shape).astype(np.float16)
    dout = random.normal(size=(len(qkv), heads * queries * form.width)).astype(np.float16)
    places = (0, 3), (1, 2)
    mine, theirs = places[first], places[1 - first]
    padding = random.random((2, BATCH, 2 * CHUNK)) < 0.3
    padding[:, 0] = padding[0, 1] = True

    def chunks(kind):
        hidden = [each.view(kind) if padded else None for each in padding]
        pairs = [pairs_of(causal, keys, mine) for keys in (mine, theirs)]
        return [Chunks(*each) for each in zip(pairs, 2 * [form], 2 * [None], hidden)]

    wide = [each.astype(np.float64) for each in (qkv, dout, others)]
    expected = attention(*wide, form, chunks(np.ndarray), Pool().empty)
    launcher.count.clear()
    given = [each.view(rules.CudaArray) for each in (qkv, dout, others)]
    found = attention(*given, form, chunks(rules.CudaArray), rules.empty)
    rules.register(launcher)
    assert launcher.count["merge_hop"] == 2 * (1 + (BATCH if causal and first == 0 else 1))
    assert launcher.count.keys() <= {"merge_hop", "padding_bias"}
    for got, right in zip(found, expected, strict=True):
        right = np.maximum(right, LEAST)  # a log-sum-exp of -inf
        np.testing.assert_allclose(plain(got), right, rtol=2e-2, atol=1e-2)
