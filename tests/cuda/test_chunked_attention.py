"""Kernels of chunked attention on the host, compared with dense NumPy in float64."""

import numpy as np
import pytest

from hpc3d.ops.random import Mask, cuda_mask, keep_mask, philox_key
from tests.cuda.conftest import FLOAT

HEADS, SEQUENCE, FIRST, SCALE, KEY = 2, 90, 7, 0.3, 11
# keys, queries, group, how far ahead of the first query its last key is (None: no key is later),
# and the window (0: no window)
TILES = [(1, 1, 1, None, 0), (5, 9, 2, None, 0), (40, 72, 1, 3, 0), (33, 16, 3, -2, 0)]
TILES += [(70, 70, 1, 0, 0), (70, 70, 1, 0, 9), (33, 40, 2, 33, 40), (20, 40, 1, 33, 30)]


def dropped(rate, shape):
    """Return the `Mask` of a tile, and its factors [heads, key, group, query]."""
    heads, keys, group, queries = shape
    if not rate:
        return None, np.ones(shape)
    width, row, column = 200, 1003, 11
    mask = Mask(philox_key("p"), rate, range(row, row + keys), range(column, width), width)
    heads_of_queries = np.arange(heads * group)[:, None] * width
    rows = (row + heads_of_queries + np.arange(keys)).ravel()
    kept = keep_mask(mask.key, rate, rows, range(column, column + queries), width)
    return mask, kept.reshape(heads, group, keys, queries).swapaxes(1, 2) / (1 - rate)


class Tile:
    """Tile with random scores and previous sums, and with masks."""

    def __init__(self, draw, real, size, rate, padded, cap=0):
        keys, queries, group, ahead, window = size
        self.shape = HEADS, keys, group, queries
        self.scores, wide = draw(real, *self.shape)
        self.sums, _ = draw(FLOAT, HEADS, group, SEQUENCE)
        self.sums[0, 0, FIRST] = -np.inf
        self.here = np.s_[:, :, FIRST : FIRST + queries]
        self.mask, factors = dropped(rate, self.shape)
        self.factors = real.back(real.cast(factors.astype(np.float32))).astype(np.float64)
        self.padding = np.arange(keys) % 4 == 1 if padded else None
        hidden = np.zeros((keys, queries), bool)
        if ahead is not None:
            hidden |= np.arange(keys)[:, None] > np.arange(queries) + ahead
        if window:
            hidden |= np.arange(keys)[:, None] <= np.arange(queries) + ahead - window
        starts = None
        if padded:
            hidden[self.padding] = True
            starts = KEY + np.arange(queries, dtype=np.int64) // 5 * 5 - 3
            hidden |= KEY + np.arange(keys)[:, None] < starts
        s = SCALE * wide.astype(np.float64)
        self.slope = SCALE * (1 - np.tanh(s / cap) ** 2 if cap else 1)
        self.s = np.where(hidden[:, None], -np.inf, cap * np.tanh(s / cap) if cap else s)
        self.work = HEADS * group, queries
        self.given = {"keys": keys, "queries": queries, "group": group, "first": FIRST}
        self.given |= {"ahead": keys if ahead is None else ahead, "sequence": SEQUENCE}
        self.given |= {"scale": SCALE, "cap": cap, "padding": self.padding, "window": window}
        self.given |= {"starts": starts, "key_position": KEY}
        self.given |= cuda_mask(self.mask, "dropout_key")

    def total(self):
        """Return the log-sum-exps [heads, group, query] including this tile."""
        with np.errstate(divide="ignore"):
            return np.logaddexp(self.sums[self.here], np.log(np.exp(self.s).sum(1)))


def cases(function):
    for mark in (
        pytest.mark.parametrize("size", TILES, ids=str),
        pytest.mark.parametrize(
            ("rate", "padded", "cap"),
            [(0, False, 0), (0.25, False, 0), (0.25, True, 0), (0.25, True, 0.4)],
        ),
    ):
        function = mark(function)
    return function


def base_of(total):
    return np.where(np.isneginf(total), 0, total)


@cases
def test_chunk_softmax_kernel_matches_float64(size, rate, padded, cap, real, draw, emulate):
    """A query that has seen no key has sums of -inf and weights of 0."""
    tile = Tile(draw, real, size, rate, padded, cap)
    total, before = tile.total(), tile.sums.astype(np.float64)
    kept = FLOAT.empty(HEADS, tile.shape[2], tile.shape[3])
    arrays = {"scores": tile.scores, "sums": tile.sums, "kept": kept}
    emulate("chunk_softmax", *tile.work, **arrays, **tile.given)
    p = np.exp(tile.s - base_of(total)[:, None])
    real.same(tile.scores, p * tile.factors)
    expected = before.copy()
    expected[tile.here] = total
    np.testing.assert_allclose(tile.sums, expected, rtol=1e-5, atol=2e-6)
    np.testing.assert_allclose(kept, np.exp(before[tile.here] - base_of(total)), rtol=1e-5)


@cases
def test_chunk_softmax_gradient_kernel_matches_float64(
    size, rate, padded, cap, real, draw, emulate
):
    tile = Tile(draw, real, size, rate, padded, cap)
    tile.sums[tile.here] = total = tile.total()
    (dweights, wide), (dots, wide_dots) = draw(real, *tile.shape), draw(FLOAT, *tile.sums.shape)
    arrays = {"scores": tile.scores, "dweights": dweights, "sums": tile.sums, "dots": dots}
    emulate("chunk_softmax_grad", *tile.work, **arrays, **tile.given)
    p = np.exp(tile.s - base_of(total)[:, None])
    real.same(tile.scores, p * tile.factors)
    ds = tile.slope * p * (wide * tile.factors - wide_dots[tile.here][:, None])
    real.same(dweights, ds)


@pytest.mark.parametrize("width", [3, 8])
@pytest.mark.parametrize("known", [True, False])
def test_tile_output_is_rescaled_and_accumulated(width, known, draw, emulate):
    """Tests two of four query heads."""
    queries, heads, all_heads = 5, 2, 4
    out, before = draw(FLOAT, queries, all_heads, width)
    added, wide = draw(FLOAT, heads, queries, width)
    kept, factors = draw(FLOAT, heads, queries) if known else (None, np.ones((heads, queries)))
    sizes = {"queries": queries, "columns": heads * width, "width": width}
    sizes |= {"first": width, "stride": all_heads * width}
    emulate("merge_chunk", queries, heads * width, out=out, added=added, kept=kept, **sizes)
    expected = before.copy()
    expected[:, 1:3] = (factors[..., None] * before[:, 1:3].swapaxes(0, 1) + wide).swapaxes(0, 1)
    np.testing.assert_allclose(out, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("heads", "width"), [(1, 5), (9, 64), (3, 40)])
def test_row_dots_kernel(heads, width, real, draw, emulate):
    sequence, batch = 3, 2
    (x, wide_x), (y, wide_y) = (draw(real, batch * sequence, heads * width) for _ in range(2))
    dots = FLOAT.empty(batch, heads, sequence)
    sizes = {"heads": heads, "width": width, "sequence": sequence}
    emulate("row_dots", *x.shape, x=x, y=y, dots=dots, **sizes)
    expected = (wide_x.astype(np.float64) * wide_y).reshape(batch, sequence, heads, width)
    np.testing.assert_allclose(dots, expected.sum(-1).swapaxes(1, 2), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("heads", "width"), [(1, 5), (9, 64)])
@pytest.mark.parametrize("merged", [True, False])
def test_hop_is_merged_by_its_log_sum_exps_or_added(heads, width, merged, real, draw, emulate):
    """Tests two samples; the first query has seen no key before. In the second sample, all keys of
    the first two queries are masked."""
    samples, queries, here = 2, 5, np.s_[:, :, FIRST : FIRST + 5]
    shape = samples, queries, heads, width
    (out, before), (added, wide) = draw(FLOAT, *shape), draw(real, *shape)
    sums, old = draw(FLOAT, samples, heads, SEQUENCE)
    added_sums, new = draw(FLOAT, samples, heads, queries)
    sums[..., FIRST] = old[..., FIRST] = -np.inf
    added_sums[1, :, :2], new[1, :, :2] = -32768, -16384
    sizes = {"queries": queries, "heads": heads, "width": width}
    sizes |= {"first": FIRST, "sequence": SEQUENCE, "sums": None, "added_sums": None}
    sizes["least"] = -16384
    sizes |= {"sums": sums, "added_sums": added_sums} if merged else {}
    emulate("merge_hop", samples * queries, heads * width, out=out, added=added, **sizes)
    total, kept, share = old.astype(np.float64), 1, 1
    if merged:
        total[here] = np.logaddexp(old[here], new)
        kept, share = (
            np.exp(each - total[here]).swapaxes(1, 2)[..., None] for each in (old[here], new)
        )
        share[1, :2] = 0
    np.testing.assert_allclose(out, kept * before + share * wide, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(sums, total, rtol=1e-5, atol=1e-6)
