"""Rows of a matrix in 8 bits: integers from -127 to 127 times a scale of the row."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from hpc3d.arrays.narrow import wide
from hpc3d.arrays.primitive import primitive
from hpc3d.ops.rows import row_blocks

if TYPE_CHECKING:
    from hpc3d.arrays.array import Array

_MOST = 127


@primitive
def encode_rows(x: Array, codes: Array, scales: Array) -> None:
    """codes[m, n] = round(x[m, n] / scales[m]), scales[m] = max |x[m]| / 127.

    The scale of a row that is not finite is not finite, and so are its rows decoded.
    """
    for rows in row_blocks(x):
        part = x[rows]
        scales[rows] = np.maximum(part.max(1, initial=0), -part.min(1, initial=0)) / _MOST
        divisors = np.where(scales[rows] > 0, scales[rows], 1)
        with np.errstate(invalid="ignore"):
            codes[rows] = np.rint(part / divisors[:, None])


encode_rows.narrow(encode_rows.numpy)


@encode_rows.abstract
def _(x, codes, scales):
    return None


@encode_rows.cuda
def _(gpu, x, codes, scales):
    gpu.launch("encode_rows", *x.shape, x=x, codes=codes, scales=scales, columns=x.shape[1])


@primitive
def decode_rows(codes: Array, scales: Array, out: Array) -> Array:
    """codes[m, n] scales[m]."""
    with np.errstate(invalid="ignore"):
        return np.multiply(codes, scales[:, None], out=out, dtype=wide(out.dtype))


@decode_rows.abstract
def _(codes, scales, out):
    return out


@decode_rows.cuda
def _(gpu, codes, scales, out):
    gpu.launch(
        "decode_rows", *out.shape, codes=codes, scales=scales, out=out, columns=out.shape[1]
    )
    return out
