"""What compression of gradients does on one rank: bases of subspaces, and largest elements.

Devices do it by the operations of their arrays, as NumPy does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from hpc3d.arrays.primitive import composite, primitive

if TYPE_CHECKING:
    from hpc3d.arrays.array import Array

_PASSES = 3  # of Gram-Schmidt; where the last halves a column, only rounding was left of it


@composite
def orthonormalise(p: Array) -> None:
    """Make the columns of p[m, r], or of each p[:, e] of p[m, e, r], orthonormal and let them span
    what they did, column by column in one order; one that depends on those before becomes 0."""
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


@orthonormalise.cuda
def _(gpu, p):
    orthonormalise.numpy(p)


@composite
def replace_columns(q: Array, total: Array) -> None:
    """Let the columns of q be those of `total` that are not 0."""
    q *= np.abs(total).max(0) == 0
    q += total


@replace_columns.cuda
def _(gpu, q, total):
    replace_columns.numpy(q, total)


@primitive
def take_largest(flat: Array, values: Array, places: Array) -> None:
    """Move the elements of the largest magnitude out of a flat array, which has 0 there after it:
    as many as `values` holds, with their `places` in int32, ascending.  Of equal ones those at
    lower places are taken, and NaN is the largest of all, so that it is seen."""
    size = np.abs(flat)
    size = np.where(np.isnan(size), np.inf, size)
    least = np.partition(size, size.size - values.size)[size.size - values.size]
    above, tied = size > least, size == least
    chosen = above | (tied & (np.cumsum(tied) <= values.size - above.sum()))
    places[...] = np.flatnonzero(chosen)
    values[...] = flat[places]
    flat[places] = 0


@take_largest.abstract
def _(flat, values, places):
    return None


@take_largest.cuda
def _(gpu, flat, values, places):
    gpu.by_arrays(take_largest, flat, values, places)


@primitive
def add_at(flat: Array, values: Array, places: Array) -> None:
    """Add `values` to a flat array at `places`, which are all different."""
    flat[places] += values


@add_at.abstract
def _(flat, values, places):
    return None


@add_at.cuda
def _(gpu, flat, values, places):
    gpu.by_arrays(add_at, flat, values, places)
