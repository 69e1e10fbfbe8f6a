"""Track a split dimension through operations that move, divide or merge dimensions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from math import prod
from typing import Any, NamedTuple

import torch
from torch import fx

from hpc3d.partition.capture import shape_of, size_of, tensors
from hpc3d.partition.tensor_parallel.shards import SplitDim

# Batch size for which shapes are compared. No other dimension is a multiple of this prime number.
_BATCH = 1_000_003


class WrongSections(Exception):
    """Raised if an operation can be applied to shards only if a dimension has other `sections`."""

    def __init__(self, sections: Sequence[int]) -> None:
        self.sections = tuple(sections)


class Range(NamedTuple):
    """Elements of a split dimension that a view selects; they form dimension `dim` of the view."""

    dim: int
    start: int
    size: int


def numbers_of(value: torch.Tensor) -> list[int]:
    """Return the shape of a captured tensor for a fixed large batch size."""
    return shape_of(value, _BATCH)


def ranges_of(node: fx.Node, operand: fx.Node, dim: int) -> list[Range] | None:
    """Return the range of the operand's dimension `dim` that each result of a view selects.

    The view may move dimensions and select elements. Returns `None` if a result does not have the
    dimension, or if the selected elements are not adjacent.
    """
    shape = numbers_of(operand.meta["val"])
    strides = [int(index == dim) for index in range(len(shape))]
    like = torch.empty_strided(shape, strides, device="meta")

    def number(each):
        return like if each is operand else size_of(each.meta["val"], _BATCH)

    args, kwargs = fx.node.map_arg((node.args, node.kwargs), number)
    found = []
    for each in tensors(_list(node.target(*args, **kwargs))):
        here = [at for at, size in enumerate(each.shape) if size > 1 and each.stride(at) == 1]
        if len(here) != 1:
            return None
        found.append(Range(here[0], each.storage_offset(), each.shape[here[0]]))
    return found


def _list(results: Any) -> Any:
    return [*results] if isinstance(results, tuple | list) else [results]


def within(split: SplitDim, part: Range) -> SplitDim:
    """Return the placement of a view that selects the range `part` of a split dimension.

    Raises WrongSections unless the range consists of complete sections.
    """
    if part.size == split.size:
        return split._replace(dim=part.dim)
    ends = [0, *accumulate(split.sections)]
    edges = part.start, part.start + part.size
    if split.blocks > 1 or not {*edges} <= {*ends}:
        raise WrongSections([stop - start for start, stop in pairwise(sorted({*ends, *edges}))])
    first, last = map(ends.index, edges)
    return SplitDim(part.dim, split.sections[first:last])


def reshaped(old: torch.Tensor, new: torch.Tensor, split: SplitDim, ways: int) -> SplitDim | None:
    """Return the placement of a reshaped tensor, or `None` if the shards cannot be reshaped.

    Raises WrongSections if the shards could be reshaped with other sections of `split`.
    """
    shapes = numbers_of(old), numbers_of(new)
    before, after = next(
        (before, after) for before, after in _groups(*shapes) if split.dim in before
    )
    outer = prod(shapes[0][before.start : split.dim])
    inner = prod(shapes[0][split.dim + 1 : before.stop])
    sections, blocks = split.sections, split.blocks * outer
    if len({*sections}) == 1:
        sections, blocks = sections[:1], blocks * len(sections)
    for dim in after:
        size = shapes[1][dim]
        if blocks > 1 and blocks % size == 0:
            blocks //= size
        elif size > 1:
            behind = prod(shapes[1][dim + 1 : after.stop])
            sizes = [section * inner // behind for section in sections]
            fits = blocks * sum(sizes) == size
            if any(each % _BATCH == 0 for each in sizes):
                return None  # the sizes of the sections depend on the batch
            if fits and all(each * inner % (behind * ways) == 0 for each in sections):
                found = sizes * (blocks if blocks % _BATCH else 1)
                return SplitDim(dim, tuple(found), 1 if blocks % _BATCH else blocks)
            if outer == split.blocks == 1 and split.size % size == 0:
                raise WrongSections([split.size // size] * size)
            return None
    return None


def _groups(old: Sequence[int], new: Sequence[int]) -> Iterator[tuple[range, range]]:
    """Yield the smallest ranges of dimensions with the same number of elements in both shapes."""
    i = j = 0
    while i < len(old) or j < len(new):
        start, left, right = (i, j), 1, 1
        while left != right or (i, j) == start:
            if (left <= right or j == len(new)) and i < len(old):
                left, i = left * old[i], i + 1
            else:
                right, j = right * new[j], j + 1
        yield range(start[0], i), range(start[1], j)
