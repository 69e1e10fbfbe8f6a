"""Sums that must agree: of a product, of a block before and after it moved, of a sum over ranks.

A product C = A B is checked as Huang and Abraham do (IEEE Trans. Comput. C-33, 1984): for a fixed
vector s of random signs, C s = A (B s) up to rounding.  Row i of the difference is at most

    4 u (sqrt k + sqrt n) |A_i| |B|        u the unit roundoff, |B| the Frobenius norm

for roundings behave like independent errors (Higham and Mary, SIAM J. Sci. Comput. 41, 2019): n of
them amount to sqrt n.  The largest of millions of differences seen, on small matrices and on such
as are made to be hard (all positive, of rank one, cancelling), is a third of that.  Norms cost a
second look at A and B, so a difference that is small against C s itself, or for a row of average
size, is let through without them all.

A sum over ranks P = sum_q C_q is checked by numbers r' C_q s and r' P s.  They differ by at most

    4 u (sqrt n + sqrt g) (sum_q |C_q s| + |P|)

where |C s| stands for |C|: it is far below only where the rows of C are almost parallel and lie
across s, and then P would have to cancel as well for the bound to fall below what rounding does.

A flip of bit b of the mantissa changes an element by 2^-b of itself, so it is found where that
exceeds the bound.  The share of flips that are found, of 4,000 elements of a product of random
matrices in float32 (in float64 the same 29 bits further down):

    A            B             sign, exponent    mantissa 1     3     5     7     9    11
    [192, 96]    [96, 48]               1.00           1.00  1.00  0.99  0.96  0.83  0.41
    [3072, 96]   [96, 288]              1.00           1.00  0.99  0.96  0.84  0.41     0
    [96, 3072]   [3072, 288]         >= 0.98           0.97  0.89  0.55  0.02     0     0
"""

from __future__ import annotations

from math import sqrt

import numpy as np

WIDE = 4096  # the longest row that is summed in the type of its block
_BOUND = 4.0
quiet = np.errstate(over="ignore", invalid="ignore")  # numbers that a flip made are of any size
_ROUNDOFF = {char: float(np.finfo(char).eps) / 2 for char in "efd"}
_WORD = np.dtype(np.uint64)


class Signs:
    """A fixed sequence of random signs, as vectors of any length and type."""

    def __init__(self) -> None:
        self.tables: dict[np.dtype, np.ndarray] = {}

    def __call__(self, count: int, dtype: np.dtype) -> np.ndarray:
        table = self.tables.get(dtype)
        if table is None or table.size < count:
            table = self.tables[dtype] = _drawn(max(2 * count, WIDE)).astype(dtype)
        return table[:count]

    @quiet
    def rows(self, block: np.ndarray, parts: int = 1) -> np.ndarray:
        """The rows of `block` summed with signs, [parts, rows of a part].

        A row is one of a matrix or of a stack of them, or WIDE elements of a part.
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
        """Those sums summed with signs, in float64: one number a part."""
        return rows @ self(rows.shape[1], np.dtype(np.float64))


def _drawn(count: int) -> np.ndarray:
    """Signs out of the generator splitmix64 (Steele, Lea and Flood, OOPSLA 2014)."""
    z: np.ndarray = np.arange(1, count + 1, dtype=np.uint64) * 0x9E3779B97F4A7C15
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return 1.0 - 2.0 * ((z ^ (z >> 31)) & 1)


def words(block: np.ndarray, parts: int = 1) -> np.ndarray:
    """The sum modulo 2^64 of the 8-byte words of each part of a contiguous block: one flipped bit
    always changes it."""
    size = block.nbytes // parts
    if size % _WORD.itemsize == 0:
        return np.add.reduce(block.reshape(parts, -1).view(_WORD), axis=1)
    padded = np.zeros((parts, -(-size // _WORD.itemsize) * _WORD.itemsize), np.uint8)
    padded[:, :size] = block.reshape(-1).view(np.uint8).reshape(parts, -1)
    return np.add.reduce(padded.view(_WORD), axis=1)


def terms(block: np.ndarray) -> int:
    """How many elements are summed in the type of the block."""
    return min(WIDE, block.shape[-1] if block.ndim > 1 else block.size)


@quiet
def norm(block: np.ndarray) -> float:
    """The Frobenius norm, of numbers of any size."""
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
    """The norm of blocks whose sum may overflow; none of integers, and they are exact."""
    return float(np.finfo(dtype).max) / 1000 if dtype.char in _ROUNDOFF else np.inf


def slack(dtype: np.dtype, *counts: int) -> float:
    """The rounding of a chain of sums of so many terms, relative to a norm; none of integers."""
    unit = _ROUNDOFF.get(dtype.char, 0.0)
    return _BOUND * unit * sum(map(sqrt, counts))


def wrong_row(
    a: np.ndarray, b: np.ndarray, sums: np.ndarray, difference: np.ndarray
) -> int | None:
    """The row of C = A B in which C s and A (B s) differ by more than rounding, and by how much of
    it; None where all are right.

    `sums` are C s and `difference` is |A (B s) - C s|.  Where A or B is not finite, or so large
    that C need not be, nothing is said.
    """
    worst, limit = difference.max(), slack(a.dtype, a.shape[1], b.shape[1])
    if worst <= limit * norm(sums) / sqrt(sums.size) < np.inf:
        return None
    if worst <= limit * norm(a) / sqrt(len(a)) * norm(b) < np.inf:
        return None
    wide = np.promote_types(a.dtype, np.float64)
    norms = np.sqrt(np.square(a, dtype=wide).sum(1) * np.square(b, dtype=wide).sum())
    vanished = a.shape[1] * b.size * float(np.finfo(a.dtype).tiny)  # products that underflow
    within = (difference <= limit * norms + vanished) | ~(norms < largest(a.dtype))
    return None if within.all() else int(np.argmin(within))
