"""8-bit moments: levels, nearest codes, and the published update, value by value. 8-bit rows: the
error is at most half a step of the scale, and non-finite values stay non-finite."""

from itertools import pairwise
from math import sqrt

import numpy as np
import pytest

from hpc3d.config.input_file import CONSTANTS
from hpc3d.ops.quantize import (
    BLOCK,
    LEVELS,
    adamw_8bit,
    decode_rows,
    dequantized,
    encode_rows,
    quantize,
)


@pytest.mark.parametrize("levels", LEVELS)
def test_256_levels_range_from_a_millionth_to_1(levels):
    assert len({*levels.tolist()}) == 256 and (np.diff(levels) > 0).all()
    assert levels[-1] == 1 and 0 in levels
    assert 1e-7 < levels[levels > 0][0] < 1e-6


def test_levels_of_a_decade_are_equally_spaced():
    """The last decade has 64 levels of each sign, or 128."""
    signed, unsigned = LEVELS
    for levels, count in ((signed, 64), (unsigned, 128)):
        last = levels[(levels > 0.1) & (levels < 1)]
        step = 0.9 / count
        np.testing.assert_allclose(last, 0.1 + step * (np.arange(count) + 0.5), rtol=1e-6)
    np.testing.assert_array_equal(signed[:127], -signed[254:127:-1])
    assert unsigned[0] == 0


@pytest.mark.parametrize("columns", [BLOCK, 2 * BLOCK + 77, 31])
@pytest.mark.parametrize("levels", LEVELS)
def test_quantize_selects_the_nearest_level_of_its_block(levels, columns):
    """A positive value gets a positive level of nonnegative levels."""
    x = np.random.default_rng(2).normal(size=(5, columns)) * np.logspace(-30, 3, 5)[:, None]
    x[:, BLOCK:] *= 100
    x = np.abs(x) if levels[0] == 0 else x
    x[3] = 0
    codes, exact = np.full(x.shape, 9, np.uint8), levels.astype(float)
    scales = np.empty((5, -(-columns // BLOCK)), np.float32)
    quantize(x, exact, codes, scales)
    found = dequantized(codes, scales.astype(float), exact)
    for number, start in enumerate(range(0, columns, BLOCK)):
        part = slice(start, start + BLOCK)
        np.testing.assert_array_equal(
            scales[:, number], np.abs(x[:, part]).max(1).astype(np.float32)
        )
        for row, scale, got in zip(x[:, part], scales[:, number].astype(float), found[:, part]):
            choice = exact[exact > 0] if levels[0] == 0 and scale else exact
            nearest = np.abs(row[:, None] - choice * scale).min(1)
            np.testing.assert_allclose(np.abs(row - got), nearest, rtol=1e-9, atol=1e-15 * scale)
    assert not found[3].any()


def drawn(size, steps):
    """Return gradients of some steps, with many magnitudes and zeros."""
    draw = np.random.default_rng(7)
    for _ in range(steps):
        yield draw.normal(size=size) * 10 ** draw.uniform(-4, 0, size) * (draw.random(size) < 0.8)


def by_hand(w, grads, factors, edges):
    """Compute the update block by block and number by number; the moments are rounded to the
    nearest level by a search over all levels."""
    beta1, beta2, epsilon = CONSTANTS["adamw"].values()
    signed, unsigned = LEVELS.astype(float)
    blocks = [range(*each) for each in pairwise(edges)]
    kept = [(block, [0.0] * len(block), [0.0] * len(block)) for block in blocks]
    for g, (scale, rate, root, keep) in zip(grads, factors):
        for block, first, second in kept:
            for i, j in enumerate(block):
                first[i] = beta1 * first[i] + (1 - beta1) * scale * g[j]
                second[i] = beta2 * second[i] + (1 - beta2) * (scale * g[j]) ** 2
                w[j] = keep * w[j] - rate * first[i] / (root * sqrt(second[i]) + epsilon)
            for moment, levels in ((first, signed), (second, unsigned)):
                most = float(np.float32(max(map(abs, moment))))
                above = levels[levels > 0] if moment is second else levels
                for i, each in enumerate(moment):
                    choice = above if each else levels
                    moment[i] = choice[np.abs(choice - each / most).argmin()] * most
    return w


@pytest.mark.parametrize("narrow", [False, True])
@pytest.mark.parametrize(
    "shape, edges",
    [
        ((2, 256), [0, 256, 512]),
        ((1, 512), [0, 256, 512]),
        ((2, 300), [0, 256, 300, 556, 600]),
        ((3, 33), [0, 33, 66, 99]),
    ],
)
def test_8_bit_adamw_steps_match_a_reference(shape, edges, narrow):
    """The last block of a row is shorter if needed."""
    steps = 4
    factors = [(0.5, 0.02 / (1 - 0.9**t), 1 / sqrt(1 - 0.95**t), 0.999) for t in range(1, 5)]
    begun = np.random.default_rng(1).normal(size=shape)
    exact = begun.copy()
    value, master = (exact.astype(np.float16), exact) if narrow else (exact, None)
    codes = [np.zeros(shape, np.uint8) for _ in range(2)]
    scales = np.zeros((2, shape[0], (len(edges) - 1) // shape[0]), np.float32)
    for grad, each in zip(drawn(begun.size, steps), factors):
        moments = *codes, *scales
        adamw_8bit(value, master, grad.reshape(shape), moments, CONSTANTS["adamw"], each)
    expected = by_hand(begun.ravel(), drawn(begun.size, steps), factors, edges)
    np.testing.assert_allclose(exact.ravel(), expected, rtol=1e-10)
    np.testing.assert_array_equal(value, exact.astype(value.dtype))


def coded(x):
    codes, scales = np.empty(x.shape, np.int8), np.empty(len(x), np.float32)
    encode_rows(x, codes, scales)
    return codes, scales, decode_rows(codes, scales, np.empty_like(x))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("shape", [(1, 1), (7, 130), (3, 40_000), (0, 5), (4, 0)])
def test_each_row_has_its_own_int8_scale(shape, dtype):
    rng = np.random.default_rng(3)
    x = (rng.standard_normal(shape) * 10.0 ** rng.integers(-6, 6, (shape[0], 1))).astype(dtype)
    codes, scales, found = coded(x)
    largest = np.abs(x).max(1, initial=0)
    np.testing.assert_allclose(scales, largest / 127, rtol=1e-6)
    assert (np.abs(found - x) <= scales[:, None] * 0.50001).all()
    assert (np.abs(codes).max(1, initial=0) == 127 * (largest > 0)).all()


def test_int8_rows_of_zeros_and_non_finite_values():
    x = np.array([[0, 0, 0], [1, np.nan, 2], [1, np.inf, 2], [1e-40, 0, 0]], np.float32)
    codes, scales, found = coded(x)
    assert (found[0] == 0).all() and (codes[0] == 0).all()
    assert not np.isfinite(scales[1:3]).any()
    assert not np.isfinite(found[1]).all() and not np.isfinite(found[2]).all()
    np.testing.assert_allclose(found[3], x[3], rtol=0.01)
