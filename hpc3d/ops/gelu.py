"""GELU activation.

The forward pass also computes the derivative for the backward pass, in place.
"""

from __future__ import annotations

from math import pi, sqrt
from typing import TYPE_CHECKING

import numpy as np

from hpc3d.arrays.primitive import composite, primitive
from hpc3d.arrays.worker_threads import parallel_for, shares
from hpc3d.ops.rows import in_float32, row_blocks

if TYPE_CHECKING:
    from hpc3d.arrays.array import Array

_GELU_C = sqrt(2 / pi)
_GELU_A = 0.044715


@primitive
def gelu_tanh(h: Array, out: Array) -> Array:
    """Compute out = h s, where s = (1 + tanh u) / 2 and u = c (h + a h^3).

    This is GPT-2's form of GELU (Hendrycks and Gimpel 2016); c = sqrt(2 / pi) and a = 0.044715. h
    is overwritten with d out / d h = s (1 + (1 - s) 2 h u'), where u' = du / dh and
    h u' = 3 u - 2 c h. The forward pass already computes all terms of the derivative, so the
    backward pass is a single multiplication.
    """

    def block(rows):
        x, s = h[rows], out[rows]
        u = x * x
        u *= _GELU_C * _GELU_A
        u += _GELU_C
        u *= x
        np.tanh(u, out=s)
        s += 1
        s *= 0.5
        u *= 6
        u -= x * (4 * _GELU_C)
        u *= 1 - s
        u += 1
        u *= s
        s *= x
        x[...] = u

    parallel_for(block, row_blocks(h))
    return out


@gelu_tanh.narrow
def _(h, out):
    in_float32(lambda rows, *blocks: gelu_tanh(*blocks), h, out)
    return out


gelu_tanh.abstract(lambda h, out: out)


@gelu_tanh.cuda
def _(gpu, h, out):
    gpu.launch("gelu_tanh", *h.shape, h=h, bias=None, out=out, columns=h.shape[1])
    return out


@primitive
def gelu_exact(h: Array, out: Array) -> Array:
    """Compute out = h Phi(h), where Phi is the standard normal CDF.

    h is overwritten with the derivative Phi(h) + h phi(h), where phi is the density of the same
    distribution.
    """
    from scipy.special import erf

    def block(rows):
        x, s = h[rows], out[rows]
        np.multiply(x, sqrt(0.5), out=s)
        erf(s, out=s)
        s += 1
        s *= 0.5
        slope = x * x
        slope *= -0.5
        np.exp(slope, out=slope)
        slope *= 1 / sqrt(2 * pi)
        slope *= x
        slope += s
        s *= x
        x[...] = slope

    parallel_for(block, row_blocks(h))
    return out


@gelu_exact.narrow
def _(h, out):
    in_float32(lambda rows, *blocks: gelu_exact(*blocks), h, out)
    return out


gelu_exact.abstract(lambda h, out: out)


@gelu_exact.cuda
def _(gpu, h, out):
    gpu.launch("gelu_exact", *h.shape, h=h, bias=None, out=out, columns=h.shape[1])
    return out


GELU = {"tanh": gelu_tanh, "exact": gelu_exact}


@composite
def gelu_grad(slope: Array, dg: Array) -> Array:
    """Compute dh = slope * dg in place. The result overwrites `slope`."""
    return np.multiply(slope, dg, out=slope)


@gelu_grad.threads
def _(slope, dg):
    def block(rows):
        np.multiply(slope[rows], dg[rows], out=slope[rows])

    parallel_for(block, shares(len(slope)))
    return slope


@gelu_grad.cuda
def _(gpu, slope, dg):
    gpu.launch("gelu_grad", 1, slope.size, slope=slope, dg=dg, size=slope.size)
    return slope
