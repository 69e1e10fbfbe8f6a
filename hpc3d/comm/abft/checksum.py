"""Checksums of matrix products, of blocks before and after communication, and of reductions.

A product C = A B is checked by the method of Huang and Abraham (IEEE Trans. Comput. C-33, 1984):
for a fixed vector s of random signs, C s = A (B s) up to rounding.  Row i of the difference is at
most

    4 u (sqrt k + sqrt n) |A_i| |B|        u the unit roundoff, |B| the Frobenius norm

because rounding errors behave like independent errors (Higham and Mary, SIAM J. Sci. Comput. 41,
2019): a sum of n such errors grows as sqrt n.  The largest of millions of observed differences, on
small matrices and on difficult ones (all positive, of rank one, canceling), is a third of this
bound.  Computing norms reads A and B a second time, so a difference that is small relative to C s,
or to a row of average norm, is accepted without computing the norm of every row.

A sum over ranks P = sum_q C_q is checked by comparing sum_q r' C_q s with r' P s, where r is
another vector of random signs. The difference is at most

    4 u (sqrt n + sqrt g) (sum_q |C_q s| + |P|)

where |C s| approximates |C|. |C s| is far below |C| only if the rows of C are almost parallel and
orthogonal to s, and then P would also have to cancel for the bound to fall below rounding errors.

Flipping bit b of the mantissa changes an element by 2^-b of its value. The flip is detected if
this change exceeds the bound. The table lists the fraction of detected flips for 4,000 elements of
a product of random matrices in float32 (in float64, the same fractions apply to bits 29 places
lower):

    A            B             sign, exponent    mantissa 1     3     5     7     9    11
    [192, 96]    [96, 48]               1.00           1.00  1.00  0.99  0.96  0.83  0.41
    [3072, 96]   [96, 288]              1.00           1.00  0.99  0.96  0.84  0.41     0
    [96, 3072]   [3072, 288]         >= 0.98           0.97  0.89  0.55  0.02     0     0
"""

from __future__ import annotations

from math import sqrt

import numpy as np

WIDE = 4096  # maximum number of elements per row sum, which is computed in the dtype of the block
_BOUND = 4.0
quiet = np.errstate(over="ignore", invalid="ignore")  # bit flips may cause overflow and NaN
_ROUNDOFF = {char: float(np.finfo(char).eps) / 2 for char in "efd"}
_WORD = np.dtype(np.uint64)


class Signs:
    """Fixed sequence of random signs, provided as vectors of any length and dtype."""

    def __init__(self) -> None:
        self.tables: dict[np.dtype, np.ndarray] = {}

    def __call__(self, count: int, dtype: np.dtype) -> np.ndarray:
        table = self.tables.get(dtype)
        if table is None or table.size < count:
            table = self.tables[dtype] = _drawn(max(2 * count, WIDE)).astype(dtype)
        return table[:count]

    @quiet
    def rows(self, block: np.ndarray, parts: int = 1) -> np.ndarray:
        """Return the signed row sums of `block`, with the shape [parts, rows per part].

        Vectors, and matrices with more than WIDE columns, are split into rows of WIDE elements.
        """
        if block.ndim > 1 and block.shape[-1] <= WIDE:
            return (block @ self(block.shape[-1], block.dtype)).reshape(parts, -1)
        flat = block.reshape(parts, -1)
        whole = flat.shape[1] - flat.shape[1] % WIDE
        body = flat[:, :whole].reshape(parts, -1, WIDE) @ self(WIDE, block.dtype)
        tail = flat[:, whole:] @ self(flat.shape[1] - whole, block.dtype)
        return np.concatenate([body, tail[:, None]], axis=1)

    @quiet
    def total(self, rows: np.ndarray) -> np.ndarray:
        """Return the signed sum of each chunk's row sums, as an array float64[parts]."""
        return rows @ self(rows.shape[1], np.dtype(np.float64))


def _drawn(count: int) -> np.ndarray:
    """Return random signs from the generator splitmix64 (Steele, Lea and Flood, OOPSLA 2014)."""
    z: np.ndarray = np.arange(1, count + 1, dtype=np.uint64) * 0x9E3779B97F4A7C15
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return 1.0 - 2.0 * ((z ^ (z >> 31)) & 1)


def words(block: np.ndarray, parts: int = 1) -> np.ndarray:
    """Return the checksum of each chunk of a contiguous block: its sum of 8-byte words mod 2^64.

    A single flipped bit always changes the checksum.
    """
    size = block.nbytes // parts
    if size % _WORD.itemsize == 0:
        return np.add.reduce(block.reshape(parts, -1).view(_WORD), axis=1)
    padded = np.zeros((parts, -(-size // _WORD.itemsize) * _WORD.itemsize), np.uint8)
    padded[:, :size] = block.reshape(-1).view(np.uint8).reshape(parts, -1)
    return np.add.reduce(padded.view(_WORD), axis=1)


def terms(block: np.ndarray) -> int:
    """Return the number of elements that are added in each row sum of `block`."""
    return min(WIDE, block.shape[-1] if block.ndim > 1 else block.size)


@quiet
def norm(block: np.ndarray) -> float:
    """Return the Frobenius norm of a block, computed without overflow or underflow."""
    flat = (block if block.flags.c_contiguous else block.T).reshape(-1)
    total = float(np.dot(flat, flat))
    if 1e-30 < total < np.inf or not flat.size:
        return sqrt(total)
    top = float(np.abs(flat).max())
    if not 0 < top < np.inf:
        return top
    scaled = flat.astype(np.float64) / top
    return top * sqrt(np.dot(scaled, scaled))


def largest(dtype: np.dtype) -> float:
    """Return the largest norm for which the sums of a block cannot overflow; inf for integers."""
    return float(np.finfo(dtype).max) / 1000 if dtype.char in _ROUNDOFF else np.inf


def slack(dtype: np.dtype, *counts: int) -> float:
    """Return a bound on the rounding error of nested sums, relative to the norm of the terms.

    `counts` lists the number of terms per sum at each level of nesting. For integers, the bound is
    0.
    """
    unit = _ROUNDOFF.get(dtype.char, 0.0)
    return _BOUND * unit * sum(map(sqrt, counts))


def wrong_row(
    a: np.ndarray, b: np.ndarray, sums: np.ndarray, difference: np.ndarray
) -> int | None:
    """Return the index of the first wrong row of C = A B, or None.

    In a wrong row, the difference between C s and A (B s) exceeds the bound on rounding errors.

    `sums` is C s and `difference` is |A (B s) - C s|.  Rows are not checked if A or B is not
    finite, or so large that C may overflow.
    """
    worst, limit = difference.max(), slack(a.dtype, a.shape[1], b.shape[1])
    if worst <= limit * norm(sums) / sqrt(sums.size) < np.inf:
        return None
    if worst <= limit * norm(a) / sqrt(len(a)) * norm(b) < np.inf:
        return None
    wide = np.promote_types(a.dtype, np.float64)
    norms = np.sqrt(np.square(a, dtype=wide).sum(1) * np.square(b, dtype=wide).sum())
    vanished = a.shape[1] * b.size * float(np.finfo(a.dtype).tiny)  # products may underflow
    within = (difference <= limit * norms + vanished) | ~(norms < largest(a.dtype))
    return None if within.all() else int(np.argmin(within))
