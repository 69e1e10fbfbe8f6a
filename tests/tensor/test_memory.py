"""Memory of a product on real ranks: only the working blocks."""

import json

import pytest

from tests.mpi import checked
from tests.strided import strided

Q = 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("transport", "size"), strided([("auto", 64), ("mpi", 64), ("mpi", 1024)], 3)
)
def test_cube_product_peak_memory_matches_the_formula(transport, size):
    """The peak is (MK + KN + MN) / q^2 in forward, and 1 / q^3 of each between products."""
    out = checked(Q**3, "-m", "tests.tensor.on_memory", size, Q, transport)
    ranks = json.loads(out)
    assert len(ranks) == Q**3
    for peak, after, stored in ranks:
        assert peak == 3 * size * size // Q**2 * 8
        assert after == 2 * size * size // Q**2 * 8  # X and W, kept for backward
        assert stored == [size * size // Q**3 * 8] * 3
