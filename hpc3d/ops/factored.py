"""Second moments factored into row and column sums, and the resulting optimizer update.

A block is part of a matrix [inputs, outputs] or of a stack of matrices [inputs, experts, outputs].
Arrays of sums can be broadcast to the shape of the block. For a matrix, row sums have the shape
[inputs, 1], column sums have the shape [1, outputs], and a total has the shape [1].
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import TYPE_CHECKING

import numpy as np

from hpc3d.arrays.primitive import primitive

if TYPE_CHECKING:
    from hpc3d.arrays.array import Array

_CHUNK = 1 << 14  # number of elements that fit in a core's cache
_DEVICE_CHUNK = 1 << 24  # number of elements processed in one GPU operation


def _bands(block: Array) -> Iterator[slice]:
    """Split the rows of a block into slices that are processed one at a time."""
    chunk = _CHUNK if isinstance(block, np.ndarray) else _DEVICE_CHUNK
    step = max(1, chunk // max(1, prod(block.shape[1:])))
    for start in range(0, len(block), step):
        yield slice(start, start + step)


@primitive
def sum_squares_of_lines(grad: Array, scale: float, rows: Array, columns: Array) -> None:
    """Store the row and column sums of (scale * grad)^2 in `rows` and `columns`."""
    columns.fill(0)
    for band in _bands(grad):
        squares = grad[band] * scale
        squares *= squares
        rows[band] = squares.sum(-1)[..., None]
        columns += squares.sum(0)[None]


sum_squares_of_lines.abstract(lambda grad, *rest: None)
sum_squares_of_lines.cuda_as_numpy()


@primitive
def sum_squares_scaled(grad: Array, rows: Array, columns: Array, sums: Array) -> None:
    """Store the sum of (rows[i] * grad[i, j] * columns[j])^2 over each matrix in `sums`."""
    sums.fill(0)
    for band in _bands(grad):
        update = grad[band] * rows[band]
        update *= columns
        update *= update
        sums += update.sum(-1)[..., None].sum(0)


sum_squares_scaled.abstract(lambda grad, *rest: None)
sum_squares_scaled.cuda_as_numpy()


@primitive
def descend_scaled(
    value: Array,
    master: Array | None,
    grad: Array,
    rows: Array,
    columns: Array,
    keep: float,
) -> None:
    """Update w[i, j] = keep * w[i, j] - rows[i] * grad[i, j] * columns[j] for all elements."""
    exact = value if master is None else master
    for band in _bands(grad):
        update = grad[band] * rows[band]
        update *= columns
        w = exact[band]
        w *= keep
        w -= update
        if master is not None:
            value[band] = w


descend_scaled.narrow(descend_scaled.numpy)
descend_scaled.abstract(lambda value, *rest: None)
descend_scaled.cuda_as_numpy()
