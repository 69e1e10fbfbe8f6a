"""Sums and gathers by messages between all pairs, on 2 to 5 hosts of one rank each."""

import pytest

from hpc3d.comm.all_pairs import slices_of
from tests.mpi import checked
from tests.strided import daily


@pytest.mark.parametrize(("count", "size"), [(0, 2), (2, 3), (10, 3), (70001, 5)])
def test_slices_cover_all_elements_once(count, size):
    found = [index for each in slices_of(count, size) for index in range(count)[each]]
    assert found == [*range(count)]


@pytest.mark.slow
@daily
def test_collectives_of_short_and_long_blocks_are_those_of_numpy():
    out = checked(5, "-m", "tests.comm.on_two_level", *"abcde", 1, 1 << 16, timeout=200)
    assert out.splitlines() == 2 * [f"{size} AllPairs" for size in range(2, 6)]
