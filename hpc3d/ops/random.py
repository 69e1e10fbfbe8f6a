"""Random numbers that depend only on (seed, name, global index), and hence not on the mesh.

Element e of a tensor is computed from 64-bit random number e of the counter-based generator
Philox4x64-10 (Salmon et al., SC'11), whose key is a digest of the seed and the name. In dropout
masks, each element uses 16 bits, so one random number determines four elements.
"""

from __future__ import annotations

from collections.abc import Callable
from hashlib import blake2b
from itertools import pairwise
from threading import local
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from hpc3d.arrays.primitive import primitive

if TYPE_CHECKING:
    from numpy.typing import DTypeLike

    from hpc3d.arrays.array import Array

_DRAWS = 4  # number of 64-bit numbers generated per value of Philox's counter
# If the range of complete rows that contains a block has at most this many elements, it is
# generated in one call, and the block is selected from the result, which is faster than one call
# per row.
_SHORT = 1 << 14


def philox_key(name: object) -> np.ndarray:
    """Return the Philox key, two 64-bit words, for the random stream with this name."""
    return np.frombuffer(blake2b(repr(name).encode(), digest_size=16).digest(), np.uint64)


class _Generator(local):
    """Thread-local Philox generator, repositioned for every use.

    Creating a generator takes ten times as long as repositioning one, because the constructor
    requests a seed from the operating system.
    """

    def __init__(self) -> None:
        self.philox = np.random.Philox(0)
        self.nothing_drawn = self.philox.state


_generator = _Generator()


def philox_draws(key: np.ndarray, first: int, count: int) -> np.ndarray:
    """Return `count` 64-bit random numbers of a stream, starting at index `first`."""
    skipped = first % _DRAWS
    counter = np.array([first // _DRAWS, 0, 0, 0], np.uint64)
    stream = _generator.philox
    stream.state = {**_generator.nothing_drawn, "state": {"counter": counter, "key": key}}
    return stream.random_raw(skipped + count)[skipped:]


def below_one(draws: np.ndarray) -> np.ndarray:
    """Convert 64-bit random numbers to floating-point numbers in [0, 1)."""
    return (draws >> np.uint64(11)) * 2.0**-53


# Rows of a block: a contiguous range, or the index of each row.
_Rows = slice | range | np.ndarray


def _by_rows(
    rows: _Rows, columns: slice | range, width: int, make: Callable[[int, int], np.ndarray]
) -> np.ndarray:
    """Generate a 2-D block from `make(first, count)`, with one call per run of indices.

    `rows` and `columns` are the block's indices in a matrix with `width` columns.
    """
    count = columns.stop - columns.start
    if isinstance(rows, np.ndarray) and rows.size:
        first, stop = int(rows.min()), int(rows.max()) + 1
        if (stop - first) * width <= _SHORT:
            whole = _by_rows(range(first, stop), range(width), width, make)
            return whole[rows - first, columns.start : columns.stop]
    parts = []
    for first, number in _runs(rows):
        if count == width or number * width <= _SHORT:  # generate complete rows
            whole = make(first * width, number * width).reshape(number, width)
            parts.append(whole[:, columns.start : columns.stop])
        else:
            starts = range(first * width + columns.start, (first + number) * width, width)
            parts += [make(start, count)[None] for start in starts]
    return np.concatenate(parts or [make(0, 0).reshape(0, count)])


def _runs(rows: _Rows) -> list[tuple[int, int]]:
    """Return (first, count) of each run of consecutive rows."""
    if not isinstance(rows, np.ndarray):
        return [(rows.start, rows.stop - rows.start)] if rows.stop > rows.start else []
    ends = [0, *(np.flatnonzero(np.diff(rows) != 1) + 1).tolist(), len(rows)]
    return [(int(rows[a]), b - a) for a, b in pairwise(ends) if b > a]


def normal(key: np.ndarray, rows: _Rows, columns: slice | range, width: int) -> np.ndarray:
    """Return a block of independent standard normal float64 numbers (Box-Muller transform)."""

    def make(first, count):
        bits = philox_draws(key, first, count)
        radius = ((bits >> np.uint64(32)) + 1.0) * 2.0**-32
        angle = (bits & np.uint64(0xFFFFFFFF)) * (2 * np.pi * 2.0**-32)
        return np.sqrt(-2 * np.log(radius)) * np.cos(angle)

    return _by_rows(rows, columns, width, make)


def keep_mask(
    key: np.ndarray, rate: float, rows: _Rows, columns: slice | range, width: int
) -> np.ndarray:
    """Return a block of booleans, each False with probability `rate` (a multiple of 2^-16)."""
    limit = np.uint16(min(round(rate * 2**16), 2**16 - 1))

    def make(first, count):
        head = first % 4
        bits = philox_draws(key, first // 4, -(-(head + count) // 4))
        return bits.view(np.uint16)[head : head + count] >= limit

    return _by_rows(rows, columns, width, make)


class Mask(NamedTuple):
    """Dropout mask of a block of a matrix with `width` columns.

    The factor of each element is 0 or 1 / (1 - rate). Factors are generated on demand, so the full
    mask is never stored. `rows` and `columns` are the indices of the block in the matrix, and
    `key` is the Philox key of the mask's random stream. Non-contiguous `rows` are an index array,
    stored in device memory if the block is on a device.
    """

    key: np.ndarray
    rate: float
    rows: range | np.ndarray
    columns: range
    width: int

    def factors(self, rows: slice, columns: slice, dtype: DTypeLike) -> np.ndarray:
        """Return the dropout factors for the given row and column slices of the block."""
        kept = keep_mask(self.key, self.rate, self.rows[rows], self.columns[columns], self.width)
        return kept * np.dtype(dtype).type(1 / (1 - self.rate))


def cuda_mask(mask: Mask | None, key: str) -> dict[str, Any]:
    """Return the dropout arguments of a kernel, with the stream's key under the name `key`.

    If there is no mask, the key is `None` and the other arguments are 0.
    """
    if mask is None:
        names = "first_row", "first_column", "width", "limit", "factor"
        return {key: None, **dict.fromkeys(names, 0)}
    return {
        key: mask.key,
        "first_row": mask.rows.start if isinstance(mask.rows, range) else 0,
        "first_column": mask.columns.start,
        "width": mask.width,
        "limit": min(round(mask.rate * 2**16), 2**16 - 1),
        "factor": 1 / (1 - mask.rate),
    }


@primitive
def initialise(value: Array, item: Any, seed: int, block: tuple[slice, slice]) -> None:
    """Set `value` to a block of a parameter's initial tensor.

    `block` contains the row slice and the column slice of the block in the tensor.
    """
    value.fill(item.mean)
    if item.std:
        rows, columns = block
        drawn = slice(rows.start, max(rows.start, min(rows.stop, item.rows or rows.stop)))
        numbers = normal(philox_key((seed, item.name)), drawn, columns, item.shape[1])
        value[: drawn.stop - drawn.start] = numbers * item.std
        value[drawn.stop - drawn.start :] = 0


initialise.narrow(initialise.numpy)
initialise.abstract(lambda value, item, seed, block: None)


@initialise.cuda
def _(gpu, value, item, seed, block):
    value.fill(item.mean)
    if not item.std:
        return
    rows, columns = block
    count = max(0, min(rows.stop, item.rows or rows.stop) - rows.start)
    value[count:] = 0
    corner = {"first_row": rows.start, "first_column": columns.start, "width": item.shape[1]}
    given = {"columns": value.shape[1], "std": item.std, **corner}
    key = gpu.bring(philox_key((seed, item.name)))
    gpu.launch("initialise", count, value.shape[1], value=value[:count], key=key, **given)
