"""Rectangles of a tensor: the parts of it that ranks hold and files have."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Sequence
from itertools import pairwise
from math import prod
from typing import NamedTuple


class BlockSlices(NamedTuple):
    """Rows and columns of a tensor; a vector is one row."""

    top: int
    bottom: int
    left: int
    right: int

    @property
    def size(self) -> int:
        return max(0, self.bottom - self.top) * max(0, self.right - self.left)

    def intersection(self, other: BlockSlices) -> BlockSlices:
        """The part that both have."""
        return BlockSlices(
            max(self.top, other.top),
            min(self.bottom, other.bottom),
            max(self.left, other.left),
            min(self.right, other.right),
        )

    def index_in(self, outer: BlockSlices) -> tuple[slice, slice]:
        """The index of this part in an array that has the rectangle `outer`."""
        rows = slice(self.top - outer.top, self.bottom - outer.top)
        return rows, slice(self.left - outer.left, self.right - outer.left)


def stored_shape(dims: Sequence[int]) -> tuple[int, ...]:
    """How a tensor of any number of dimensions lies in files: as a vector, or as a matrix [first
    dimension, all others]."""
    return (prod(dims),) if len(dims) < 2 else (dims[0], prod(dims[1:]))


def whole_of(shape: Sequence[int]) -> BlockSlices:
    """The rectangle of all of a tensor."""
    *rows, columns = shape
    return BlockSlices(0, *(rows or [1]), 0, columns)


def rectangles(block: BlockSlices, start: int, stop: int) -> list[BlockSlices]:
    """Elements `start` to `stop` of a block, counted row by row, as at most three rectangles:
    the end of a row, whole rows, the beginning of a row."""
    width = block.right - block.left
    stop = min(stop, block.size)
    if not width or start >= stop:
        return []
    first, last = -(-start // width), stop // width
    if first > last:  # within one row
        edges = [(start, stop)]
    else:
        ends = [start, first * width, last * width, stop]
        edges = [pair for pair in pairwise(ends) if pair[0] < pair[1]]
    return [_rectangle(block, width, *edge) for edge in edges]


def _rectangle(block, width, start, stop):
    top, left = divmod(start, width)
    rows = max(1, (stop - start) // width)
    right = width if left + stop - start >= width else left + stop - start
    return BlockSlices(
        block.top + top, block.top + top + rows, block.left + left, block.left + right
    )


def coverage_error(parts: Sequence[BlockSlices], whole: BlockSlices) -> str | None:
    """Why rectangles are not the parts of a whole, each element once; None if they are."""
    if any(part.intersection(whole) != part for part in parts):
        return f"a part lies outside of {whole.bottom} x {whole.right}"
    if twice := overlap(parts):
        return f"rows {twice.top} to {twice.bottom} lie in two files"
    missing = whole.size - sum(part.size for part in parts)
    return f"{missing} of {whole.size} elements are nowhere" if missing else None


def overlap(parts: Sequence[BlockSlices]) -> BlockSlices | None:
    """What two of the rectangles share; None if they are disjoint.

    A line sweeps down the rows; `across` are the rectangles that it crosses, from left to right.
    """
    starts = [(part.top, True, part) for part in parts]
    ends = [(part.bottom, False, part) for part in parts]
    across = []
    for _, begins, part in sorted(starts + ends):
        place = bisect(across, part.left, key=lambda other: other.left)
        if not begins:
            across.remove(part)
            continue
        for other in across[max(0, place - 1) : place + 1]:
            if other.right > part.left and other.left < part.right:
                return other.intersection(part)
        across.insert(place, part)
    return None
