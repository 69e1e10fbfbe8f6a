"""Local matrix products, with epilogues that are fused on GPUs."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from hpc3d.arrays.narrow import widened
from hpc3d.arrays.primitive import composite, primitive
from hpc3d.arrays.worker_threads import (
    blas_kernels,
    parallel_for,
    shares,
    slices,
    thread_count,
)
from hpc3d.ops.rows import EDGE, add_bias, add_rows

if TYPE_CHECKING:
    from hpc3d.arrays.array import Array

# Approximate sizes in bytes of a float32 panel of b and of a float32 block of a.
_PANEL, _BLOCK = 1 << 23, 1 << 21
_TILE = 1 << 22  # minimum number of multiplications per tile of a product
# OpenBLAS's kernels that round the last columns of a float32 product differently, and the multiple
# at which tiles of rows must start, so that all elements are computed identically.
_ROWS_ONLY = {"Haswell": 48, "Zen": 48}


@composite
def product(a: Array, b: Array, out: Array) -> Array:
    """Compute out[m, n] = a[m, k] b[k, n].

    On GPUs, bias[n] and residual[m, n] can be added. Stacks are multiplied separately for each
    expert e: out[m, e, n] = a[m, e, k] b[k, e, n].
    """
    a, b, total = _matrices(a, b, out)
    np.matmul(a, b, out=total)
    return out


@product.threads
def _(a, b, out):
    a, b, total = _matrices(a, b, out)

    def tile(each):
        rows, columns = each
        np.matmul(a[..., rows, :], b[..., columns], out=total[..., rows, columns])

    parallel_for(tile, _tiles(a.shape[-2], b.shape[-1], a.shape[-1]))
    return out


def _tiles(m: int, n: int, k: int) -> list[tuple[slice, slice]]:
    """Split the longer of the dimensions m and n, or m, into one slice per thread."""
    threads, full = max(1, min(thread_count(), m * n * k // _TILE)), slice(None)
    rows_only = _ROWS_ONLY.get(blas_kernels())
    if m >= n or rows_only:
        return [(rows, full) for rows in shares(m, threads, rows_only or EDGE)]
    return [(full, columns) for columns in shares(n, threads, EDGE)]


@product.cuda
def _(gpu, a, b, out, bias=None, residual=None, **gelu):
    if a.ndim == 3:
        gpu.multiply(*_matrices(a, b, out))
    elif gelu:
        gpu.multiply_gelu(a, b, out, bias=bias, **gelu)
    elif bias is None:
        gpu.multiply(a, b, out, add=residual)
    elif not gpu.multiply_with(a, b, out, residual, bias=bias):
        gpu.multiply(a, b, out, add=residual)
        add_bias(out, bias, out)
    return out


@product.narrow
def _(a, b, out):
    """Multiply row blocks of a by column panels of b, to limit the size of float32 copies."""
    a, b, total = _matrices(a, b, out)
    inner = a[..., :1, :].size
    for columns in _pieces(b.shape[-1], inner, _PANEL):
        block = partial(_multiply_rows, a, widened(b[..., columns]), total[..., columns])
        parallel_for(block, _pieces(a.shape[-2], inner, _BLOCK))
    return out


def _multiply_rows(a: Array, panel: Array, out: Array, rows: slice) -> None:
    out[..., rows, :] = widened(a[..., rows, :]) @ panel


def _pieces(count: int, size: int, nbytes: int) -> list[slice]:
    """Split `count` vectors of `size` elements into slices of about `nbytes` in float32."""
    return slices(count, max(16, nbytes // (4 * max(1, size))))


def _matrices(*blocks: Array) -> list[Array]:
    """Return blocks in the layout of `np.matmul`: stacks [m, e, k] as [e, m, k]."""
    return [block.swapaxes(0, 1) if block.ndim == 3 else block for block in blocks]


@primitive
def accumulate(grad: Array, dw: Array) -> None:
    """Add dW to the weight gradient, which is accumulated over microbatches."""

    def block(rows):
        part = grad[rows]
        part += dw[rows]

    parallel_for(block, shares(len(grad)))


accumulate.abstract(lambda grad, dw: None)
accumulate.states(linear="sum")


@accumulate.cuda
def _(gpu, grad, dw):
    gpu.launch("accumulate", 1, grad.size, grad=grad, dw=dw, size=grad.size)


@primitive
def accumulate_product(grad: Array, a: Array, b: Array, sums: Array | None = None) -> None:
    """Add the product a b to `grad`, and the sum of b's rows to `sums` (GPU only)."""
    raise NotImplementedError


@accumulate_product.cuda
def _(gpu, grad, a, b, sums=None):
    """Fuse the sum of b's rows into the GEMM, if cuBLASLt supports this, to read b only once."""
    if sums is None:
        a, b, total = _matrices(a, b, grad)
        gpu.multiply(a, b, total, add=total)
        return
    part = gpu.empty(sums.shape, np.float32)
    if gpu.multiply_with(a, b, grad, grad, bias_grad=part):
        accumulate(sums, part)
    else:
        gpu.multiply(a, b, grad, add=grad)
        add_rows(gpu, sums, b)
