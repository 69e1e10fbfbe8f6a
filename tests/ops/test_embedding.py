"""Gradients of the rows of a table."""

import numpy as np

from hpc3d.model.layers import scatter_rows

RNG = np.random.default_rng(7)


def test_rows_with_the_same_token_are_summed():
    dy = RNG.normal(size=(6, 3))
    index = np.array([2, -1, 0, 2, 9, 2])
    expected = np.zeros((4, 3))
    for row, at in zip(dy, index, strict=True):
        if 0 <= at < 4:
            expected[at] += row
    order = np.argsort(index, kind="stable")
    np.testing.assert_allclose(scatter_rows(dy, index, order, (4, 3)), expected)
