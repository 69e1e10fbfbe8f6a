"""Float8 by tiles: bitwise equal to torch, with scales that map maximum to maximum."""

import numpy as np
import pytest
import torch

from hpc3d.ops.float8 import E4M3, E5M2, LARGEST, Tiles, encode, nearest, round_tiles, tile_maxima

KINDS = {E4M3: torch.float8_e4m3fn, E5M2: torch.float8_e5m2}


@pytest.mark.parametrize("dtype", KINDS)
def test_float8_encoding_matches_torch(dtype):
    rng = np.random.default_rng(0)
    spread = rng.standard_normal(20_000) * 2.0 ** rng.integers(-20, 16, 20_000)
    ties = np.arange(-4096, 4096) * 2.0**-11  # all sums of three neighbors, and subnormals
    x = np.concatenate([spread, ties, [0.0, -0.0, 1e-30]]).astype(np.float32)
    most = LARGEST[dtype]
    wanted = torch.tensor(x).clamp(-most, most).to(KINDS[dtype]).view(torch.uint8).numpy()
    np.testing.assert_array_equal(encode(x, dtype).view(np.uint8), wanted)
    for wide in (x, x.astype(np.float64)):
        np.testing.assert_array_equal(
            nearest(wide.copy(), dtype), encode(wide, dtype).astype(wide.dtype)
        )


@pytest.mark.parametrize("dtype", KINDS)
def test_float8_saturates_and_preserves_nan(dtype):
    most = LARGEST[dtype]
    found = encode(np.array([2 * most, -np.inf, np.nan], np.float32), dtype).astype(float)
    np.testing.assert_array_equal(found, [most, -most, np.nan])
    beyond = np.array([2 * most, -np.inf, np.nan])
    np.testing.assert_array_equal(nearest(beyond, dtype), [most, -most, np.nan])


def rounded(x, tiles, dtype=E4M3):
    """Return x[m, e, n] rounded, and the maxima."""
    down, across = tiles.grid(len(x), x.shape[2])
    maxima = np.full((down, x.shape[1], across), -1, np.result_type(x, np.float32))
    tile_maxima(x, tiles, maxima)
    return round_tiles(x, maxima, tiles, dtype, np.empty_like(x)), maxima


def by_tile(x, tiles, dtype):
    """Return the same tile by tile, with torch; maxima as a dict."""
    out, maxima = torch.empty(x.shape, dtype=torch.float64), {}
    x = torch.tensor(x)
    down, across = tiles.grid(len(x), x.shape[2])
    for i, e, j in np.ndindex(down, x.shape[1], across):
        top, left = i * tiles.height - tiles.top, j * tiles.width - tiles.left
        rows = slice(max(0, top), top + tiles.height)
        columns = slice(max(0, left), left + tiles.width)
        tile = x[rows, e, columns]
        scale = tile.abs().max() / LARGEST[dtype]
        codes = (tile / (scale if scale else 1)).to(KINDS[dtype])
        out[rows, e, columns] = (codes.to(x.dtype) * scale).double()
        maxima[i, e, j] = float(tile.abs().max())
    return out.numpy(), maxima


CASES = [
    ((1, 1, 1), Tiles(1, 128)),
    ((5, 1, 300), Tiles(1, 128)),
    ((5, 2, 300), Tiles(1, 128, 0, 100)),
    ((300, 1, 200), Tiles(128, 128, 37, 5)),
    ((130, 3, 40), Tiles(128, 128)),
    ((70, 2, 33), Tiles(70, 33)),
    ((70, 1, 2000), Tiles(200, 8000, 130, 6000)),
    ((4000, 1, 70), Tiles(128, 128, 1)),
]


@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize(("shape", "tiles"), CASES)
def test_every_tile_has_its_own_scale(shape, tiles, dtype):
    rng = np.random.default_rng(1)
    x = rng.standard_normal(shape) * 10.0 ** rng.integers(-3, 3, shape)
    x[:1, :, :2] = 0
    x = x.astype(np.float32)
    found, maxima = rounded(x, tiles, dtype)
    wanted, largest = by_tile(x, tiles, dtype)
    np.testing.assert_array_equal(found, wanted.astype(np.float32))
    for place, most in largest.items():
        assert maxima[place] == np.float32(most)


def test_tiles_of_zero_small_and_non_finite_values():
    x = np.ones((5, 1, 4), np.float32)
    x[0], x[1, 0, 2], x[2, 0, 0] = 0, np.nan, np.inf
    x[3] = 3e-44  # over 448 it is no number any more, or one that is far off
    found, maxima = rounded(x, Tiles(1, 4))
    assert not found[0].any() and not maxima[0].any()
    assert np.isnan(found[1]).all() and np.isnan(found[2, 0, 0])
    assert (abs(found[3]) <= 1e-42).all()
    np.testing.assert_allclose(found[4], 1, rtol=1e-6)


def test_float64_input_has_float64_scales():
    x = np.random.default_rng(2).standard_normal((6, 1, 200))
    found, maxima = rounded(x, Tiles(1, 128))
    assert maxima.dtype == np.float64
    wanted, _ = by_tile(x, Tiles(1, 128), E4M3)
    np.testing.assert_allclose(found, wanted, rtol=1e-15)
