"""Float8: rounding by tiles, each with the scale that takes its largest magnitude to the largest
number of the type.

    float8_e4m3fn    1 sign, 4 bits of exponent, 3 of mantissa; up to 448, no infinities
    float8_e5m2      1 sign, 5 bits of exponent, 2 of mantissa; up to 57344

Micikevicius et al. 2022, arXiv:2209.05433.  What is larger saturates; a tile with something in it
that is not finite is not finite as a whole, or has NaN where that was.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from hpc3d.arrays.primitive import primitive
from hpc3d.ops.rows import row_blocks

if TYPE_CHECKING:
    from hpc3d.arrays.array import Array

E4M3, E5M2 = "float8_e4m3fn", "float8_e5m2"
LARGEST = {E4M3: 448.0, E5M2: 57344.0}
_FORM = {E4M3: (3, -6), E5M2: (2, -14)}  # bits of mantissa, least exponent of normal numbers
_EXPONENT = {"float32": 0xFF << 23, "float64": 0x7FF << 52}  # where its bits are


class Tiles(NamedTuple):
    """Tiles [height, width] of a block whose first element is element (top, left) of one."""

    height: int
    width: int
    top: int = 0
    left: int = 0

    def grid(self, rows: int, columns: int) -> tuple[int, int]:
        """How many tiles down and across such a block lies in."""
        return -(-(self.top + rows) // self.height), -(-(self.left + columns) // self.width)

    def rows_of(self, rows: slice) -> np.ndarray:
        """The number of the tile of each of these rows of the block."""
        return (self.top + np.arange(rows.start, rows.stop)) // self.height

    def columns_of(self, columns: int) -> np.ndarray:
        """The number of the tile of each of its columns."""
        return (self.left + np.arange(columns)) // self.width


def encode(x: np.ndarray, dtype: str) -> np.ndarray:
    """The nearest numbers of a float8, ties to even; beyond its largest that one."""
    most = LARGEST[dtype]
    with np.errstate(invalid="ignore"):  # NaN stays NaN
        return np.clip(x, -most, most).astype(dtype)


def nearest(x: np.ndarray, dtype: str) -> np.ndarray:
    """x, which is overwritten, as the numbers that `encode` has.

    With p the power of two below |x|, numbers of d bits of mantissa have steps of p 2^-d.  Of
    1.5 p 2^(m - d) and its neighbours a float of m bits has no others: adding that and taking it
    away rounds to a step, ties to even.
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
    """The scales maxima / most; 1 instead of 0."""
    scales = maxima / most
    return np.where(scales == 0, scales.dtype.type(1), scales)


@primitive
def tile_maxima(x: Array, tiles: Tiles, maxima: Array) -> None:
    """maxima[i, e, j] = max |x| over tile (i, j) of expert e of x[m, e, n]."""
    maxima.fill(0)
    if not x.size:
        return
    across = _starts(tiles.columns_of(x.shape[2]))
    for rows in _row_blocks(x):
        numbers = tiles.rows_of(rows)
        largest = np.maximum.reduceat(np.abs(x[rows]), across, 2)
        largest = np.maximum.reduceat(largest, _starts(numbers), 0)
        part = maxima[numbers[0] : numbers[-1] + 1]
        np.maximum(part, largest, out=part)


def _row_blocks(x: Array) -> list[slice]:
    """Slices of the rows of x that fit the cache and end where x does."""
    return [slice(rows.start, min(rows.stop, len(x))) for rows in row_blocks(x)]


def _starts(numbers: np.ndarray) -> np.ndarray:
    """Where in a rising sequence another number begins."""
    return np.flatnonzero(np.diff(numbers, prepend=-1))


tile_maxima.narrow(tile_maxima.numpy)


@tile_maxima.abstract
def _(x, tiles, maxima):
    return None


@tile_maxima.cuda
def _(gpu, x, tiles, maxima):
    """Of rows first, then over the rows of a tile."""
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
    """out = s round(x / s), s = maxima / the largest number of a float8 `dtype`, tile by tile."""
    if not x.size:
        return out
    scales, across = divisors(maxima, LARGEST[dtype]), tiles.columns_of(x.shape[2])
    for rows in _row_blocks(x):
        scale = scales[tiles.rows_of(rows)]
        if scale.shape[2] > 1:
            scale = scale.take(across, 2)
        with np.errstate(invalid="ignore"):
            quotients = nearest(np.divide(x[rows], scale), dtype)
            out[rows] = np.multiply(quotients, scale, out=quotients)
    return out


round_tiles.narrow(round_tiles.numpy)


@round_tiles.abstract
def _(x, maxima, tiles, dtype, out):
    return out


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
