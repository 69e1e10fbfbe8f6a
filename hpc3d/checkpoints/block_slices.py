"""Rectangular slices (boxes) of tensors, as owned by ranks and stored in checkpoint files."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Iterator, Sequence
from math import prod
from typing import NamedTuple


class BlockSlices(NamedTuple):
    """Box: a slice of a tensor of shape [rows, experts, columns].

    The box contains the rows from `top` to `bottom`, the columns from `left` to `right` and the
    experts from `front` to `back` (the upper limits are exclusive). A matrix is treated as a
    tensor with one expert, and a vector as a matrix with one row.
    """

    top: int
    bottom: int
    left: int
    right: int
    front: int = 0
    back: int = 1

    @property
    def shape(self) -> tuple[int, int, int]:
        """Shape [rows, experts, columns] of the box."""
        rows, experts = self.bottom - self.top, self.back - self.front
        return max(0, rows), max(0, experts), max(0, self.right - self.left)

    @property
    def size(self) -> int:
        return prod(self.shape)

    @property
    def edges(self) -> tuple[int, ...]:
        """Edges of the box in the manifest format: four for a matrix, six for stacked experts."""
        return self if self[4:] != (0, 1) else self[:4]

    def intersection(self, other: BlockSlices) -> BlockSlices:
        """Return the intersection of this box and another box."""
        return BlockSlices(
            max(self.top, other.top),
            min(self.bottom, other.bottom),
            max(self.left, other.left),
            min(self.right, other.right),
            max(self.front, other.front),
            min(self.back, other.back),
        )

    def index_in(self, outer: BlockSlices) -> tuple[slice, slice, slice]:
        """Return the slices that extract this box from an array that holds the box `outer`.

        The array has the shape [rows, experts, columns] of `outer`.
        """
        rows = slice(self.top - outer.top, self.bottom - outer.top)
        experts = slice(self.front - outer.front, self.back - outer.front)
        return rows, experts, slice(self.left - outer.left, self.right - outer.left)

    def rectangles(self, columns: int) -> Iterator[BlockSlices]:
        """Yield the rectangles that this box covers in a matrix with columns grouped by expert.

        The matrix has the shape [rows, experts x columns], with `columns` columns per expert. A
        box with all columns covers one rectangle; any other box covers one rectangle per expert.
        """
        whole = self.right - self.left == columns
        step = self.back - self.front if whole else 1
        for first in range(self.front, self.back, step):
            left, right = first * columns + self.left, (first + step - 1) * columns + self.right
            yield BlockSlices(self.top, self.bottom, left, right)


def stored_shape(dims: Sequence[int]) -> tuple[int, ...]:
    """Return a tensor's shape in checkpoint files: all dimensions after the first are merged."""
    return (prod(dims),) if len(dims) < 2 else (dims[0], prod(dims[1:]))


def whole_of(shape: Sequence[int]) -> BlockSlices:
    """Return the box of a full tensor [columns], [rows, columns] or [rows, experts, columns]."""
    return box_of([slice(0, size) for size in shape])


def box_of(slices: Sequence[slice]) -> BlockSlices:
    """Convert slices along the dimensions of a tensor to a box.

    The tensor has the shape [columns], [rows, columns] or [rows, experts, columns].
    """
    *others, columns = slices
    rows = others[0] if others else slice(0, 1)
    experts = others[1] if len(others) > 1 else slice(0, 1)
    return BlockSlices(
        rows.start, rows.stop, columns.start, columns.stop, experts.start, experts.stop
    )


def boxes(block: BlockSlices, start: int, stop: int) -> list[BlockSlices]:
    """Return the boxes that cover elements `start` to `stop` of a block in row-major order.

    A range of elements covers at most three boxes: the end of the first row, all complete rows,
    and the beginning of the last row. If there are several experts, each incomplete row is split
    further at expert boundaries.
    """
    _, experts, columns = block.shape
    stop = min(stop, block.size)
    widths = [experts * columns, columns] if experts > 1 else [columns]
    return [_box(block, *edge) for edge in _stretches(start, stop, widths)]


def _stretches(start: int, stop: int, widths: Sequence[int]) -> list[tuple[int, int]]:
    """Split the range from `start` to `stop` into pieces, each of which fills one box.

    `widths`, in decreasing order, are the sizes of a row and of an expert's part of a row. The
    longest subrange that consists of complete rows is one piece. The remainders at both ends are
    split recursively, using the remaining widths.
    """
    if start >= stop:
        return []
    if not widths:
        return [(start, stop)]
    width, *finer = widths
    first, last = -(-start // width) * width, stop // width * width
    if first > last:
        return _stretches(start, stop, finer)
    middle = [(first, last)] if first < last else []
    return [*_stretches(start, first, finer), *middle, *_stretches(last, stop, finer)]


def _box(block, start, stop):
    _, experts, columns = block.shape
    row, rest = divmod(start, experts * columns)
    expert, column = divmod(rest, columns)
    count = stop - start
    rows = max(1, count // (experts * columns))
    deep = min(experts, max(1, count // columns))
    return BlockSlices(
        block.top + row,
        block.top + row + rows,
        block.left + column,
        block.left + column + min(columns, count),
        block.front + expert,
        block.front + expert + deep,
    )


def coverage_error(parts: Sequence[BlockSlices], whole: BlockSlices) -> str | None:
    """Return an error message if boxes do not cover a tensor exactly once, otherwise `None`."""
    if any(part.intersection(whole) != part for part in parts):
        rows, experts, columns = whole.shape
        sizes = [rows, experts, columns] if experts > 1 else [rows, columns]
        return f"a slice is outside of {' x '.join(map(str, sizes))}"
    flat = [rectangle for part in parts for rectangle in part.rectangles(whole.right)]
    if twice := overlap(flat):
        return f"rows {twice.top} to {twice.bottom} are in two files"
    missing = whole.size - sum(part.size for part in parts)
    return f"{missing} of {whole.size} elements are missing" if missing else None


def overlap(parts: Sequence[BlockSlices]) -> BlockSlices | None:
    """Return the intersection of any two overlapping rectangles, or `None` if all are disjoint.

    A sweep line moves down the rows. `across` holds the rectangles that intersect the line, from
    left to right.
    """
    starts = [(part.top, True, part) for part in parts]
    ends = [(part.bottom, False, part) for part in parts]
    across = []
    for _, begins, part in sorted(starts + ends):
        index = bisect(across, part.left, key=lambda other: other.left)
        if not begins:
            across.remove(part)
            continue
        for other in across[max(0, index - 1) : index + 1]:
            if other.right > part.left and other.left < part.right:
                return other.intersection(part)
        across.insert(index, part)
    return None
