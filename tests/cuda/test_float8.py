"""Float8 rules with kernels on the host, compared bitwise with the NumPy rules."""

import numpy as np
import pytest

from hpc3d.ops.float8 import E4M3, E5M2, Tiles, encode_tensor, round_tiles, tile_maxima
from hpc3d.ops.quantize import decode_rows, encode_rows
from tests.strided import strided

CASES = [
    ((1, 1, 1), Tiles(1, 128)),
    ((3, 2, 700), Tiles(1, 128, 0, 100)),
    ((150, 3, 130), Tiles(128, 128, 37, 5)),
    ((20, 1, 600), Tiles(20, 600)),
    ((7, 2, 64), Tiles(50, 640, 40, 576)),
]


class OnHost:
    """Device whose kernels run in the emulator."""

    def __init__(self, emulate):
        self.launch, self.empty = emulate, np.empty


@pytest.mark.parametrize("odd", [None, np.nan, np.inf])
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize(("shape", "tiles"), strided(CASES, 3))
def test_round_tiles_kernel_matches_numpy(shape, tiles, dtype, odd, real, emulate):
    rng = np.random.default_rng(2)
    wide = (rng.standard_normal(shape) * 10.0 ** rng.integers(-4, 3, shape)).astype(np.float32)
    wide[:1, :, :2] = 0
    if odd is not None:
        wide[-1, 0, -1] = odd
    x, (down, across) = real.cast(wide), tiles.grid(shape[0], shape[2])
    wide, out = real.back(x), real.empty(*shape)
    maxima, expected = np.empty((2, down, shape[1], across), np.float32)
    gpu = OnHost(emulate)
    tile_maxima.cuda_rule(gpu, x, tiles, maxima)
    round_tiles.cuda_rule(gpu, x, maxima, tiles, dtype, out)
    tile_maxima(wide, tiles, expected)
    np.testing.assert_array_equal(maxima, expected)
    back = round_tiles(wide, expected, tiles, dtype, np.empty_like(wide))
    np.testing.assert_array_equal(real.back(out), real.back(real.cast(back)))


@pytest.mark.parametrize("odd", [0, np.nan, np.inf])
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_tensor_encoding_kernel_matches_numpy(dtype, odd, real, emulate):
    rng = np.random.default_rng(4)
    x = real.cast((rng.standard_normal(999) * 10.0 ** rng.integers(-5, 3, 999)).astype(np.float32))
    x[7] = real.cast(np.full(1, odd, np.float32))[0]
    wide, most = real.back(x), np.full((1, 1, 1), np.abs(real.back(x)).max(), np.float32)
    found, expected = ((np.empty(999, np.uint8), np.empty(1, np.float32)) for _ in range(2))
    encode_tensor.cuda_rule(OnHost(emulate), x, most, dtype, *found)
    encode_tensor(wide, most, dtype, *expected)
    np.testing.assert_array_equal(found[1], expected[1])
    numbers = [codes.view(dtype).astype(np.float32) for codes, _ in (found, expected)]
    np.testing.assert_array_equal(*numbers)


@pytest.mark.parametrize("size", [(0, 5), (1, 1), (3, 7), (2, 64), (3, 1100)])
@pytest.mark.parametrize("odd", [None, np.nan, np.inf])
def test_float8_row_encoding_kernel_matches_numpy(size, odd, real, draw, emulate):
    _, wide = draw(real, *size)
    wide *= 10.0 ** np.random.default_rng(3).integers(-6, 1, size)
    if odd is not None and wide.size:
        wide[-1, 0] = odd
    x = real.cast(wide)
    wide, gpu = real.back(x), OnHost(emulate)
    found, expected = ((np.empty(size, np.uint8), np.empty(size[0], np.float32)) for _ in range(2))
    out = real.empty(*size)
    encode_rows.cuda_rule(gpu, x, *found)
    decode_rows.cuda_rule(gpu, *found, out)
    encode_rows(wide, *expected)
    back = decode_rows(*expected, np.empty_like(wide))
    np.testing.assert_array_equal(found[1], expected[1])
    finite = np.isfinite(found[1])
    np.testing.assert_array_equal(found[0][finite], expected[0][finite])
    real.same(out[finite], back[finite])
    assert not np.isfinite(real.back(out)[~finite]).all(1).any()
