"""Matrices side by side, and sums of some of their columns."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpc3d.arrays.primitive import composite, primitive

if TYPE_CHECKING:
    from hpc3d.arrays.array import Array


@composite
def join_columns(out: Array, *parts: Array) -> Array:
    """out = [part | part | ...] of matrices with the same rows, or of vectors."""
    start = 0
    for part in parts:
        stop = start + part.shape[-1]
        out[..., start:stop] = part
        start = stop
    return out


@join_columns.cuda
def _(gpu, out, *parts):
    return join_columns.numpy(out, *parts)


@primitive
def accumulate_columns(grad: Array, dw: Array) -> None:
    """grad += dW of some columns of both, views of wider matrices."""
    grad += dw


@accumulate_columns.abstract
def _(grad, dw):
    return None


@accumulate_columns.cuda
def _(gpu, grad, dw):
    rows, columns = grad.shape
    strides = {"grad_stride": _stride(grad), "dw_stride": _stride(dw)}
    gpu.launch("accumulate_columns", rows, columns, grad=grad, dw=dw, columns=columns, **strides)


def _stride(x: Array) -> int:
    """Elements from a row to the next."""
    return x.strides[0] // x.itemsize
