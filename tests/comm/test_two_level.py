"""Ranks of several hosts; each host is denoted by a letter."""

import pytest

from tests.mpi import checked
from tests.strided import strided

SHARED, PAIRS, HOSTS = "SharedMemory", "AllPairs", "TwoLevel"


WHERE = [
    ("abba", [1], [PAIRS, PAIRS, HOSTS]),
    ("abccab", [1], [PAIRS, PAIRS, PAIRS, PAIRS, HOSTS]),
    ("aababb", [1 << 16], [SHARED, PAIRS, PAIRS, PAIRS, HOSTS]),
]


@pytest.mark.slow
@pytest.mark.parametrize(("hosts", "longs", "kinds"), strided(WHERE, 2))
def test_two_level_communicators_on_several_hosts(hosts, longs, kinds):
    out = checked(len(hosts), "-m", "tests.comm.on_two_level", *hosts, *longs, timeout=200)
    sizes = range(2, len(hosts) + 1)
    assert out.splitlines() == [f"{n} {kind}" for _ in longs for n, kind in zip(sizes, kinds)]
