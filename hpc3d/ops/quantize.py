"""8-bit quantization of optimizer moments (one scale per block) and matrices (one per row).

Moments are quantized as in Dettmers et al., arXiv:2110.02861. A block consists of 256 adjacent
columns of a row; the last block of a row may be shorter. The scale of a block is its largest
magnitude, and each element is rounded to the scale times one of 256 levels of dynamic quantization
(section 1.3). A level is a power of ten times a linear fraction; the smaller the power, the fewer
bits remain for the fraction. Matrices have one scale per row, and an element is the scale times
its code:

    codes int8     integers from -127 to 127
    codes uint8    the bits of float8_e4m3fn numbers, whose largest value is 448
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from hpc3d.arrays.narrow import WIDE, wide
from hpc3d.arrays.primitive import primitive
from hpc3d.ops.float8 import E4M3, LARGEST, encode
from hpc3d.ops.rows import row_blocks

if TYPE_CHECKING:
    from hpc3d.arrays.array import Array

BLOCK = 256  # elements per scale
_ELEMENTS_AT_ONCE = 64 * BLOCK  # number of elements that fit in a core's cache
_DECADES = 7
_LARGEST_CODE = {"int8": 127, "uint8": LARGEST[E4M3]}


def in_blocks(shape: Sequence[int]) -> bool:
    """Return True if a parameter of this shape has 8-bit moments.

    Only matrices with at least BLOCK columns have 8-bit moments.
    """
    return len(shape) > 1 and shape[0] > 1 and shape[-1] >= BLOCK


def _levels(signed: bool) -> np.ndarray:
    """Return the 256 quantization levels in ascending order, as float32.

    Second moments are never negative, so their levels use the sign bit for the fraction.
    """
    found = [0.0, 1.0]
    for decade in range(_DECADES):
        edges = np.linspace(0.1, 1, 2 ** (decade + (not signed)) + 1)
        means = (edges[:-1] + edges[1:]) / 2 * 10.0 ** (decade - _DECADES + 1)
        found += [*means, *(-means if signed else ())]
    return np.array(sorted(found), np.float32)


LEVELS = np.stack([_levels(signed=True), _levels(signed=False)])  # first, second moments


def dequantized(codes: np.ndarray, scales: np.ndarray, levels: np.ndarray) -> np.ndarray:
    """Return the values decoded from codes [rows, columns] and scales [rows, blocks]."""
    return levels[codes] * _per_column(scales, codes.shape[1])


def _per_column(scales: np.ndarray, columns: int) -> np.ndarray:
    """Return the scale of each element, or scales that broadcast if a row is one block."""
    return scales if scales.shape[1] == 1 else np.repeat(scales, BLOCK, 1)[:, :columns]


def quantize(x: np.ndarray, levels: np.ndarray, codes: np.ndarray, scales: np.ndarray) -> None:
    """Quantize values [rows, columns] to codes and scales [rows, blocks].

    Ties go to the lower level, except that a positive value never gets the lowest code of
    nonnegative levels: a first moment would then be divided by epsilon.
    """
    columns = x.shape[1]
    scales[...] = np.maximum.reduceat(np.abs(x), range(0, columns, BLOCK), 1)
    divisors = np.where(scales > 0, scales, 1).astype(x.dtype)
    shares = x / _per_column(divisors, columns)
    codes[...] = np.searchsorted((levels[:-1] + levels[1:]) / 2, shares)
    if levels[0] == 0:
        np.maximum(codes, x > 0, out=codes)


@primitive
def adamw_8bit(
    value: Array,
    master: Array | None,
    grad: Array,
    moments: tuple[Array, Array, Array, Array],
    constants: Mapping[str, float],
    factors: Sequence[float],
) -> None:
    """Apply an AdamW update with 8-bit moments to matrices [rows, columns].

    `moments` are the codes of the first and second moments, and the scales of both.
    """
    first, second, *scales = moments
    scale, rate, root, keep = factors
    beta1, beta2 = constants["beta1"], constants["beta2"]
    exact = value if master is None else master
    real = wide(exact.dtype)
    signed, unsigned = LEVELS.astype(real)
    columns = grad.shape[1]
    width = columns if columns % BLOCK else BLOCK  # without short blocks, a block is a row
    w_of, g_of, *codes_of = (each.reshape(-1, width) for each in (exact, grad, first, second))
    scales_of = [each.reshape(-1, -(-width // BLOCK)) for each in scales]
    count = max(1, _ELEMENTS_AT_ONCE // width)
    for start in range(0, len(w_of), count):
        rows = slice(start, start + count)
        w, g = w_of[rows], g_of[rows] * scale
        codes, parts = ([each[rows] for each in arrays] for arrays in (codes_of, scales_of))
        m, v = (
            dequantized(code, each.astype(real), levels)
            for code, each, levels in zip(codes, parts, (signed, unsigned))
        )
        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * g * g
        w *= keep
        w -= rate * (m / (root * np.sqrt(v) + constants["epsilon"]))
        quantize(m, signed, codes[0], parts[0])
        quantize(v, unsigned, codes[1], parts[1])
        if master is not None:
            value.reshape(-1, width)[rows] = w


adamw_8bit.narrow(adamw_8bit.numpy)
adamw_8bit.abstract(lambda value, master, grad, moments, constants, factors: moments)


@adamw_8bit.cuda
def _(gpu, value, master, grad, moments, constants, factors):
    first, second, first_scales, second_scales = moments
    given = {"first": first, "first_scales": first_scales, "second": second}
    given |= {"second_scales": second_scales, "levels": gpu.bring(LEVELS)}
    given |= {"factors": gpu.bring(np.float32(factors)), **constants}
    given["columns"] = grad.shape[1]
    blocks = first_scales.size
    gpu.launch("adamw_8bit", blocks, BLOCK, value=value, master=master, grad=grad, **given)


@primitive
def encode_rows(x: Array, codes: Array, scales: Array) -> None:
    """Set codes[m, n] = round(x[m, n] / scales[m]), scales[m] = max |x[m]| / the largest code.

    If a row has a non-finite element, its scale and all its decoded elements are non-finite.
    """
    for rows in row_blocks(x):
        part = x[rows]
        largest = np.maximum(part.max(1, initial=0), -part.min(1, initial=0))
        scales[rows] = largest / _LARGEST_CODE[codes.dtype.name]
        divisors = np.where(scales[rows] > 0, scales[rows], 1)
        with np.errstate(invalid="ignore"):
            codes[rows] = _rounded(part / divisors[:, None], codes.dtype)


def _rounded(quotients: np.ndarray, dtype: np.dtype) -> np.ndarray:
    return np.rint(quotients) if dtype == np.int8 else encode(quotients, E4M3).view(dtype)


encode_rows.narrow(encode_rows.numpy)
encode_rows.abstract(lambda x, codes, scales: None)


@encode_rows.cuda
def _(gpu, x, codes, scales):
    given = {"x": x, "codes": codes, "scales": scales, "columns": x.shape[1]}
    if codes.dtype == np.int8:
        gpu.launch("encode_rows", *x.shape, **given)
    else:
        gpu.launch("encode_float8_rows", *x.shape, **given)


@primitive
def decode_rows(codes: Array, scales: Array, out: Array) -> Array:
    """Compute out[m, n] = codes[m, n] scales[m]."""
    for rows in row_blocks(out):
        part = codes[rows] if codes.dtype == np.int8 else codes[rows].view(E4M3).astype(WIDE)
        with np.errstate(invalid="ignore"):
            np.multiply(part, scales[rows, None], out=out[rows], dtype=wide(out.dtype))
    return out


decode_rows.abstract(lambda codes, scales, out: out)


@decode_rows.cuda
def _(gpu, codes, scales, out):
    given = {"codes": codes, "scales": scales, "out": out, "columns": out.shape[1]}
    if codes.dtype == np.int8:
        gpu.launch("decode_rows", *out.shape, **given)
    else:
        gpu.launch("decode_float8_rows", *out.shape, **given)
    return out
