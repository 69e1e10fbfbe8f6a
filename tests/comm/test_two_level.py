"""Ranks of several hosts, which are told by letters."""

import pytest

from tests.mpi import checked
from tests.strided import strided

SHARED, PAIRS, MPI, HOSTS = "SharedMemory", "AllPairs", "MpiCommunicator", "TwoLevel"


WHERE = [
    ("rdma", "abcabc", [1], [MPI, MPI, MPI, MPI, HOSTS]),
    ("tcp", "abba", [1], [PAIRS, PAIRS, HOSTS]),
    ("tcp", "abccab", [1], [PAIRS, PAIRS, PAIRS, PAIRS, HOSTS]),
    ("tcp", "aababb", [1 << 16], [SHARED, PAIRS, PAIRS, PAIRS, HOSTS]),
]


@pytest.mark.slow
@pytest.mark.parametrize(("network", "hosts", "longs", "kinds"), strided(WHERE, 2, 1))
def test_ranks_of_several_hosts(network, hosts, longs, kinds):
    words = ["-m", "tests.comm.on_two_level", network, *hosts, *longs]
    out = checked(len(hosts), *words, timeout=200)
    sizes = range(2, len(hosts) + 1)
    assert out.splitlines() == [f"{n} {kind}" for _ in longs for n, kind in zip(sizes, kinds)]
