"""Oversubscribed levels of a network, compared with rates counted edge by edge.

A block of 16 ranks (4 nodes of 4) has uplinks for a quarter of 16 x 2.5 GB/s, which are 10 GB/s.
"""

from dataclasses import replace

import pytest

from hpc3d.predict.machine.between_hosts import legs
from hpc3d.predict.machine.collective_costs import Level, hierarchical_all_reduce
from hpc3d.predict.machine.machine import CallTable, Link
from hpc3d.predict.machine.uplinks import uplink_cost
from tests.predict.machine.test_between_hosts import ALPHA, MB, WIRE, hosts
from tests.predict.machine.test_machine import CLUSTER, FAR, NEAR, axis

LEAF = replace(FAR, ranks=16)
SPINE = replace(FAR, oversubscription=4)
TREE = replace(CLUSTER, links=(NEAR, LEAF, SPINE))
RANKS, BLOCK, UPLINKS = 64, 16, 10e9


def rings_leaving(stride, size):
    """Count the rings of an axis that lead from the first block to another one."""
    starts = [rank for rank in range(RANKS) if rank // stride % size == 0]
    rings = [axis(start, stride, size) for start in starts]
    edges = [pair for ring in rings for pair in zip(ring, (*ring[1:], ring[0]), strict=True)]
    return sum(here < BLOCK <= there for here, there in edges)


@pytest.mark.parametrize(
    ("stride", "size", "alone"),
    [
        (16, 4, 2.5e9),  # each of the 16 rings of a block leaves it
        (16, 2, 2.5e9),
        (8, 4, 2.5e9),  # 8 rings
        (4, 8, 2.5e9),
        (2, 16, 5e9),  # the uplinks do not limit these rings: 2 members per node
        (1, 32, 10e9),
    ],
)
def test_rings_share_the_uplinks_of_a_block(stride, size, alone):
    rate = min(alone, UPLINKS / rings_leaving(stride, size))
    assert TREE.route(axis(0, stride, size)).beta == pytest.approx(1 / rate, rel=1e-12)


def test_groups_inside_a_block_use_no_uplinks():
    for members in (axis(0, 1, 4), axis(3, 4, 4), axis(16, 1, 16)):
        assert uplink_cost(TREE, members) == (0, 0)
        assert TREE.route(members) == CLUSTER.route(members)


@pytest.mark.parametrize(("distance", "senders"), [(1, 1), (4, 4), (8, 8), (16, 16), (32, 16)])
def test_messages_share_the_uplinks_with_those_of_the_same_distance(distance, senders):
    """Of the ranks 0 to 15, as many send to a rank beyond 15 as the distance, at most 16."""
    rate = min(2.5e9, UPLINKS / senders)
    seconds = 5e-6 + 10e-6 + 1e8 / rate
    found = TREE.call("send", 1e8, (15, 15 + distance))
    assert found == pytest.approx(seconds, rel=1e-12)


def test_all_to_all_sends_the_blocks_of_all_ranks_over_the_uplinks():
    """Each of 16 ranks sends 16/31 of its data to the other block."""
    found = TREE.route(axis(0, 1, 32)).spread
    assert found == pytest.approx(16 * 16 / 31 / UPLINKS, rel=1e-12)


def test_all_reduce_across_nodes_shares_the_uplinks_in_each_ring():
    """4 members per node run 4 rings, which share the 10 GB/s that leave the block."""
    links = NEAR, LEAF, replace(SPINE, oversubscription=16)
    machine, members = replace(TREE, links=links), axis(0, 1, 32)
    levels = machine.route(members).levels
    assert levels == (Level(4, 2e-6, 1 / 100e9), Level(8, 10e-6, 4 / 2.5e9))
    found = machine.call("all_reduce", 1e6, members)
    assert found <= 5e-6 + hierarchical_all_reduce(1e6, *levels)


def test_every_crossed_level_counts():
    """A node of 4 has uplinks for a third of 4 x 2.5 GB/s, a block for a quarter of 16 x 2.5."""
    machine = replace(TREE, links=(NEAR, replace(LEAF, oversubscription=3), SPINE))
    for members, rate in ((axis(0, 4, 4), 2.5e9 / 3), (axis(0, 16, 4), 2.5e9 / 4)):
        assert machine.route(members).beta == pytest.approx(1 / rate, rel=1e-12)


def test_tables_measured_in_isolation_do_not_apply_to_shared_uplinks():
    table = CallTable("all_gather", 32, 1, "alone", (1e3, 1e5), (1e-5, 1e-4))
    assert replace(CLUSTER, measured=(table,)).route(axis(0, 1, 32)).tables
    assert not replace(TREE, measured=(table,)).route(axis(0, 1, 32)).tables


def test_hosts_without_gpus_share_uplinks():
    """A switch connects two hosts; its uplinks carry a fifth of what the two hosts can send."""
    machine = hosts(1)
    links = replace(machine.links[0], ranks=2), Link(0, ALPHA, WIRE, WIRE, oversubscription=5)
    machine = replace(machine, links=links)
    for members, rate in ((range(2), WIRE), (range(4), 2 / 5 * WIRE), (range(0, 4, 2), WIRE / 5)):
        steps, nbytes = len(members) - 1, (1 - 1 / len(members)) * MB
        found = legs(machine, "reduce_scatter", nbytes, members).wired
        assert found == pytest.approx(steps * ALPHA + nbytes / rate, rel=1e-12)
    found = legs(machine, "all_to_all", 3 / 4 * MB, range(4)).wired
    assert found == pytest.approx(3 * ALPHA + 2 * MB / 2 / (2 * WIRE / 5), rel=1e-12)


def test_all_to_all_of_hosts_with_several_ranks_shares_uplinks():
    """Hosts of 2 ranks, two hosts per switch: 4 ranks send half of their data to the other one."""
    machine = hosts(2)
    links = *machine.links[:1], Link(4, ALPHA, WIRE, WIRE)
    outer = Link(0, ALPHA, WIRE, WIRE, oversubscription=5)
    found = legs(replace(machine, links=(*links, outer)), "all_to_all", 7 / 8 * MB, range(8))
    assert found.wired == pytest.approx(3 * ALPHA + 4 * MB / 2 / (2 * WIRE / 5), rel=1e-12)
