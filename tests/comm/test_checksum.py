"""Checksums of blocks: the changes that they detect, and their rounding bound."""

import numpy as np
import pytest

from hpc3d.comm.abft.checksum import Signs, slack, terms, words
from tests.comm.test_checker import flip


@pytest.mark.parametrize("shape", [(7, 3), (5,), (9000,), (2, 9001), (2, 3, 4), (0, 4)])
def test_checksums_depend_on_every_element(shape):
    signs = Signs()
    for place in range(0, int(np.prod(shape)), 97):
        block = np.zeros(shape)
        block.flat[place] = 1.0
        assert abs(signs.total(signs.rows(block))[0]) == 1.0
    assert signs.rows(np.zeros(shape)).shape[0] == 1


@pytest.mark.parametrize(
    ("shape", "count"),
    [
        ((7,), 7),
        ((3, 5), 5),
        ((3, 4096), 4096),
        ((3, 4097), 4096),
        ((9000,), 4096),
        ((2, 3, 4), 4),
    ],
)
def test_rounding_bound_counts_at_most_4096_terms_per_row(shape, count):
    """Up to 4096 terms are summed in the type of the block, the rest in float64. The bound is
    4 u sqrt n; u is half the distance from 1 to the next number (Higham and Mary 2019)."""
    block = np.zeros(shape, np.float32)
    assert terms(block) == count
    assert slack(block.dtype, terms(block), 9) == pytest.approx(4 * 2**-24 * (count**0.5 + 3))
    assert slack(np.dtype(np.float64), 16) == 4 * 2**-53 * 4
    assert slack(np.dtype(np.int32), 16) == 0


def test_signs_are_balanced_and_independent_of_length():
    signs = Signs()
    short, long = signs(100, np.dtype("f4")).copy(), signs(20_000, np.dtype("f4"))
    np.testing.assert_array_equal(short, long[:100])
    assert set(np.unique(long)) == {-1, 1}
    assert abs(long.sum()) < 4 * np.sqrt(long.size)
    assert abs((long[1:] * long[:-1]).sum()) < 4 * np.sqrt(long.size)


@pytest.mark.parametrize("count", [1, 2, 7, 64, 65])
@pytest.mark.parametrize("dtype", ["uint8", "float32", "float64"])
def test_integer_checksum_changes_with_every_bit(count, dtype):
    block = np.random.default_rng(count).integers(1, 99, (3, count)).astype(dtype)
    before = words(block, 3)
    np.testing.assert_array_equal(before, [words(part)[0] for part in block])
    for bit in range(8 * block.itemsize):
        after = words(flip(block, bit, bit * 7), 3)
        assert (after != before).sum() == 1
