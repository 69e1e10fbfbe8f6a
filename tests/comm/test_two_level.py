"""Ranks of several hosts, which are told by letters."""

import pytest

from tests.mpi import checked


@pytest.mark.parametrize(
    ("hosts", "longs", "kinds"),
    [
        ("abcde", [1, 1 << 16], {2: "Mpi", 3: "Mpi", 4: "Mpi", 5: "Mpi"}),
        ("abba", [1], {2: "Mpi", 3: "Mpi", 4: "Hosts"}),
        ("aababb", [1 << 16], {2: "Node", 3: "Mpi", 4: "Mpi", 5: "Mpi", 6: "Hosts"}),
        ("abccab", [1], {2: "Mpi", 3: "Mpi", 4: "Mpi", 5: "Mpi", 6: "Hosts"}),
    ],
)
def test_ranks_of_several_hosts(hosts, longs, kinds):
    out = checked(len(hosts), "-m", "tests.comm.on_two_level", *hosts, *longs, timeout=200)
    assert out.split() == [str(word) for _ in longs for pair in kinds.items() for word in pair]
