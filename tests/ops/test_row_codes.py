"""Rows in 8 bits: at most half of a step of the scale away, and never finite where X is not."""

import numpy as np
import pytest

from hpc3d.ops.row_codes import decode_rows, encode_rows


def coded(x):
    codes, scales = np.empty(x.shape, np.int8), np.empty(len(x), np.float32)
    encode_rows(x, codes, scales)
    return codes, scales, decode_rows(codes, scales, np.empty_like(x))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("shape", [(1, 1), (7, 130), (3, 40_000), (0, 5), (4, 0)])
def test_a_row_has_a_scale_of_its_own(shape, dtype):
    rng = np.random.default_rng(3)
    x = (rng.standard_normal(shape) * 10.0 ** rng.integers(-6, 6, (shape[0], 1))).astype(dtype)
    codes, scales, found = coded(x)
    largest = np.abs(x).max(1, initial=0)
    np.testing.assert_allclose(scales, largest / 127, rtol=1e-6)
    assert (np.abs(found - x) <= scales[:, None] * 0.50001).all()
    assert (np.abs(codes).max(1, initial=0) == 127 * (largest > 0)).all()


def test_rows_of_zeros_and_rows_that_are_not_finite():
    x = np.array([[0, 0, 0], [1, np.nan, 2], [1, np.inf, 2], [1e-40, 0, 0]], np.float32)
    codes, scales, found = coded(x)
    assert (found[0] == 0).all() and (codes[0] == 0).all()
    assert not np.isfinite(scales[1:3]).any()
    assert not np.isfinite(found[1]).all() and not np.isfinite(found[2]).all()
    np.testing.assert_allclose(found[3], x[3], rtol=0.01)
