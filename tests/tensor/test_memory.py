"""What a product holds while it runs, on real ranks: the working blocks and nothing more."""

import json

from tests.mpi import checked

Q, SIZE = 2, 64


def test_a_cube_gathers_a_face_of_each_matrix():
    """(MK + KN + MN) / q^2 at the peak of forward, and 1 / q^3 of each between the products."""
    for transport in ("auto", "mpi"):
        out = checked(Q**3, "-m", "tests.tensor.on_memory", SIZE, Q, transport)
        ranks = json.loads(out)
        assert len(ranks) == Q**3
        for peak, after, stored in ranks:
            assert peak == 3 * SIZE * SIZE // Q**2 * 8
            assert after == 2 * SIZE * SIZE // Q**2 * 8  # X and W, kept for backward
            assert stored == [SIZE * SIZE // Q**3 * 8] * 3
