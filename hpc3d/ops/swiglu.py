"""SwiGLU and GeGLU (Shazeer 2020, arXiv:2002.05202), with derivatives saved for backward.

The columns of H [rows, 2 width] are pairs (gate, up), one per feature, so that a shard of the
columns contains both factors of each product silu(gate) up or gelu(gate) up.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from hpc3d.arrays.primitive import primitive
from hpc3d.arrays.worker_threads import parallel_for
from hpc3d.ops.gelu import gelu_tanh
from hpc3d.ops.rows import in_float32, row_blocks

if TYPE_CHECKING:
    from hpc3d.arrays.array import Array


@primitive
def swiglu(h: Array, out: Array) -> Array:
    """Compute out = silu(a) b for the pairs (a, b) in `h`; silu(a) = a s, s = 1 / (1 + exp(-a)).

    `h` is overwritten with d out / da = b s (1 + a (1 - s)) and d out / db = silu(a).
    """
    pairs = h.reshape(*out.shape, 2)

    def block(rows):
        a, b, y = pairs[rows, :, 0], pairs[rows, :, 1], out[rows]
        s = np.tanh(a * 0.5)
        s += 1
        s *= 0.5
        silu = a * s
        np.multiply(silu, b, out=y)
        b *= s * (1 + (a - silu))
        a[...] = b
        b[...] = silu

    parallel_for(block, row_blocks(out))
    return out


@swiglu.narrow
def _(h, out):
    in_float32(lambda rows, *blocks: swiglu(*blocks), h, out)
    return out


swiglu.abstract(lambda h, out: out)


@swiglu.cuda
def _(gpu, h, out):
    gpu.launch("swiglu", *out.shape, h=h, out=out, width=out.shape[1])
    return out


@primitive
def geglu(h: Array, out: Array) -> Array:
    """Compute out = gelu(a) b for the pairs (a, b) in `h`, with the tanh approximation of GELU.

    `h` is overwritten with d out / da = b gelu'(a) and d out / db = gelu(a).
    """
    pairs = h.reshape(*out.shape, 2)

    def block(rows):
        a, b, y = pairs[rows, :, 0], pairs[rows, :, 1], out[rows]
        slope, gate = np.ascontiguousarray(a), np.empty_like(y)
        gelu_tanh(slope, gate)
        np.multiply(gate, b, out=y)
        np.multiply(slope, b, out=a)
        b[...] = gate

    parallel_for(block, row_blocks(out))
    return out


@geglu.narrow
def _(h, out):
    in_float32(lambda rows, *blocks: geglu(*blocks), h, out)
    return out


geglu.abstract(lambda h, out: out)


@geglu.cuda
def _(gpu, h, out):
    gpu.launch("geglu", *out.shape, h=h, out=out, width=out.shape[1])
    return out


@primitive
def swiglu_grad(slopes: Array, dg: Array) -> Array:
    """Compute dh = slopes * dg in place. The result overwrites `slopes`."""
    pairs = slopes.reshape(*dg.shape, 2)

    def block(rows):
        pairs[rows] *= dg[rows, :, None]

    parallel_for(block, row_blocks(dg))
    return slopes


swiglu_grad.narrow(swiglu_grad.numpy)
swiglu_grad.abstract(lambda slopes, dg: slopes)


@swiglu_grad.cuda
def _(gpu, slopes, dg):
    gpu.launch("swiglu_grad", *dg.shape, slopes=slopes, dg=dg, width=dg.shape[1])
    return slopes
