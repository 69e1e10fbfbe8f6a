"""A split dimension through views and reshapes."""

import pytest

pytest.importorskip("torch")

import torch

from hpc3d.partition.tensor_parallel.dimensions import Range, WrongSections, reshaped, within
from hpc3d.partition.tensor_parallel.shards import SplitDim


def after(old, new, split, ways=2):
    values = (torch.empty(shape, device="meta") for shape in (old, new))
    return reshaped(*values, split, ways)


def test_outermost_part_of_a_divided_dimension_is_split():
    assert after((5, 12), (5, 4, 3), SplitDim(1, (12,))) == SplitDim(1, (4,))
    assert after((5, 12), (5, 1, 4, 3), SplitDim(1, (12,))) == SplitDim(2, (4,))
    assert after((5, 4, 3), (5, 12), SplitDim(1, (4,))) == SplitDim(1, (12,))
    assert after((5, 4, 6), (5, 24), SplitDim(2, (6,))) == SplitDim(1, (6,) * 4)
    assert after((2, 5, 12), (10, 12), SplitDim(2, (12,))) == SplitDim(1, (12,))


def test_sections_do_not_depend_on_the_batch():
    """Heads are merged with the batch, as the outer dimension."""
    assert after((4, 1_000_003, 3), (4 * 1_000_003, 3), SplitDim(0, (4,))) is None


def test_odd_outermost_parts_are_sections():
    """A fused layer for three heads: each rank has a part of every head's section."""
    with pytest.raises(WrongSections) as wrong:
        after((5, 12), (5, 3, 4), SplitDim(1, (12,)))
    assert wrong.value.sections == (4, 4, 4)
    assert after((5, 12), (5, 3, 4), SplitDim(1, (4, 4, 4))) == SplitDim(2, (4,))
    assert after((5, 4, 6), (5, 8, 3), SplitDim(2, (6,))) == SplitDim(1, (2,) * 4)
    assert after((5, 4, 6), (5, 6, 4), SplitDim(2, (6,))) is None


def test_slices_contain_complete_sections():
    split = SplitDim(1, (4, 6, 2))
    assert within(split, Range(0, 0, 12)) == SplitDim(0, (4, 6, 2))
    assert within(split, Range(1, 4, 8)) == SplitDim(1, (6, 2))
    with pytest.raises(WrongSections) as wrong:
        within(split, Range(1, 2, 8))
    assert wrong.value.sections == (2, 2, 6, 2)
