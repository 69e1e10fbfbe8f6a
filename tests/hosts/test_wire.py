"""Collectives between hosts: their results, and their network traffic compared with formulas."""

import json
import sys

import pytest

from tests.hosts.emulated import Emulated

pytestmark = pytest.mark.hosts


@pytest.fixture(scope="module")
def hosts():
    with Emulated(hosts=3) as emulated:
        yield emulated


# Of the bytes of a block: what each host receives in all_gather, reduce_scatter and all_reduce.
@pytest.mark.parametrize(
    ("ranks", "kind", "shares"),
    [
        ((1, 1), "AllPairs", (1 / 2, 1 / 2, 1)),
        ((1, 1, 1), "AllPairs", (2 / 3, 2 / 3, 4 / 3)),
        ((2, 2), "TwoLevel", (1 / 2, 1 / 2, 1)),
        ((2, 2, 2), "TwoLevel", (2 / 3, 2 / 3, 4 / 3)),
    ],
)
def test_nic_traffic_of_collectives_matches_the_formulas(hosts, ranks, kind, shares):
    hosts.rate("500mbit")
    done = hosts.mpirun(ranks, sys.executable, "-m", "tests.hosts.wire_cases")
    assert done.returncode == 0, done.stderr
    name, nbytes, found = json.loads(done.stdout)
    assert name == kind
    came, went = ({op: [each[way] for each in found[op]] for op in found} for way in (0, 1))
    for op, share in zip(("all_gather", "reduce_scatter", "all_reduce"), shares, strict=True):
        assert came[op] == pytest.approx([share * nbytes] * sum(ranks), rel=0.05), op
    there = [rank >= ranks[0] for rank in range(sum(ranks))]
    near = {"rel": 0.05, "abs": 0.05 * nbytes}
    assert came["broadcast"] == pytest.approx([nbytes * away for away in there], **near)
    sent = [nbytes * (len(ranks) - 2) / (len(ranks) - 1) if away else nbytes for away in there]
    assert went["broadcast"] == pytest.approx(sent, **near)
    if len(ranks) == 2:
        assert came["reduce"] == pytest.approx([nbytes * (not away) for away in there], **near)


def test_hosts_with_unequal_rank_counts_use_mpi(hosts):
    hosts.rate(None)
    done = hosts.mpirun((2, 1), sys.executable, "-m", "tests.hosts.wire_cases")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)[0] == "AllPairs"
