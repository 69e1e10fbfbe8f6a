"""Operations of gradient compression: orthonormal bases, and the largest elements."""

import numpy as np
import pytest

from hpc3d.ops.compression import add_at, orthonormalise, replace_columns, take_largest


def matrix(rows, columns, rank=99, seed=0):
    draw = np.random.default_rng(seed)
    rank = min(rows, columns, rank)
    return draw.normal(size=(rows, rank)) @ draw.normal(size=(rank, columns))


@pytest.mark.parametrize("rank", [1, 3, 5])
@pytest.mark.parametrize("rows", [3, 4, 5, 9])
@pytest.mark.parametrize("scale", [1.0, 1e-150, 1e150])
def test_orthonormalized_columns_span_the_same_space(rows, rank, scale):
    """This also holds if the rows are too few, or zero because of padding."""
    given = np.concatenate([matrix(rows, 5, rank), np.zeros((2, 5))]) * scale
    basis = given.copy()
    orthonormalise(basis)
    products = basis.T @ basis
    count = round(np.trace(products))
    assert min(rank, rows) <= count <= min(rows, 5)
    np.testing.assert_allclose(products, np.diag(np.diag(products)), atol=1e-12)
    np.testing.assert_allclose(basis @ (basis.T @ given), given, atol=1e-12 * scale)


def test_columns_of_very_different_norms_are_orthonormalized():
    basis = matrix(6, 6) @ np.diag(10.0 ** -np.arange(0, 18, 3))
    orthonormalise(basis)
    np.testing.assert_allclose(basis.T @ basis, np.eye(6), atol=1e-12)


def test_experts_are_orthonormalized_separately_and_zero_columns_remain():
    stack = np.stack([matrix(7, 3, seed=seed) for seed in range(4)], axis=1)
    stack[:, 2, 1] = 0
    expected = []
    for expert in range(4):
        expected.append(stack[:, expert].copy())
        orthonormalise(expected[-1])
    orthonormalise(stack)
    np.testing.assert_allclose(stack, np.stack(expected, axis=1), atol=1e-14)
    assert not stack[:, 2, 1].any()


def test_replace_columns_skips_zero_columns():
    q, total = matrix(4, 3), matrix(4, 3, seed=1)
    total[:, 1] = 0
    before = q.copy()
    replace_columns(q, total)
    np.testing.assert_array_equal(q[:, 1], before[:, 1])
    np.testing.assert_array_equal(q[:, [0, 2]], total[:, [0, 2]])


def taken(numbers, count):
    flat = np.array(numbers, float)
    values, places = np.empty(count), np.empty(count, np.int32)
    take_largest(flat, values, places)
    return flat.tolist(), values.tolist(), places.tolist()


@pytest.mark.parametrize(
    ("numbers", "count", "left", "places"),
    [
        ([1, -5, 3, 2], 2, [1, 0, 0, 2], [1, 2]),
        ([2, -2, 2, 1, -2], 3, [0, 0, 0, 1, -2], [0, 1, 2]),
        ([2, 3, -2, 2], 2, [0, 0, -2, 2], [0, 1]),
        ([0, 0, 0], 2, [0, 0, 0], [0, 1]),
        ([1, 2], 2, [0, 0], [0, 1]),
    ],
)
def test_top_k_elements_prefer_the_lower_index_on_ties(numbers, count, left, places):
    found = taken(numbers, count)
    assert found == (left, [numbers[place] for place in places], places)


def test_non_finite_elements_are_selected_first():
    left, values, places = taken([9, np.nan, np.inf, 8], 2)
    assert places == [1, 2] and left == [9, 0, 0, 8]
    assert np.isnan(values[0]) and values[1] == np.inf


def test_add_at_adds_values_at_their_indices():
    flat = np.array([1.0, 2.0, 3.0])
    add_at(flat, np.array([10.0, 20.0]), np.array([2, 0], np.int32))
    assert flat.tolist() == [21, 2, 13]
