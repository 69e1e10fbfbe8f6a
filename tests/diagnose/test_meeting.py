"""Connection checks between ranks, on one host; tests/hosts/test_meeting.py uses several."""

import re

import pytest

from hpc3d.diagnose.meeting import ALL_PAIRS, finding, peers
from tests.elided import elided


@pytest.mark.parametrize("size", [1, 2, 5, ALL_PAIRS, ALL_PAIRS + 1, 1000])
def test_peers_are_symmetric_and_complete_on_few_ranks(size):
    found = [peers(rank, size) for rank in range(size)]
    for rank, others in enumerate(found):
        assert all(rank in found[other] for other in others) and rank not in others
        assert size > ALL_PAIRS or len(others) == size - 1
        assert len(others) <= max(ALL_PAIRS, 20)


def test_finding_names_each_pair_of_hosts_once():
    pairs = {(0, 2), (0, 3), (1, 2), (1, 3), (4, 5)}
    found = finding(pairs, ["a", "a", "b", "b", "c", ""])
    assert re.fullmatch(
        elided("... 5 s between a and b (ranks 0-3); c and rank 5 (ranks 4-5)"), found.text
    )
    assert "btl_tcp_if_include" in found.remedy
