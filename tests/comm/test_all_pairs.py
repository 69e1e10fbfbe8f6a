"""Sums and gathers by messages between all pairs, on 2 to 5 hosts of one rank each."""

import pytest

from hpc3d.comm.all_pairs import slices_of
from tests.mpi import checked


@pytest.mark.parametrize(("count", "size"), [(0, 2), (2, 3), (10, 3), (70001, 5)])
def test_slices_cover_all_elements_once(count, size):
    found = [index for each in slices_of(count, size) for index in range(count)[each]]
    assert found == [*range(count)]


@pytest.mark.slow
@pytest.mark.parametrize("long", [1, 1 << 16])
def test_collectives_are_those_of_numpy_with_blocks_of_any_length(long):
    out = checked(5, "-m", "tests.comm.on_two_level", *"abcde", long, timeout=200)
    assert out.splitlines() == [f"{size} AllPairs" for size in range(2, 6)]
