"""Column-wise concatenation of matrices, copies of blocks, and accumulation into slices."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpc3d.arrays.primitive import composite

if TYPE_CHECKING:
    from hpc3d.arrays.array import Array


@composite
def join_columns(out: Array, *parts: Array) -> Array:
    """Concatenate vectors, or matrices with equal row counts: out = [part | part | ...]."""
    start = 0
    for part in parts:
        stop = start + part.shape[-1]
        out[..., start:stop] = part
        start = stop
    return out


join_columns.cuda_as_numpy()


@composite
def copy_block(out: Array, block: Array) -> None:
    """Copy an array to a view of the same shape, such as some columns of a matrix."""
    out[...] = block


copy_block.cuda_as_numpy()


@composite
def accumulate_columns(grad: Array, to: slice, dw: Array, start: int) -> None:
    """Add consecutive columns of dW to the columns of a gradient selected by the slice `to`.

    The first of the added columns is column `start` of dW.
    """
    some = grad[:, to]
    some += dw[:, start : start + some.shape[1]]


@accumulate_columns.cuda
def _(gpu, grad, to, dw, start):
    rows, columns = len(grad), to.stop - to.start
    given = {"grad_first": to.start, "grad_columns": grad.shape[1]}
    given |= {"dw_first": start, "dw_columns": dw.shape[1]}
    gpu.launch("accumulate_columns", rows, columns, grad=grad, dw=dw, columns=columns, **given)
