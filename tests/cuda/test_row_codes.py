"""Kernels of 8-bit rows on the host, compared with the NumPy rules."""

import numpy as np
import pytest

from hpc3d.ops.quantize import decode_rows, encode_rows

SIZES = [(0, 5), (1, 1), (3, 7), (2, 64), (3, 1100)]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("odd", [None, np.nan, np.inf])
def test_int8_row_encoding_kernel_matches_numpy(size, odd, real, draw, emulate):
    _, wide = draw(real, *size)
    if odd is not None and wide.size:
        wide[-1, 0] = odd
    x = real.cast(wide)
    codes, scales, out = np.empty(size, np.int8), np.empty(size[0], np.float32), real.empty(*size)
    emulate("encode_rows", *size, x=x, codes=codes, scales=scales, columns=size[1])
    emulate("decode_rows", *size, codes=codes, scales=scales, out=out, columns=size[1])
    expected = np.empty_like(codes), np.empty_like(scales)
    with np.errstate(invalid="ignore"):
        encode_rows(wide, *expected)
        back = decode_rows(*expected, np.empty_like(wide))
    np.testing.assert_array_equal(scales, expected[1])
    finite = np.isfinite(scales)
    np.testing.assert_array_equal(codes[finite], expected[0][finite])
    real.same(out[finite], back[finite])
    assert not np.isfinite(real.back(out)[~finite]).all(1).any()
