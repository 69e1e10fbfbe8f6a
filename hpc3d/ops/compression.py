"""Local operations for gradient compression: orthonormalization and top-k selection.

GPUs run the same sequence of array operations as NumPy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from hpc3d.arrays.primitive import composite, primitive

if TYPE_CHECKING:
    from hpc3d.arrays.array import Array

# Number of Gram-Schmidt passes. If the last pass halves the norm of a column, only rounding
# errors remain in the column.
_PASSES = 3


@composite
def orthonormalise(p: Array) -> None:
    """Orthonormalize the columns of p[m, r], or of each p[:, e] of p[m, e, r], in place.

    The span of the columns is preserved. Columns are processed one by one in a fixed order. A
    column that is linearly dependent on the preceding ones is set to 0.
    """
    scale = np.abs(p).max(0)
    p /= scale + (scale == 0)
    stack = p.swapaxes(0, 1) if p.ndim == 3 else p[None]
    for column in range(p.shape[-1]):
        v, before = stack[:, :, column : column + 1], stack[:, :, :column]
        last = norm = _lengths(v)
        for _ in range(_PASSES if column else 0):
            v -= before @ (before.swapaxes(1, 2) @ v)
            last, norm = norm, _lengths(v)
        v *= (2 * norm > last) / (norm + (norm == 0))


def _lengths(v: Array) -> Array:
    return np.sqrt((v * v).sum(1))[:, None]


orthonormalise.cuda_as_numpy()


@composite
def replace_columns(q: Array, total: Array) -> None:
    """Copy the columns of `total` to q, except for columns that are zero."""
    q *= np.abs(total).max(0) == 0
    q += total


replace_columns.cuda_as_numpy()


@primitive
def take_largest(flat: Array, values: Array, indices: Array) -> None:
    """Move the elements of largest magnitude from a flat array to `values`.

    The number of elements to move is the size of `values`. The moved elements are set to 0 in the
    array, and `indices` receives their indices as int32, in ascending order. Ties go to the lower
    index. NaN counts as the largest magnitude, so that NaN values are not lost.
    """
    size = np.abs(flat)
    size = np.where(np.isnan(size), np.inf, size)
    least = np.partition(size, size.size - values.size)[size.size - values.size]
    above, tied = size > least, size == least
    chosen = above | (tied & (np.cumsum(tied) <= values.size - above.sum()))
    indices[...] = np.flatnonzero(chosen)
    values[...] = flat[indices]
    flat[indices] = 0


take_largest.abstract(lambda flat, values, indices: None)


@take_largest.cuda
def _(gpu, flat, values, indices):
    gpu.by_arrays(take_largest, flat, values, indices)


@primitive
def add_at(flat: Array, values: Array, indices: Array) -> None:
    """Add `values` to a flat array at distinct `indices`."""
    flat[indices] += values


add_at.abstract(lambda flat, values, indices: None)


@add_at.cuda
def _(gpu, flat, values, indices):
    gpu.by_arrays(add_at, flat, values, indices)
