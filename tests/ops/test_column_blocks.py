"""Adjacent matrices, and sums over some of their columns."""

import numpy as np
import pytest

from hpc3d.ops.column_blocks import accumulate_columns, join_columns

RNG = np.random.default_rng(7)


@pytest.mark.parametrize("rows", [(), (0,), (3,)])
def test_join_columns_concatenates_matrices(rows):
    parts = [RNG.normal(size=(*rows, columns)) for columns in (4, 1, 2)]
    out = np.full((*rows, 7), np.nan)
    assert join_columns(out, *parts) is out
    np.testing.assert_array_equal(out, np.concatenate(parts, -1))


def test_accumulate_columns_leaves_other_columns():
    grad, dw = RNG.normal(size=(2, 3, 7))
    expected = grad.copy()
    expected[:, 2:4] += dw[:, 5:]
    accumulate_columns(grad, slice(2, 4), dw, 5)
    np.testing.assert_array_equal(grad, expected)
