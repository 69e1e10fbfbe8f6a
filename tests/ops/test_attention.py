"""Attention compared with its equation, and its gradient with finite differences."""

import numpy as np
import pytest

from hpc3d.arrays.pool import Pool
from hpc3d.ops.attention import AttentionMask, HeadForm, attend, attend_again, attend_grad
from hpc3d.ops.random import Mask, philox_key
from tests.ops.by_head import by_head
from tests.ops.differences import difference
from tests.strided import strided

RNG = np.random.default_rng(7)


def by_row(q, k, v, factors, seen, cap):
    """Attention of one head [T, D], row by row, with `factors` of the probabilities, a mask
    `seen`, [key, query], and a soft cap. The output of a query that sees no key is 0."""
    rows = []
    for t in range(len(q)):
        keys = np.flatnonzero(seen[:, t])
        scores = k[keys] @ q[t] / np.sqrt(q.shape[1])
        scores = np.exp(cap * np.tanh(scores / cap) if cap else scores)
        rows.append((scores / scores.sum() * factors[keys, t]) @ v[keys])
    return np.array(rows)


def masked(rate, *shape):
    """Return the dropout of probabilities [B, heads, key, query], and all of its factors."""
    batch, heads, sequence, _ = shape
    if not rate:
        return None, np.ones(shape)
    columns, key = heads * sequence**2, philox_key((3, "p"))
    mask = Mask(key, rate, range(4, 4 + batch), range(columns, 2 * columns), 3 * columns)
    factors = mask.factors(slice(None), slice(None), np.float64)
    assert {*factors.ravel()} == {0, 1 / (1 - rate)}
    return mask, factors.reshape(shape)


# Of two samples of 5 tokens: the end of one and the beginning of the other, or all of one.
PADDED = {
    "none": None,
    "ends": np.array([[0, 0, 0, 1, 1], [1, 0, 0, 0, 0]], bool),
    "a whole sample": np.array([[1, 1, 1, 1, 1], [0, 0, 1, 0, 0]], bool),
}
# Maximum size in bytes of a block of scores, and the minimum number of queries in a block.
SIZES = {"a sample a chunk": (1 << 20, 64), "a head a chunk": (1, 64), "2 queries": (1 << 20, 2)}


@pytest.mark.parametrize("queries", [2, 64])
@pytest.mark.parametrize("window", [0, 2])
def test_packed_documents_match_attention_to_each_of_them(queries, window, monkeypatch):
    """Two samples of 9 tokens, with documents of 3, 1 and 5 tokens, and of 9 tokens."""
    monkeypatch.setattr("hpc3d.ops.attention._QUERIES", queries)
    empty, form, sequence = Pool().empty, HeadForm(2, 2), 9
    starts = np.array([3 * [0] + [3] + 5 * [4], 9 * [0]])
    mask, alone = AttentionMask(window=window, starts=starts), AttentionMask(window=window)
    qkv = RNG.normal(size=(2 * sequence, 3 * form.columns))
    out, p = attend(qkv, sequence, form, empty, None, mask)
    dout = RNG.normal(size=out.shape)
    dqkv = attend_grad(dout, qkv, p, sequence, form, empty, None, mask)
    for first, stop in ((0, 3), (3, 4), (4, 9), (9, 18)):
        how = stop - first, form, empty
        expected, of_document = attend(qkv[first:stop], *how, None, alone)
        np.testing.assert_allclose(out[first:stop], expected, rtol=0, atol=1e-14)
        gradient = attend_grad(dout[first:stop], qkv[first:stop], of_document, *how, None, alone)
        np.testing.assert_allclose(dqkv[first:stop], gradient, rtol=0, atol=1e-14)


@pytest.mark.parametrize(("scores", "queries"), SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("rate", [0.0, 0.25])
@pytest.mark.parametrize(("g", "cap"), strided([(1, 0.0), (2, 0.0), (2, 0.7)], 3, 2, days=1))
@pytest.mark.parametrize(
    ("causal", "window"), [(True, 0), (False, 0), (True, 1), (True, 3)], ids=str
)
@pytest.mark.parametrize("padding", strided(PADDED, 3, 2))
def test_attention_and_its_gradient(
    scores, queries, rate, g, cap, causal, window, padding, monkeypatch
):
    """Tests key heads with g queries each."""
    monkeypatch.setattr("hpc3d.ops.attention.SCORES", scores)
    monkeypatch.setattr("hpc3d.ops.attention._QUERIES", queries)
    empty = Pool().empty
    batch, heads, sequence, width = 2, 3, 5, 2
    form, mask = HeadForm(width, g, cap), AttentionMask(causal, PADDED[padding], window)
    qkv = RNG.normal(size=(batch * sequence, heads * (g + 2) * width))
    drop, factors = masked(rate, batch, heads * g, sequence, sequence)
    out, p = attend(qkv, sequence, form, empty, drop, mask)
    parts = by_head(qkv, heads, form).reshape(batch, sequence, heads, g + 2, width)
    ordered = np.triu(np.ones((sequence, sequence), bool)) if causal else True
    if window:
        ordered = ordered & ~np.triu(np.ones((sequence, sequence), bool), window)
    hidden = np.zeros((batch, sequence), bool) if mask.padding is None else mask.padding
    seen = np.broadcast_to(~hidden[:, :, None] & ordered, (batch, sequence, sequence))
    expected = [
        [
            by_row(
                *(parts[b, :, h, i] for i in (query, g, g + 1)),
                factors[b, h * g + query],
                seen[b],
                cap,
            )
            for h in range(heads)
            for query in range(g)
        ]
        for b in range(batch)
    ]
    expected = np.array(expected).swapaxes(1, 2).reshape(out.shape)
    np.testing.assert_allclose(out, expected, atol=1e-12)
    again = attend_again(qkv, sequence, form, empty, mask=mask)
    np.testing.assert_array_equal(again, p)
    dout = RNG.normal(size=out.shape)
    np.testing.assert_allclose(
        attend_grad(dout, qkv, p, sequence, form, empty, drop, mask),
        difference(lambda x: attend(x, sequence, form, empty, drop, mask)[0], qkv.copy(), dout),
        atol=1e-7,
    )
