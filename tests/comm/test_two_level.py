"""Ranks of several hosts, which are told by letters."""

import pytest

from tests.mpi import checked
from tests.strided import strided

SHARED, MPI, HOSTS = "SharedMemory", "MpiCommunicator", "TwoLevel"


WHERE = [
    ("abcde", [1, 1 << 16], [MPI, MPI, MPI, MPI]),
    ("abba", [1], [MPI, MPI, HOSTS]),
    ("abccab", [1], [MPI, MPI, MPI, MPI, HOSTS]),
    ("aababb", [1 << 16], [SHARED, MPI, MPI, MPI, HOSTS]),
]


@pytest.mark.slow
@pytest.mark.parametrize(("hosts", "longs", "kinds"), strided(WHERE, 2, 1))
def test_ranks_of_several_hosts(hosts, longs, kinds):
    out = checked(len(hosts), "-m", "tests.comm.on_two_level", *hosts, *longs, timeout=200)
    sizes = range(2, len(hosts) + 1)
    assert out.splitlines() == [f"{n} {kind}" for _ in longs for n, kind in zip(sizes, kinds)]
