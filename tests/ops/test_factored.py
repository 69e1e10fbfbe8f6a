"""Factored sums of squares, and their scaled update, computed in bands of rows."""

import numpy as np
import pytest

from hpc3d.ops.factored import descend_scaled, sum_squares_of_lines, sum_squares_scaled

SHAPES = [(300, 200), (90, 4, 60), (1, 20000), (0, 3)]


def drawn(shape):
    """Return a block, and factors of its rows and of its columns."""
    draw = np.random.default_rng(len(shape))
    rows, columns = (*shape[:-1], 1), (1, *shape[1:])
    return draw.normal(size=shape), draw.random(rows), draw.random(columns)


@pytest.mark.parametrize("shape", SHAPES)
def test_factored_sums_match_a_direct_computation(shape):
    grad, rows, columns = drawn(shape)
    sum_squares_of_lines(grad, 0.5, rows, columns)
    np.testing.assert_allclose(rows, (grad**2).sum(-1, keepdims=True) / 4, rtol=1e-12)
    np.testing.assert_allclose(columns, (grad**2).sum(0, keepdims=True) / 4, rtol=1e-12)
    sums = np.empty((*shape[1:-1], 1))
    sum_squares_scaled(grad, rows, columns, sums)
    expected = ((grad * rows * columns) ** 2).sum((0, -1))
    np.testing.assert_allclose(sums[..., 0], expected, rtol=1e-12)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("narrow", [False, True])
def test_scaled_update_changes_values_and_master_weights(shape, narrow):
    grad, rows, columns = drawn(shape)
    begun = np.ones(shape)
    value = begun.astype(np.float16 if narrow else np.float64)
    master = begun.copy() if narrow else None
    descend_scaled(value, master, grad, rows, columns, 0.75)
    expected = 0.75 - grad * rows * columns
    np.testing.assert_allclose(master if narrow else value, expected, rtol=1e-12)
    np.testing.assert_array_equal(value, expected.astype(value.dtype))
