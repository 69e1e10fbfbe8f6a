"""Attention with a key-value cache, compared with torch on the whole sequence."""

import numpy as np
import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from hpc3d.arrays.pool import Pool
from hpc3d.ops import cached_attention
from hpc3d.ops.attention import HeadForm, heads_of
from hpc3d.ops.cached_attention import Cache, attend_cached

BATCH, HEADS, SEQUENCE = 3, 4, 7


def by_torch(qkv, form, window):
    """With a soft cap, q k^T is capped before the mask, which torch has no function for."""
    q, k, v = (torch.tensor(part) for part in heads_of(qkv, SEQUENCE, form))
    k, v = (part[:, :, None].expand(q.shape) for part in (k, v))
    back = torch.arange(SEQUENCE)[:, None] - torch.arange(SEQUENCE)
    seen = (back >= 0) & (back < (window or SEQUENCE))
    if form.cap:
        scores = form.cap * torch.tanh(q @ k.mT / form.width**0.5 / form.cap)
        out = scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v
    else:
        out = scaled_dot_product_attention(q, k, v, seen)
    return out.permute(0, 3, 1, 2, 4).reshape(BATCH, SEQUENCE, -1).numpy()


@pytest.mark.parametrize("form", [HeadForm(6), HeadForm(2, 3), HeadForm(2, 3, 0.7)])
@pytest.mark.parametrize("parts", [[7], [4, 1, 2], 7 * [1]])
@pytest.mark.parametrize(("scores", "window"), [(1, 0), (1, 2), (1 << 22, 0), (1 << 22, 5)])
def test_cached_attention_in_chunks_matches_torch(form, parts, scores, window, monkeypatch):
    monkeypatch.setattr(cached_attention, "SCORES", scores)
    rows = np.random.default_rng(4).normal(size=(BATCH, SEQUENCE, HEADS * form.columns))
    expected = by_torch(rows.reshape(BATCH * SEQUENCE, -1), form, window)
    cache, first = np.full((2, BATCH, HEADS, SEQUENCE + 2, form.width), np.nan), 0
    for count in parts:
        stop = first + count
        qkv = rows[:, first:stop].reshape(BATCH * count, -1)
        out = attend_cached(qkv, count, form, Cache(cache, first, window), Pool().empty)
        np.testing.assert_allclose(
            out.reshape(BATCH, count, -1), expected[:, first:stop], rtol=0, atol=1e-12
        )
        first = stop


def test_cached_attention_without_rows():
    form = HeadForm(4)
    cache = np.empty((2, 0, HEADS, 5, 4))
    out = attend_cached(np.empty((0, HEADS * 12)), 3, form, Cache(cache, 0), Pool().empty)
    assert out.shape == (0, HEADS * 4)
