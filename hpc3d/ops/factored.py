"""Second moments by rows and columns, and the update that they give.

A block is one of a matrix [inputs, outputs] or of a stack of them, [inputs, experts, outputs].
What there is for each row has one column, what there is for each column has one row; a sum over
all of a matrix lacks its first dim and has one column.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import TYPE_CHECKING

import numpy as np

from hpc3d.arrays.primitive import primitive

if TYPE_CHECKING:
    from hpc3d.arrays.array import Array

_CHUNK = 1 << 14  # elements that stay in a core's cache
_DEVICE_CHUNK = 1 << 24  # that a device takes at once


def _bands(block: Array) -> Iterator[slice]:
    """Rows of a block, so many as are done at once."""
    chunk = _CHUNK if isinstance(block, np.ndarray) else _DEVICE_CHUNK
    step = max(1, chunk // max(1, prod(block.shape[1:])))
    for start in range(0, len(block), step):
        yield slice(start, start + step)


@primitive
def sum_squares_of_lines(grad: Array, scale: float, rows: Array, columns: Array) -> None:
    """rows and columns = the sums of (scale grad)^2 over the other dim."""
    columns.fill(0)
    for band in _bands(grad):
        squares = grad[band] * scale
        squares *= squares
        rows[band] = squares.sum(-1)[..., None]
        columns += squares.sum(0)[None]


@sum_squares_of_lines.abstract
def _(grad, *rest):
    return None


@sum_squares_of_lines.cuda
def _(gpu, grad, scale, rows, columns):
    sum_squares_of_lines.numpy(grad, scale, rows, columns)


@primitive
def sum_squares_scaled(grad: Array, rows: Array, columns: Array, sums: Array) -> None:
    """sums = the sum of (rows grad columns)^2 over all of a matrix."""
    sums.fill(0)
    for band in _bands(grad):
        update = grad[band] * rows[band]
        update *= columns
        update *= update
        sums += update.sum(-1)[..., None].sum(0)


@sum_squares_scaled.abstract
def _(grad, *rest):
    return None


@sum_squares_scaled.cuda
def _(gpu, grad, rows, columns, sums):
    sum_squares_scaled.numpy(grad, rows, columns, sums)


@primitive
def descend_scaled(
    value: Array,
    master: Array | None,
    grad: Array,
    rows: Array,
    columns: Array,
    keep: float,
) -> None:
    """w = keep w - rows grad columns."""
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


@descend_scaled.abstract
def _(value, *rest):
    return None


@descend_scaled.cuda
def _(gpu, value, master, grad, rows, columns, keep):
    descend_scaled.numpy(value, master, grad, rows, columns, keep)
