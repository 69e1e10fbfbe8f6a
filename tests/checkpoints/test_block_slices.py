"""The saved slices of a block cover the whole block."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc3d.checkpoints.block_slices import (
    BlockSlices,
    boxes,
    coverage_error,
    overlap,
    whole_of,
)

WHOLE = BlockSlices(0, 5, 0, 6)
HALF = BlockSlices(0, 3, 0, 6)
EXPERTS = BlockSlices(0, 3, 0, 4, 0, 5)
FIELD = BlockSlices(0, 8, 0, 8, 0, 8)  # wider than any whole


@st.composite
def cut(draw, block):
    """Draw a block that is recursively split in two."""
    pairs = ("top", "bottom"), ("left", "right"), ("front", "back")
    able = [pair for pair in pairs if getattr(block, pair[1]) - getattr(block, pair[0]) > 1]
    if not able or not draw(st.booleans()):
        return [block]
    first, last = draw(st.sampled_from(able))
    place = draw(st.integers(getattr(block, first) + 1, getattr(block, last) - 1))
    parts = block._replace(**{last: place}), block._replace(**{first: place})
    return [one for part in parts for one in draw(cut(part))]


@st.composite
def box(draw, whole):
    """Draw a block that may extend beyond the full block."""
    edges = []
    for last in (whole.bottom, whole.right, whole.back):
        edges.append(draw(st.integers(0, last if last > 1 else 0)))
        edges.append(draw(st.integers(edges[-1] + 1, last + (last > 1))))
    return BlockSlices(*edges)


def times(parts):
    """Return how often the parts contain each element."""
    count = np.zeros(FIELD.shape, int)
    for part in parts:
        count[part.index_in(FIELD)] += 1
    return count


@given(st.sampled_from([WHOLE, EXPERTS]).flatmap(cut).flatmap(st.permutations))
def test_slices_of_a_partition_cover_the_block(parts):
    whole = EXPERTS if any(part.back > 1 for part in parts) else WHOLE
    assert coverage_error(parts, whole) is None


@given(st.sampled_from([WHOLE, EXPERTS]), st.data())
def test_coverage_requires_each_element_exactly_once(whole, data):
    parts = data.draw(cut(whole))
    kept = parts[: data.draw(st.integers(0, len(parts)))]
    covers(kept + data.draw(st.lists(box(whole), max_size=3)), whole)


def covers(parts, whole):
    field = times(parts)
    assert (coverage_error(parts, whole) is None) == (times([whole]) == field).all()
    flat = [each for part in parts for each in part.rectangles(columns=8)]
    assert (overlap(flat) is None) == (field <= 1).all()


@pytest.mark.parametrize("whole", [WHOLE, EXPERTS])
def test_overlapping_slices_with_the_right_element_count_do_not_cover(whole):
    half = whole._replace(right=whole.right // 2)
    assert coverage_error([half, half], whole).startswith("rows 0 to ")
    covers([half, half], whole)


def test_coverage_error_states_the_missing_elements():
    assert coverage_error([HALF], WHOLE).startswith("12 of 30 ")
    assert coverage_error([], WHOLE).startswith("30 of 30 ")
    twice = [WHOLE, BlockSlices(1, 3, 2, 4)]
    assert coverage_error(twice, WHOLE).startswith("rows 1 to 3 ")
    assert " 5 x 6" in coverage_error([BlockSlices(0, 5, 0, 7)], WHOLE)
    assert " 3 x 5 x 4" in coverage_error([EXPERTS._replace(back=6)], EXPERTS)


def test_vectors_are_one_row_and_matrices_have_one_expert():
    assert whole_of((7,)) == BlockSlices(0, 1, 0, 7)
    assert whole_of((5, 6)) == WHOLE
    assert whole_of((3, 5, 4)) == EXPERTS
    assert (WHOLE.edges, EXPERTS.edges) == ((0, 5, 0, 6), EXPERTS)


sizes = st.integers(1, 5)


@given(st.integers(0, 4), sizes, sizes, st.integers(0, 60), st.integers(0, 60))
def test_boxes_cover_an_element_range_in_order(rows, experts, columns, start, length):
    block = BlockSlices(2, 2 + rows, 3, 3 + columns, 4, 4 + experts)
    whole = np.arange(rows * experts * columns).reshape(rows, experts, columns)
    parts = boxes(block, start, start + length)
    found = [whole[part.index_in(block)].ravel() for part in parts]
    expected = whole.ravel()[start : start + length]
    assert len(parts) <= (3 if experts == 1 else 5)
    assert [part.size for part in parts] == [len(each) for each in found]
    np.testing.assert_array_equal(np.concatenate([[], *found]), expected)
