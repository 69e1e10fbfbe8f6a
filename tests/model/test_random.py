"""Random numbers depend on the key and the global index, not on how a tensor is sharded."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc3d.ops.random import Mask, keep_mask, normal, philox_key

W, M, A, B = (philox_key((1, name)) for name in "wmab")
WIDTH = 23


def whole(rows):
    return slice(0, rows), slice(0, WIDTH)


@given(
    st.tuples(st.integers(0, 9), st.integers(0, 9)).map(sorted),
    st.tuples(st.integers(0, WIDTH), st.integers(0, WIDTH)).map(sorted),
)
def test_block_of_random_numbers_is_a_slice_of_the_full_array(rows, columns):
    where = slice(*rows), slice(*columns)
    np.testing.assert_array_equal(normal(W, *where, WIDTH), normal(W, *whole(9), WIDTH)[where])
    np.testing.assert_array_equal(
        keep_mask(W, 0.3, *where, WIDTH), keep_mask(W, 0.3, *whole(9), WIDTH)[where]
    )


def test_numbers_are_normal_and_differ_by_key():
    a, b = normal(A, *whole(4000), WIDTH), normal(B, *whole(4000), WIDTH)
    assert abs(a.mean()) < 0.01 and abs(a.std() - 1) < 0.01
    assert abs((a**4).mean() - 3) < 0.1
    assert abs(np.corrcoef(a.ravel(), b.ravel())[0, 1]) < 0.01
    assert np.isfinite(a).all()


@pytest.mark.parametrize("rate", [0.0, 0.1, 0.5, 0.9])
def test_masks_drop_at_the_given_rate(rate):
    assert keep_mask(M, rate, *whole(20000), WIDTH).mean() == pytest.approx(1 - rate, abs=0.003)


@given(
    st.tuples(st.integers(0, 5), st.integers(0, 9)).map(sorted),
    st.tuples(st.integers(0, 8), st.integers(0, 9)).map(sorted),
)
def test_dropout_factors_of_a_slice_match_the_full_mask(rows, columns):
    mask = Mask(M, 0.25, range(3, 8), range(7, 15), WIDTH)
    every = keep_mask(M, 0.25, slice(3, 8), slice(7, 15), WIDTH) / np.float32(0.75)
    where = slice(*rows), slice(*columns)
    found = mask.factors(*where, np.float32)
    np.testing.assert_array_equal(found, every[where])
    assert found.dtype == np.float32
