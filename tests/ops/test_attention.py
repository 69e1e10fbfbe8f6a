"""Attention against its equation, and its gradient against differences."""

import numpy as np
import pytest

from hpc3d.arrays.pool import Pool
from hpc3d.ops.attention import HeadForm, attend, attend_again, attend_grad
from hpc3d.ops.random import Mask, philox_key
from tests.ops.differences import difference

RNG = np.random.default_rng(7)


def causal(q, k, v, factors):
    """Attention of one head [T, D], row by row; `factors` [key, query] of its probabilities."""
    rows = []
    for t in range(len(q)):
        scores = np.exp(k[: t + 1] @ q[t] / np.sqrt(q.shape[1]))
        rows.append((scores / scores.sum() * factors[: t + 1, t]) @ v[: t + 1])
    return np.array(rows)


def masked(rate, *shape):
    """Dropout of probabilities [B, heads, key, query], and all of its factors."""
    batch, heads, sequence, _ = shape
    if not rate:
        return None, np.ones(shape)
    columns, key = heads * sequence**2, philox_key((3, "p"))
    mask = Mask(key, rate, range(4, 4 + batch), range(columns, 2 * columns), 3 * columns)
    factors = mask.factors(slice(None), slice(None), np.float64)
    assert {*factors.ravel()} == {0, 1 / (1 - rate)}
    return mask, factors.reshape(shape)


SCORES = {"a sample a chunk": 1 << 20, "a head a chunk": 1}


@pytest.mark.parametrize("scores", SCORES.values(), ids=SCORES)
@pytest.mark.parametrize("rate", [0.0, 0.25])
@pytest.mark.parametrize("g", [1, 2])
def test_attention_and_its_gradient(scores, rate, g, monkeypatch):
    """Of heads of keys with g queries each."""
    monkeypatch.setattr("hpc3d.ops.attention.SCORES", scores)
    empty = Pool().empty
    batch, heads, sequence, width = 2, 3, 5, 2
    form = HeadForm(width, g)
    qkv = RNG.normal(size=(batch * sequence, heads * (g + 2) * width))
    drop, factors = masked(rate, batch, heads * g, sequence, sequence)
    out, p = attend(qkv, sequence, form, empty, drop)
    parts = qkv.reshape(batch, sequence, heads, g + 2, width)
    expected = [
        [
            causal(*(parts[b, :, h, i] for i in (query, g, g + 1)), factors[b, h * g + query])
            for h in range(heads)
            for query in range(g)
        ]
        for b in range(batch)
    ]
    expected = np.array(expected).swapaxes(1, 2).reshape(out.shape)
    np.testing.assert_allclose(out, expected, atol=1e-12)
    np.testing.assert_array_equal(attend_again(qkv, sequence, form, empty), p)
    dout = RNG.normal(size=out.shape)
    np.testing.assert_allclose(
        attend_grad(dout, qkv, p, sequence, form, empty, drop),
        difference(lambda x: attend(x, sequence, form, empty, drop)[0], qkv.copy(), dout),
        atol=1e-7,
    )
