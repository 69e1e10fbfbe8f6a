"""Gradients of the rows of an embedding table."""

import numpy as np
import pytest

from hpc3d.ops.embedding import order_of, scatter_rows

RNG = np.random.default_rng(7)


def test_gradients_of_repeated_tokens_are_summed():
    dy = RNG.normal(size=(6, 3))
    index = np.array([2, -1, 0, 2, 9, 2])
    expected = np.zeros((4, 3))
    for row, at in zip(dy, index, strict=True):
        if 0 <= at < 4:
            expected[at] += row
    order = np.argsort(index, kind="stable")
    np.testing.assert_allclose(scatter_rows(dy, index, order, (4, 3)), expected)


@pytest.mark.parametrize("highest", [0, 7, 2**16 - 1, 2**16, 10**6])
@pytest.mark.parametrize("first", [0, -300, 2**40])
def test_order_of_is_a_stable_argsort(first, highest):
    index = first + np.random.default_rng(1).integers(0, highest, 5000, endpoint=True)
    index[:2] = first, first + highest
    np.testing.assert_array_equal(order_of(index), np.argsort(index, kind="stable"))
    assert order_of(index[:0]).size == 0
