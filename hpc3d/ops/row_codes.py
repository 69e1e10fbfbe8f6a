"""Rows of a matrix in 8 bits: numbers of 8 bits times a scale of the row.

codes int8     integers from -127 to 127
codes uint8    the bits of float8_e4m3fn, which reaches to 448
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from hpc3d.arrays.narrow import WIDE, wide
from hpc3d.arrays.primitive import primitive
from hpc3d.ops.float8 import E4M3, LARGEST, encode
from hpc3d.ops.rows import row_blocks

if TYPE_CHECKING:
    from hpc3d.arrays.array import Array

_MOST = {"int8": 127, "uint8": LARGEST[E4M3]}


@primitive
def encode_rows(x: Array, codes: Array, scales: Array) -> None:
    """codes[m, n] = round(x[m, n] / scales[m]), scales[m] = max |x[m]| / the largest code.

    The scale of a row that is not finite is not finite, and so are its rows decoded.
    """
    for rows in row_blocks(x):
        part = x[rows]
        largest = np.maximum(part.max(1, initial=0), -part.min(1, initial=0))
        scales[rows] = largest / _MOST[codes.dtype.name]
        divisors = np.where(scales[rows] > 0, scales[rows], 1)
        with np.errstate(invalid="ignore"):
            codes[rows] = _rounded(part / divisors[:, None], codes.dtype)


def _rounded(quotients: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """The codes of numbers."""
    return np.rint(quotients) if dtype == np.int8 else encode(quotients, E4M3).view(dtype)


encode_rows.narrow(encode_rows.numpy)


@encode_rows.abstract
def _(x, codes, scales):
    return None


@encode_rows.cuda
def _(gpu, x, codes, scales):
    gpu.launch(
        _kernel("encode", codes), *x.shape, x=x, codes=codes, scales=scales, columns=x.shape[1]
    )


@primitive
def decode_rows(codes: Array, scales: Array, out: Array) -> Array:
    """codes[m, n] scales[m]."""
    for rows in row_blocks(out):
        part = codes[rows] if codes.dtype == np.int8 else codes[rows].view(E4M3).astype(WIDE)
        with np.errstate(invalid="ignore"):
            np.multiply(part, scales[rows, None], out=out[rows], dtype=wide(out.dtype))
    return out


@decode_rows.abstract
def _(codes, scales, out):
    return out


@decode_rows.cuda
def _(gpu, codes, scales, out):
    gpu.launch(
        _kernel("decode", codes),
        *out.shape,
        codes=codes,
        scales=scales,
        out=out,
        columns=out.shape[1],
    )
    return out


def _kernel(what: str, codes: Array) -> str:
    return f"{what}_rows" if codes.dtype == np.int8 else f"{what}_float8_rows"
