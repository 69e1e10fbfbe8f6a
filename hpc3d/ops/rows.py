"""Row-wise operations: bias, soft cap, dropout, addition of a table, and their gradients.

To run at cache speed, the NumPy implementations process rows in cache-sized blocks, in place, and
without full-size temporaries.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from hpc3d.arrays.narrow import WIDE, wide, widened
from hpc3d.arrays.primitive import composite, primitive
from hpc3d.arrays.worker_threads import parallel_for, shares, slices
from hpc3d.ops.random import Mask, cuda_mask

if TYPE_CHECKING:
    from collections.abc import Callable

    from hpc3d.arrays.array import Array
    from hpc3d.cuda.gpu import Gpu

CACHE = 1 << 17  # maximum bytes of each operand of a row block; the block fits in the cache
EDGE = 64  # tiles start at multiples of this, so that BLAS computes all elements identically


def row_blocks(x: Array) -> list[slice]:
    """Split the rows of `x` into slices that fit in the cache."""
    return slices(len(x), max(1, CACHE // max(1, x[:1].nbytes)))


def in_float32(function: Callable[..., object], *arrays: Array) -> None:
    """Call `function(rows, *copies)` for cache-sized slices of the rows of 16-bit arrays.

    `copies` are float32 copies of these rows. Afterwards, they are rounded and written back.
    """

    def block(rows):
        copies = [widened(each[rows]) for each in arrays]
        function(rows, *copies)
        for each, copy in zip(arrays, copies, strict=True):
            each[rows] = copy

    parallel_for(block, row_blocks(arrays[0]))


@composite
def add_bias(y: Array, bias: Array, out: Array) -> Array:
    """Compute y + b, where b is a bias vector or an array with the shape of y."""
    return np.add(y, bias, out=out)


@add_bias.threads
def _(y, bias, out):
    whole = bias.shape == y.shape

    def block(rows):
        np.add(y[rows], bias[rows] if whole else bias, out=out[rows])

    parallel_for(block, shares(len(y)))
    return out


@add_bias.cuda
def _(gpu, y, bias, out):
    if bias.shape == y.shape:
        gpu.launch("add", 1, y.size, x=y, y=bias, out=out, size=y.size)
    else:
        gpu.launch("add_bias", *y.shape, y=y, bias=bias, out=out, columns=y.shape[1])
    return out


@primitive
def scale_and_shift(x: Array, factor: float, offset: float, out: Array) -> Array:
    """Compute out = factor x + offset; `out` may be x."""
    np.multiply(x, factor, out=out)
    out += offset
    return out


scale_and_shift.narrow(scale_and_shift.numpy)
scale_and_shift.abstract(lambda x, factor, offset, out: out)
scale_and_shift.states(linear="product")


@scale_and_shift.cuda
def _(gpu, x, factor, offset, out):
    given = {"factor": factor, "offset": offset, "size": x.size}
    gpu.launch("scale_and_shift", 1, x.size, x=x, out=out, **given)
    return out


@primitive
def soft_cap(x: Array, cap: float) -> None:
    """Compute x = cap tanh(x / cap) in place (Gemma 2, arXiv:2408.00118, section 2)."""

    def block(rows):
        part = x[rows]
        part /= cap
        np.tanh(part, out=part)
        part *= cap

    parallel_for(block, row_blocks(x))


@soft_cap.narrow
def _(x, cap):
    in_float32(lambda rows, part: soft_cap(part, cap), x)


soft_cap.abstract(lambda x, cap: None)


@soft_cap.cuda
def _(gpu, x, cap):
    gpu.launch("soft_cap", 1, x.size, x=x, cap=cap, size=x.size)


@primitive
def soft_cap_grad(dy: Array, y: Array, cap: float) -> None:
    """Multiply the gradient of y, the result of `soft_cap`, by dy/dx = 1 - (y / cap)^2."""

    def block(rows):
        slope = y[rows] / cap
        slope *= slope
        np.subtract(1, slope, out=slope)
        dy[rows] *= slope

    parallel_for(block, row_blocks(y))


@soft_cap_grad.narrow
def _(dy, y, cap):
    in_float32(lambda rows, part: soft_cap_grad(part, widened(y[rows]), cap), dy)


soft_cap_grad.abstract(lambda dy, y, cap: None)


@soft_cap_grad.cuda
def _(gpu, dy, y, cap):
    gpu.launch("soft_cap_grad", 1, dy.size, dy=dy, y=y, cap=cap, size=dy.size)


@composite
def sum_rows(y: Array) -> Array:
    """Sum the rows of y, as for a bias gradient, by multiplying a vector of ones by y."""
    return np.ones(y.shape[0], wide(y.dtype)) @ y


@sum_rows.threads
def _(y):
    ones, total = np.ones(y.shape[0], y.dtype), np.empty(y.shape[1], y.dtype)

    def block(columns):
        np.matmul(ones, y[:, columns], out=total[columns])

    parallel_for(block, shares(y.shape[1], edge=EDGE))
    return total


@sum_rows.narrow
def _(y):
    total = np.zeros(y.shape[1:], WIDE)
    for rows in row_blocks(y):
        total += sum_rows(widened(y[rows]))
    return total


@sum_rows.cuda
def _(gpu, y):
    total = gpu.empty(y.shape[1:], np.float32)
    add_rows(gpu, total, y, add=False)
    return total


def add_rows(gpu: Gpu, total: Array, y: Array, add: bool = True) -> None:
    """Add the sum of the rows of y to `total`; overwrite `total` if `add` is False."""
    rows, columns = y.shape
    strips = gpu.strips(rows)
    partial = gpu.empty((strips, columns), np.float32)
    gpu.launch("sum_rows", rows, columns, y=y, partial=partial, rows=rows, columns=columns)
    add_strips(gpu, partial, add, total)


def add_strips(
    gpu: Gpu, partial: Array, add: bool, total: Array, other: Array | None = None
) -> None:
    """Add the sum of the rows of `partial` to `total`; overwrite `total` if `add` is False.

    If `other` is given, it receives the second half of the columns of the sum.
    """
    sums, columns = 1 if other is None else 2, total.size
    given = {"partial": partial, "total": total, "other": other, "add": add}
    gpu.launch("sum_strips", sums, columns, strips=len(partial), columns=columns, **given)


@primitive
def dropped(x: Array, mask: Mask, out: Array) -> Array:
    """Multiply x, or a gradient, by the factors of a dropout mask."""

    def block(rows):
        np.multiply(x[rows], mask.factors(rows, slice(None), wide(x.dtype)), out=out[rows])

    parallel_for(block, row_blocks(x))
    return out


dropped.narrow(dropped.numpy)
dropped.abstract(lambda x, mask, out: out)


@dropped.cuda
def _(gpu, x, mask, out):
    given = {"rows": None if isinstance(mask.rows, range) else mask.rows, "columns": x.shape[1]}
    gpu.launch("dropped", *x.shape, x=x, out=out, **given, **cuda_mask(mask, "key"))
    return out


@primitive
def add_repeated(x: Array, table: Array, first: int, out: Array) -> Array:
    """Add the rows of a table to the rows of x, cyclically and starting at table row `first`."""
    return np.add(x, table[(first + np.arange(len(x))) % len(table)], out=out)


add_repeated.narrow(add_repeated.numpy)
add_repeated.abstract(lambda x, table, first, out: out)
add_repeated.states(linear="sum")


@add_repeated.cuda
def _(gpu, x, table, first, out):
    period, columns = table.shape
    given = {"first": first, "period": period, "columns": columns}
    gpu.launch("add_repeated", *x.shape, x=x, table=table, out=out, **given)
    return out


@primitive
def sum_repeated(dx: Array, first: int, period: int) -> Array:
    """Return the gradient of the table of `add_repeated`.

    Each row is the sum of the rows of dx to which the corresponding table row was added.
    """
    rows = -(-(first + len(dx)) // period) * period
    whole = np.zeros((rows, dx.shape[1]), dx.dtype)
    whole[first : first + len(dx)] = dx
    return whole.reshape(-1, period, dx.shape[1]).sum(0)


sum_repeated.states("mn -> tn", linear="sum")


@sum_repeated.abstract
def _(dx, first, period):
    return dx.like((period, dx.shape[1]), wide(dx.dtype))


@sum_repeated.cuda
def _(gpu, dx, first, period):
    rows, columns = dx.shape
    total = gpu.empty((period, columns), np.float32)
    given = {"first": first, "period": period, "rows": rows, "columns": columns, "add": 0}
    gpu.launch("sum_repeated", period, columns, dx=dx, total=total, **given)
    return total
