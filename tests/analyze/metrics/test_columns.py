"""Combinations of column values."""

import numpy as np

from hpc3d.analyze.metrics.columns import combinations


def test_combinations_handle_the_largest_value_of_a_type():
    columns = [np.array([-1, 2**31 - 1, -1], "i4"), np.array([0, 1, 0], "u1")]
    kinds, kind = combinations(columns)
    assert kinds.tolist() == [[-1, 0], [2**31 - 1, 1]] and kind.tolist() == [0, 1, 0]


def test_combinations_return_the_index_of_each_row():
    columns = np.array([3, -1, 3, 3]), np.array([7, 7, 9, 7])
    found, which = combinations(columns)
    assert found.tolist() == [[-1, 7], [3, 7], [3, 9]]
    assert found[which].tolist() == np.transpose(columns).tolist()
