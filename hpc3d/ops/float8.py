"""Float8 rounding, scaled so that the maximum of each tile becomes the largest float8 number.

    float8_e4m3fn    1 sign bit, 4 exponent bits, 3 mantissa bits; up to 448, no infinities
    float8_e5m2      1 sign bit, 5 exponent bits, 2 mantissa bits; up to 57344

The formats are defined by Micikevicius et al. 2022, arXiv:2209.05433. Magnitudes beyond the range
saturate. If a tile has a non-finite element, either all elements of the rounded tile are
non-finite, or this element becomes NaN.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from hpc3d.arrays.primitive import primitive
from hpc3d.ops.product import product
from hpc3d.ops.rows import row_blocks

if TYPE_CHECKING:
    from hpc3d.arrays.array import Array

E4M3, E5M2 = "float8_e4m3fn", "float8_e5m2"
LARGEST = {E4M3: 448.0, E5M2: 57344.0}
_FORM = {E4M3: (3, -6), E5M2: (2, -14)}  # (mantissa bits, minimum exponent of normal numbers)
_EXPONENT = {"float32": 0xFF << 23, "float64": 0x7FF << 52}  # bit mask of the exponent field


class Tiles(NamedTuple):
    """Partition of a block into tiles [height, width].

    The first element of the block is at offset (top, left) in its tile.
    """

    height: int
    width: int
    top: int = 0
    left: int = 0

    def grid(self, rows: int, columns: int) -> tuple[int, int]:
        """Return the number of tile rows and tile columns that a block of this size covers."""
        return -(-(self.top + rows) // self.height), -(-(self.left + columns) // self.width)

    def rows_of(self, rows: slice) -> np.ndarray:
        """Return the tile index of each row in the slice `rows` of the block."""
        return (self.top + np.arange(rows.start, rows.stop)) // self.height

    def columns_of(self, columns: int) -> np.ndarray:
        """Return the tile index of each column of the block."""
        return (self.left + np.arange(columns)) // self.width


def encode(x: np.ndarray, dtype: str) -> np.ndarray:
    """Round x to the nearest float8 numbers, ties to even. Numbers out of range saturate."""
    most = LARGEST[dtype]
    with np.errstate(invalid="ignore"):  # NaN stays NaN
        return np.clip(x, -most, most).astype(dtype)


def nearest(x: np.ndarray, dtype: str) -> np.ndarray:
    """Round x in place to the nearest float8 numbers, with the same results as `encode`.

    Let p be the largest power of two not above |x|. Near x, numbers with d mantissa bits have a
    spacing of p 2^-d. Floats with m mantissa bits have the same spacing around 1.5 p 2^(m - d), so
    adding and subtracting this number rounds x to multiples of the spacing, ties to even.
    """
    (digits, lowest), most = _FORM[dtype], LARGEST[dtype]
    np.clip(x, -most, most, out=x)
    power = (x.view(f"i{x.itemsize}") & _EXPONENT[x.dtype.name]).view(x.dtype)
    np.maximum(power, 2.0**lowest, out=power)
    power *= 1.5 * 2.0 ** (np.finfo(x.dtype).nmant - digits)
    x += power
    x -= power
    return x


def divisors(maxima: np.ndarray, most: float) -> np.ndarray:
    """Return the scale of each tile: its maximum divided by `most`, the largest float8 number.

    Scales of zero are replaced with 1.
    """
    scales = maxima / most
    return np.where(scales == 0, scales.dtype.type(1), scales)


@primitive
def tile_maxima(x: Array, tiles: Tiles, maxima: Array) -> None:
    """Compute maxima[i, e, j] = max |x| over tile (i, j) of expert e of x[m, e, n]."""
    maxima.fill(0)
    if not x.size:
        return
    across = _starts(tiles.columns_of(x.shape[2]))
    for rows in row_blocks(x):
        numbers = tiles.rows_of(rows)
        largest = np.maximum.reduceat(np.abs(x[rows]), across, 2)
        largest = np.maximum.reduceat(largest, _starts(numbers), 0)
        part = maxima[numbers[0] : numbers[-1] + 1]
        np.maximum(part, largest, out=part)


def _starts(numbers: np.ndarray) -> np.ndarray:
    """Return the start index of each run of equal values in an ascending sequence."""
    return np.flatnonzero(np.diff(numbers, prepend=-1))


tile_maxima.narrow(tile_maxima.numpy)
tile_maxima.abstract(lambda x, tiles, maxima: None)


@tile_maxima.cuda
def _(gpu, x, tiles, maxima):
    """Compute the maxima within each row first, then over the rows of each tile."""
    rows, experts, columns = x.shape
    down, _, across = maxima.shape
    partial = maxima if tiles.height == 1 else gpu.empty((rows, experts, across), np.float32)
    given = {"width": tiles.width, "left": tiles.left, "across": across}
    gpu.launch(
        "tile_row_maxima", rows * experts, columns, x=x, maxima=partial, columns=columns, **given
    )
    if partial is not maxima:
        given = {"rows": rows, "columns": experts * across, "height": tiles.height}
        gpu.launch(
            "tile_column_maxima",
            down * experts * across,
            min(rows, tiles.height),
            partial=partial,
            maxima=maxima,
            top=tiles.top,
            **given,
        )


@primitive
def round_tiles(x: Array, maxima: Array, tiles: Tiles, dtype: str, out: Array) -> Array:
    """Round tiles to float8: out = s round(x / s), where s = maxima / LARGEST[dtype]."""
    if not x.size:
        return out
    scales, across = divisors(maxima, LARGEST[dtype]), tiles.columns_of(x.shape[2])
    for rows in row_blocks(x):
        scale = scales[tiles.rows_of(rows)]
        if scale.shape[2] > 1:
            scale = scale.take(across, 2)
        with np.errstate(invalid="ignore"):
            quotients = nearest(np.divide(x[rows], scale), dtype)
            out[rows] = np.multiply(quotients, scale, out=quotients)
    return out


round_tiles.narrow(round_tiles.numpy)
round_tiles.abstract(lambda x, maxima, tiles, dtype, out: out)


@round_tiles.cuda
def _(gpu, x, maxima, tiles, dtype, out):
    rows, experts, columns = x.shape
    digits, lowest = _FORM[dtype]
    gpu.launch(
        "round_tiles",
        rows * experts,
        columns,
        x=x,
        maxima=maxima,
        out=out,
        columns=columns,
        experts=experts,
        across=maxima.shape[2],
        most=LARGEST[dtype],
        digits=digits,
        lowest=lowest,
        **tiles._asdict(),
    )
    return out


class Coded(NamedTuple):
    """Float8 matrix for GPUs that support float8 GEMMs.

    `codes` holds the bits of float8 numbers of type `kind` as uint8, row-major. The represented
    matrix is `scale` (an array with one element) times these numbers, transposed if `turned` is
    True. The result of a GEMM with the matrix has type `dtype`.
    """

    codes: Array
    scale: Array
    kind: str
    dtype: np.dtype
    turned: bool = False

    @property
    def T(self) -> Coded:
        return self._replace(turned=not self.turned)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.codes.shape[::-1] if self.turned else self.codes.shape

    @property
    def size(self) -> int:
        return self.codes.size


@primitive
def encode_tensor(x: Array, largest: Array, kind: str, codes: Array, scale: Array) -> None:
    """Encode the matrix x as codes = round(x / scale).

    `scale`, an array with one element, is set to `largest` (max |x|) divided by the largest number
    of type `kind`.
    """
    scale[...] = divisors(largest.reshape(1), LARGEST[kind])
    with np.errstate(invalid="ignore"):
        codes[...] = encode(x / scale, kind).view(np.uint8)


encode_tensor.abstract(lambda x, largest, kind, codes, scale: None)


@encode_tensor.cuda
def _(gpu, x, largest, kind, codes, scale):
    digits, lowest = _FORM[kind]
    form = {"most": LARGEST[kind], "digits": digits, "lowest": lowest}
    given = {"x": x, "largest": largest, "codes": codes, "scale": scale, "size": x.size}
    gpu.launch("encode_tensor", 1, x.size, **given, **form)


@primitive
def multiply_coded(out: Array, a: Coded, b: Coded) -> Array:
    """Compute the float8 product out[m, n] = a[m, k] b[k, n] (GPU only)."""
    raise NotImplementedError


@multiply_coded.cuda
def _(gpu, out, a, b):
    """Store a as [m, k] and b as [n, k]: tensor cores require k to be contiguous in both."""
    gpu.multiply_coded(_lying(gpu, a, False), _lying(gpu, b, True), out)
    return out


def _lying(gpu: Any, matrix: Coded, turned: bool) -> Coded:
    """Return the matrix with the given value of `turned`; transpose the codes if necessary."""
    if matrix.turned == turned:
        return matrix
    return matrix._replace(codes=gpu.contiguous(matrix.codes.T), turned=turned)


product.register(Coded, lambda a, b, out: multiply_coded(out, a, b))
