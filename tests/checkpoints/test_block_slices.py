"""Slices of a block that are saved make up the whole."""

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from hpc3d.checkpoints.block_slices import (
    BlockSlices,
    coverage_error,
    overlap,
    rectangles,
    whole_of,
)

WHOLE = BlockSlices(0, 5, 0, 6)
HALF = BlockSlices(0, 3, 0, 6)


@st.composite
def cut(draw, block=WHOLE):
    """A block, cut in two again and again."""
    rows, columns = block.bottom - block.top, block.right - block.left
    if (rows == 1 and columns == 1) or not draw(st.booleans()):
        return [block]
    if columns == 1 or (rows > 1 and draw(st.booleans())):
        place = draw(st.integers(block.top + 1, block.bottom - 1))
        parts = block._replace(bottom=place), block._replace(top=place)
    else:
        place = draw(st.integers(block.left + 1, block.right - 1))
        parts = block._replace(right=place), block._replace(left=place)
    return [one for part in parts for one in draw(cut(part))]


@st.composite
def rectangle(draw):
    """One that may reach beyond the whole."""
    top, left = draw(st.integers(0, 5)), draw(st.integers(0, 6))
    return BlockSlices(top, draw(st.integers(top + 1, 6)), left, draw(st.integers(left + 1, 7)))


def times(parts):
    """How often each element is there, in a field that is wider than the whole."""
    count = np.zeros((8, 8), int)
    for part in parts:
        count[part.top : part.bottom, part.left : part.right] += 1
    return count


@given(cut().flatmap(st.permutations))
def test_what_was_cut_is_covered(parts):
    assert coverage_error(parts, WHOLE) is None


@given(cut(), st.lists(rectangle(), max_size=3), st.data())
@example([HALF, HALF], [], None)  # as many elements as the whole has
def test_parts_cover_if_every_element_is_there_once(parts, more, data):
    kept = parts[: data.draw(st.integers(0, len(parts)))] if data else parts
    parts = kept + more
    whole = times([WHOLE])
    assert (coverage_error(parts, WHOLE) is None) == (times(parts) == whole).all()
    assert (overlap(parts) is None) == (times(parts) <= 1).all()


def test_it_says_what_is_missing():
    assert coverage_error([HALF], WHOLE).startswith("12 of 30 ")
    assert coverage_error([], WHOLE).startswith("30 of 30 ")
    twice = [WHOLE, BlockSlices(1, 3, 2, 4)]
    assert coverage_error(twice, WHOLE).startswith("rows 1 to 3 ")
    assert " 5 x 6" in coverage_error([BlockSlices(0, 5, 0, 7)], WHOLE)


def test_a_vector_is_one_row():
    assert whole_of((7,)) == BlockSlices(0, 1, 0, 7)
    assert whole_of((5, 6)) == WHOLE


@given(st.integers(0, 5), st.integers(1, 7), st.integers(0, 40), st.integers(0, 40))
def test_rectangles_have_the_elements_of_a_stretch_in_order(rows, width, start, length):
    block = BlockSlices(2, 2 + rows, 3, 3 + width)
    whole = np.arange(rows * width).reshape(rows, width)
    parts = rectangles(block, start, start + length)
    found = [whole[part.index_in(block)].ravel() for part in parts]
    expected = whole.ravel()[start : start + length]
    assert len(parts) <= 3
    np.testing.assert_array_equal(np.concatenate([[], *found]), expected)
