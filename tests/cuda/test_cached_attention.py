"""Attention with a key-value cache on an emulated device, compared with NumPy."""

import numpy as np
import pytest

from hpc3d.arrays.pool import Pool, to_host
from hpc3d.ops.attention import HeadForm
from hpc3d.ops.cached_attention import Cache, attend_cached
from tests.cuda import rules
from tests.cuda.rules import on_devices
from tests.fakes.fake_device import plain
from tests.model.test_decoder import COMMON, decoder_of, step_by_step


@pytest.mark.parametrize(("window", "cap"), [(0, 0), (1, 0), (40, 0), (0, 0.4), (40, 0.4)])
@pytest.mark.parametrize(("queries", "first"), [(1, 0), (1, 70), (5, 0), (7, 300)])
def test_cached_softmax_is_causal(queries, first, window, cap, real, draw, emulate):
    rows, columns = 6 * queries, first + queries
    scores, wide = draw(real, rows, columns)
    sizes = {"queries": queries, "first": first, "columns": columns, "scale": 0.3}
    sizes |= {"window": window, "cap": cap}
    emulate("cached_softmax", rows, columns, scores=scores, **sizes)
    back = first + np.arange(rows)[:, None] % queries - np.arange(columns)
    hidden = (back < 0) | (back >= (window or columns))
    p = np.where(hidden, 0, np.exp(cap * np.tanh(0.3 * wide / cap) if cap else 0.3 * wide))
    real.same(scores, p / p.sum(1, keepdims=True))


@pytest.mark.parametrize("window", [0, 2, 5])
@pytest.mark.parametrize("form", [HeadForm(4), HeadForm(4, 2), HeadForm(4, 2, 0.7)])
def test_cached_attention_in_chunks_matches_numpy(form, window, launcher):
    random, empty = np.random.default_rng(5), Pool().empty
    caches = [np.zeros((2, 2, 3, 9, 4)), rules.empty((2, 2, 3, 9, 4), np.float32)]
    first = 0
    for count in (5, 1, 3):
        qkv = random.normal(size=(2 * count, 3 * form.columns))
        ours, theirs = (Cache(each, first, window) for each in caches)
        expected = attend_cached(qkv, count, form, ours, empty)
        device = qkv.astype(np.float32).view(rules.CudaArray)
        found = attend_cached(device, count, form, theirs, rules.empty)
        np.testing.assert_allclose(plain(found), expected, atol=1e-5)
        first += count
    assert launcher.count["cached_softmax"]


@pytest.mark.parametrize("kind", ["kind=gpt2", "kind=llama kv_heads=4 ffn=48 window=2"])
@pytest.mark.parametrize("mesh", ["", pytest.param("x=2 y=2 z=2", marks=pytest.mark.slow)])
def test_decoding_on_devices_matches_numpy(kind, mesh, launcher):
    line, parts = f"{COMMON} {kind} {mesh}", [3, 1, 1]
    tokens = np.random.default_rng(3).integers(0, 29, (8, 5))
    expected = step_by_step(f"{COMMON} {kind}", tokens, parts)[0]

    def rank(mesh, config):
        decoder, start, found = decoder_of(mesh, config), 0, []
        for count in parts:
            found.append(to_host(decoder.forward(tokens[:, start : start + count])))
            start += count
        return found

    for found in on_devices(f"{line} dtype=float32", rank):
        for logits, wide in zip(found, expected, strict=True):
            np.testing.assert_allclose(logits, wide, rtol=1e-3, atol=1e-4)
