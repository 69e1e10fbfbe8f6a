"""Embedding lookup by token, and its gradient."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from hpc3d.arrays.narrow import wide
from hpc3d.arrays.primitive import primitive

if TYPE_CHECKING:
    from hpc3d.arrays.array import Array


@primitive
def gather_rows(table: Array, index: Array) -> Array:
    """Return the table rows at the given indices, and rows of zeros for indices out of range."""
    absent = (index < 0) | (index >= table.shape[0])
    rows = table[np.where(absent, 0, index)]
    rows[absent] = 0
    return rows


gather_rows.narrow(gather_rows.numpy)
gather_rows.states("vn m?v -> mn")


@gather_rows.abstract
def _(table, index):
    return table.like((index.size, table.shape[1]))


@gather_rows.cuda
def _(gpu, table, index):
    out = gpu.empty((index.size, table.shape[1]), table.dtype)
    given = {"positions": None, "first": 0, "period": 1, "table_rows": table.shape[0]}
    given |= {"table": table, "index": index, "columns": table.shape[1]}
    gpu.launch("gather_rows", *out.shape, out=out, **given)
    return out


def order_of(index: np.ndarray) -> np.ndarray:
    """Return the permutation, int64[n], that stably sorts an array of integers.

    If possible, the integers are sorted as 16-bit integers, for which NumPy uses a radix sort that
    is six times as fast as its sort of wider integers.
    """
    lowest = index.min(initial=0)
    few = index.max(initial=0) - lowest <= np.iinfo(np.uint16).max
    return np.argsort((index - lowest).astype(np.uint16) if few else index, kind="stable")


@primitive
def scatter_rows(dy: Array, index: Array, order: Array, shape: Sequence[int]) -> Array:
    """Return an array of `shape` whose row i is the sum of the rows of `dy` with index i.

    Indices out of range are ignored. `order` is the permutation that sorts `index`.
    """
    total = np.zeros(shape, wide(dy.dtype))
    order = order[(index[order] >= 0) & (index[order] < shape[0])]
    rows, starts = np.unique(index[order], return_index=True)
    ordered = dy[order]
    for row, (start, stop) in zip(rows, pairwise([*starts, len(order)]), strict=True):
        np.add.reduce(ordered[start:stop], out=total[row])
    return total


scatter_rows.states("mn ? ? -> vn", linear="product")


@scatter_rows.abstract
def _(dy, index, order, shape):
    return dy.like(shape, wide(dy.dtype))


@scatter_rows.cuda
def _(gpu, dy, index, order, shape):
    total = gpu.empty(shape, np.float32)
    total.fill(0)
    given = {"index": index, "order": order, "total": total, "table_rows": shape[0]}
    rows, columns = dy.shape
    gpu.launch("scatter_rows", *dy.shape, dy=dy, rows=rows, columns=columns, **given)
    return total
