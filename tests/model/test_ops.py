"""Local kernels against their equations, and gradients against finite differences."""

import numpy as np
import pytest

from hpc3d.arrays.pool import Pool
from hpc3d.model.layers import scatter_rows
from hpc3d.ops import rows
from hpc3d.ops.attention import attend, attend_again, attend_grad
from hpc3d.ops.gelu import GELU
from hpc3d.ops.norm import combine_moments, moments
from hpc3d.ops.random import Mask, words

RNG = np.random.default_rng(7)


def difference(function, x, dy, step=1e-6):
    """The gradient of sum(dy function(x)) by central differences."""
    gradient = np.empty_like(x)
    for place in np.ndindex(x.shape):
        old = x[place]
        x[place] = old + step
        above = (function(x) * dy).sum()
        x[place] = old - step
        gradient[place] = (above - (function(x) * dy).sum()) / (2 * step)
        x[place] = old
    return gradient


@pytest.fixture(params=[1 << 17, 200], ids=["one block", "many blocks"])
def blocks(request, monkeypatch):
    monkeypatch.setattr(rows, "CACHE", request.param)


@pytest.mark.parametrize("name", GELU)
def test_gelu_and_its_slope(name, blocks):
    def forward(x):
        return GELU[name](x.copy(), np.empty_like(x))

    assert forward(np.array([[-40.0, 0.0, 40.0]])).tolist() == [[-0.0, 0.0, 40.0]]
    h = RNG.normal(size=(7, 9)) * 3
    expected = difference(forward, h, np.ones_like(h))
    GELU[name](h, np.empty_like(h))
    np.testing.assert_allclose(h, expected, atol=1e-8)


def test_moments_have_no_cancellation(blocks):
    """Mean 1e8, deviation 1: E[x^2] - E[x]^2 would leave nothing of it."""
    x = RNG.normal(size=(50, 64)) + 1e8
    mean, squares = moments(x)
    exact = x - x.mean(1, keepdims=True)
    np.testing.assert_allclose(mean, x.mean(1))
    np.testing.assert_allclose(squares, (exact**2).sum(1), rtol=1e-6)


def test_moments_of_parts_are_those_of_the_whole():
    x = RNG.normal(size=(5, 12)) + 1e6
    parts = np.stack([moments(np.ascontiguousarray(x[:, at : at + 4])) for at in (0, 4, 8)])
    for ours, whole in zip(combine_moments(parts, 4), moments(x), strict=True):
        np.testing.assert_allclose(ours, whole, rtol=1e-9)


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
    columns, key = heads * sequence**2, words((3, "p"))
    mask = Mask(key, rate, range(4, 4 + batch), range(columns, 2 * columns), 3 * columns)
    factors = mask.factors(slice(None), slice(None), np.float64)
    assert {*factors.ravel()} == {0, 1 / (1 - rate)}
    return mask, factors.reshape(shape)


SCORES = {"a sample a chunk": 1 << 20, "a head a chunk": 1}


@pytest.mark.parametrize("scores", SCORES.values(), ids=SCORES)
@pytest.mark.parametrize("rate", [0.0, 0.25])
def test_attention_and_its_gradient(scores, rate, monkeypatch):
    monkeypatch.setattr("hpc3d.ops.attention.SCORES", scores)
    empty = Pool().empty
    batch, heads, sequence, width = 2, 3, 5, 2
    qkv = RNG.normal(size=(batch * sequence, heads * 3 * width))
    drop, factors = masked(rate, batch, heads, sequence, sequence)
    out, p = attend(qkv, sequence, width, empty, drop)
    parts = qkv.reshape(batch, sequence, heads, 3, width)
    expected = [
        [causal(*(parts[b, :, h, i] for i in range(3)), factors[b, h]) for h in range(heads)]
        for b in range(batch)
    ]
    expected = np.array(expected).swapaxes(1, 2).reshape(out.shape)
    np.testing.assert_allclose(out, expected, atol=1e-12)
    np.testing.assert_array_equal(attend_again(qkv, sequence, width, empty), p)
    dout = RNG.normal(size=out.shape)
    np.testing.assert_allclose(
        attend_grad(dout, qkv, p, sequence, width, empty, drop),
        difference(lambda x: attend(x, sequence, width, empty, drop)[0], qkv.copy(), dout),
        atol=1e-7,
    )


def test_rows_with_the_same_token_are_summed():
    dy = RNG.normal(size=(6, 3))
    index = np.array([2, -1, 0, 2, 9, 2])
    expected = np.zeros((4, 3))
    for row, at in zip(dy, index, strict=True):
        if 0 <= at < 4:
            expected[at] += row
    order = np.argsort(index, kind="stable")
    np.testing.assert_allclose(scatter_rows(dy, index, order, (4, 3)), expected)
