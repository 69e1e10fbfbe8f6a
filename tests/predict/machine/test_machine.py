"""Machines: interpolated rates, placement of groups on nodes, and files."""

from dataclasses import replace
from pathlib import Path
from typing import get_args, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc3d.config.input_file import TrainConfig
from hpc3d.config.package_data import MEASURED
from hpc3d.predict.machine.collective_costs import ALGORITHMS, Protocol, doubling, ring
from hpc3d.predict.machine.machine import (
    TYPES,
    AttentionPass,
    AttentionRates,
    CallTable,
    Link,
    Machine,
    Rates,
)
from hpc3d.predict.machine.machine_file import load

_MACHINES = Path(__file__).parents[3] / "inputs" / "machines"
SHIPPED = sorted(path for path in _MACHINES.glob("*.toml") if path.stem != MEASURED)

NEAR = Link(4, 2e-6, 100e9)
FAR = Link(0, 10e-6, 10e9, node_bandwidth=10e9)
CLUSTER = Machine(
    name="16 nodes of 4",
    source="made up",
    ranks_per_node=4,
    cores=0,
    memory_gb=16,
    memory_bandwidth=1e12,
    launch_s=5e-6,
    gemm={"float32": Rates(15e12, (1e8, 1e10), (1e12, 10e12))},
    links=(NEAR, FAR),
    kernels={"softmax": 0.5e12},
)


# Products and kernels


@pytest.mark.parametrize(
    ("n", "rate"),
    [
        (50, 1e12),  # 1e8: the first knot
        (5000, 10e12),  # 1e10: the last
        (500, 10**12.5),  # 1e9: half way, in logarithms
        (25, 1e12),  # flat beyond
        (50_000, 10e12),
    ],
)
def test_product_time_follows_the_rate_of_its_size(n, rate):
    machine = replace(CLUSTER, launch_s=0.0)
    assert machine.product(1000, n, 1000, "float32") == pytest.approx(2e6 * n / rate, rel=1e-12)


def test_rate_curve_passes_through_its_knots():
    rates = Rates(1.0, (3.0, 7.0, 11.0), (1.3, 2.7, 1.9))
    assert [rates.curve(flop) for flop in rates.flop] == [*rates.rate]


def test_power_limit_reduces_the_rates_above_it_only():
    rates = Rates(9.0, (3.0, 7.0, 11.0), (1.3, 2.7, 1.9), sustained=1.5)
    assert [rates.curve(flop) for flop in rates.flop] == [1.3, 1.5, 1.5]


ATTENTION = (
    AttentionRates(64, True, False, (1024, 4096), (100e12, 400e12)),
    AttentionRates(128, True, False, (1024, 4096), (200e12, 500e12)),
    AttentionRates(128, False, False, (1024,), (600e12,)),
    AttentionRates(128, True, True, (1024,), (50e12,)),
)


@pytest.mark.parametrize(
    ("case", "rate"),
    [
        (AttentionPass(64, 2048, True, False), 200e12),  # halfway on a log scale
        (AttentionPass(80, 1024, True, False), 100e12),  # 64 is nearer than 128
        (AttentionPass(96, 1024, True, False), 200e12),  # 128 is nearer on a log scale
        (AttentionPass(64, 9999, False, False), 600e12),  # the only table without a mask
        (AttentionPass(64, 1024, False, True), 50e12),  # the only table of the backward pass
    ],
)
def test_attention_runs_at_the_rate_of_the_most_similar_pass(case, rate):
    machine = replace(CLUSTER, attention=ATTENTION)
    assert machine.fused_attention(1e12, 0, "float32", case) == pytest.approx(1e12 / rate)
    assert machine.fused_attention(1.0, 0, "float32", case) == machine.launch_s
    assert machine.fused_attention(1.0, 1e12, "float32", case) == pytest.approx(1.0)


def test_attention_without_rates_runs_at_the_rate_of_a_product():
    case = AttentionPass(64, 2048, True, False)
    assert CLUSTER.fused_attention(2e9, 0, "float32", case) == pytest.approx(
        CLUSTER.product(1000, 1000, 1000, "float32"), rel=1e-12
    )


LATENCY = Protocol(
    *("latency", 1e-6, 2e-6, 3e-6),
    fraction=0.25,
    single_member_fraction=0.1,
    max_bandwidth=4e9,
)
BANDWIDTH = Protocol(
    *("bandwidth", 5e-6, 20e-6, 30e-6),
    tree_intra_node_s=7e-6,
    tree_inter_node_s=8e-6,
    tree_fraction=0.5,
)
NCCL = replace(CLUSTER, protocols=(LATENCY, BANDWIDTH))


@pytest.mark.parametrize(
    ("op", "nbytes", "members", "seconds"),
    [
        # 3 steps on a node, at a quarter of 100 GB/s
        ("all_gather", 1e3, range(4), 1e-6 + 3 * 2e-6 + 1e3 / 25e9),
        ("reduce_scatter", 1e9, range(4), 5e-6 + 3 * 20e-6 + 1e9 / 100e9),
        # 15 steps, 3 of them between nodes; 2.5 of 10 GB/s
        ("all_gather", 1e3, range(16), 1e-6 + 12 * 2e-6 + 3 * 3e-6 + 1e3 / 2.5e9),
        # one member per node, each with a quarter of 10 GB/s: a tenth of the bandwidth
        ("all_gather", 1e2, range(0, 16, 4), 1e-6 + 3 * 3e-6 + 1e2 / 0.25e9),
        ("all_reduce", 1e3, range(4), 1e-6 + 6 * 2e-6 + 1e3 / 25e9),
        # a tree over 64 nodes: depth 6, twice the array at half of 10 GB/s
        ("all_reduce", 1e6, range(256), 2 * (3 * 7e-6 + 6 * 8e-6) + 2 * 1e6 * 256 / 510 / 5e9),
    ],
)
def test_collectives_take_the_time_of_the_fastest_protocol(op, nbytes, members, seconds):
    assert NCCL.call(op, nbytes, members) == pytest.approx(seconds, rel=1e-12)


def test_switches_reduce_on_one_node():
    """Each of 4 links carries 5/4 of the array at 0.9 of 100 GB/s; a ring carries 6/4 of it."""
    switches = replace(BANDWIDTH, nvls_base_s=2e-6, nvls_fraction=0.9)
    machine, rings = (replace(CLUSTER, protocols=(each,)) for each in (switches, BANDWIDTH))
    seconds = 2e-6 + 5 / 4 * 1e9 / 90e9
    assert machine.call("all_reduce", 1.5e9, range(4)) == pytest.approx(seconds, rel=1e-12)
    for op, members in (("all_reduce", range(8)), ("reduce_scatter", range(4))):
        assert machine.call(op, 1e9, members) == rings.call(op, 1e9, members)


@pytest.mark.parametrize(
    ("members", "busbw"),
    [(2, 367), (3, 367), (4, 370), (5, 420), (6, 440), (7, 460), (8, 480)],
)
def test_all_reduce_of_h100_has_the_published_bandwidth(members, busbw):
    """The busbw in GB/s of nccl-tests in NVIDIA/nccl issue 1455, for 4 GB."""
    machine = load(next(path for path in SHIPPED if path.stem == "h100"))
    received = 2 * (1 - 1 / members) * 4e9
    found = received / machine.call("all_reduce", received, range(members))
    assert found == pytest.approx(busbw * 1e9, rel=0.02)


def test_messages_and_other_collectives_do_not_depend_on_protocols():
    for op in ALGORITHMS.keys() - {"all_gather", "reduce_scatter", "all_reduce"}:
        assert NCCL.call(op, 1e6, range(8)) == CLUSTER.call(op, 1e6, range(8))


def test_machine_can_have_rates_of_every_training_type():
    assert {*get_args(get_type_hints(TrainConfig)["dtype"])} < {*TYPES}


def test_batched_product_is_one_kernel():
    one = CLUSTER.product(1000, 5000, 1000, "float32")
    assert CLUSTER.product(100, 5000, 1000, "float32", batch=10) == one


def test_product_takes_at_least_the_launch_time():
    assert CLUSTER.product(8, 8, 8, "float32") == 5e-6


def test_product_time_is_limited_by_memory_bandwidth_on_devices():
    """[10000, 1] [1, 10000] writes 4e8 bytes, at 1e12 bytes per second; on a core, only the 2e8
    FLOPs count, at 10**12.15 per second."""
    seconds = (4e8 + 8e4) / 1e12
    assert CLUSTER.product(10_000, 10_000, 1, "float32") == pytest.approx(seconds, rel=1e-12)
    computed = 2e8 / (1e12 * 2**0.5)
    product = replace(CLUSTER, cores=2).product(10_000, 10_000, 1, "float32")
    assert product == pytest.approx(computed, rel=1e-12)


def test_type_without_rates_is_rejected():
    with pytest.raises(ValueError, match=r"16 nodes of 4: .*float64, only .*float32;"):
        CLUSTER.product(8, 8, 8, "float64")


def test_kernel_time_is_launch_plus_bytes():
    assert CLUSTER.kernel("gelu", 1e6) == pytest.approx(5e-6 + 1e-6, rel=1e-12)
    assert CLUSTER.kernel("softmax", 1e6) == pytest.approx(5e-6 + 2e-6, rel=1e-12)


# Calls, by where their group lies


def axis(start, stride, size):
    return tuple(range(start, start + stride * size, stride))


@pytest.mark.parametrize(
    ("name", "members", "alpha", "hop", "bandwidth"),
    [
        # A cube, 4 x 4 x 4 on nodes of 4: z lies inside a node; along y and x all 4 ranks of a
        # node call other nodes at once, and each has a quarter of what leaves the node.
        ("z", axis(8, 1, 4), 2e-6, 2e-6, 100e9),
        ("y", axis(1, 4, 4), 10e-6, 10e-6, 2.5e9),
        ("x", axis(5, 16, 4), 10e-6, 10e-6, 2.5e9),
        # 8 x 8: rows of two whole nodes leave each once and have what leaves it to themselves;
        # a tree has 2 steps on a node and 1 across, a ring 6 hops on nodes and 2 across.
        ("row", axis(8, 1, 8), (2 * 2e-6 + 10e-6) / 3, (6 * 2e-6 + 2 * 10e-6) / 8, 10e9),
        ("column", axis(3, 8, 8), 10e-6, 10e-6, 2.5e9),
        # Pairs: inside, and every second rank of two nodes.
        ("pair", axis(2, 1, 2), 2e-6, 2e-6, 100e9),
        ("halves", axis(0, 2, 4), (2e-6 + 10e-6) / 2, (2 * 2e-6 + 2 * 10e-6) / 4, 5e9),
    ],
)
def test_group_shares_the_bandwidth_that_leaves_its_node(name, members, alpha, hop, bandwidth):
    g, beta = len(members), 1 / bandwidth
    short, long = (
        CLUSTER.call("all_gather", 1e3, members),
        CLUSTER.call("all_gather", 1e8, members),
    )
    assert short == pytest.approx(5e-6 + doubling(alpha, beta, g, 1e3), rel=1e-12)
    assert long == pytest.approx(5e-6 + ring(hop, beta, g, 1e8), rel=1e-12)


def test_all_gather_times_along_cube_axes():
    """8 MB all-gathered along z: 3 steps of 2 us and 80 us; along y: 3 of 10 us and 3.2 ms."""
    assert CLUSTER.call("all_gather", 8e6, axis(0, 1, 4)) == pytest.approx(5e-6 + 86e-6)
    assert CLUSTER.call("all_gather", 8e6, axis(0, 4, 4)) == pytest.approx(5e-6 + 3230e-6)


def test_bandwidth_scales_with_adapters_per_node():
    """If only adapters limit, a group has as many as it has ranks per node."""
    machine = replace(CLUSTER, links=(NEAR, replace(FAR, node_bandwidth=40e9)))
    for members, bandwidth in (
        (axis(0, 4, 4), 10e9),
        (axis(0, 2, 4), 20e9),
        (axis(0, 1, 8), 40e9),
    ):
        assert machine.route(members).beta == pytest.approx(1 / bandwidth, rel=1e-12)
    free = replace(CLUSTER, links=(NEAR, replace(FAR, node_bandwidth=0.0)))
    assert free.route(axis(0, 1, 8)).beta == pytest.approx(1 / 40e9, rel=1e-12)


def test_ranks_of_a_node_share_memory_bandwidth():
    machine = replace(CLUSTER, links=(Link(0, 1e-6, 100e9, node_bandwidth=80e9),))
    assert machine.route((0, 1)).beta == pytest.approx(1 / 20e9, rel=1e-12)


def test_pair_links_limit_the_bandwidth_of_small_groups():
    """In a ring of 4, each rank has three links; in a pair, it has one, wherever the pair is."""
    machine = replace(CLUSTER, links=(replace(NEAR, pair_bandwidth=30e9), FAR))
    for members, bandwidth in (((0, 1), 30e9), ((1, 2, 3), 60e9), ((0, 1, 2, 3), 90e9)):
        assert machine.route(members).beta == pytest.approx(1 / bandwidth, rel=1e-12)
    assert machine.route(axis(0, 4, 4)) == CLUSTER.route(axis(0, 4, 4))


def test_links_inside_nodes_are_nested():
    socket = Link(2, 1e-6, 200e9)
    machine = replace(CLUSTER, links=(socket, NEAR, FAR))
    assert machine.route((2, 3)).beta == 1 / 200e9
    assert machine.route((1, 2)).beta == machine.route((0, 1, 2, 3)).beta == 1 / 100e9


def test_message_time_depends_on_its_pair():
    assert CLUSTER.call("send", 1e8, (1, 0)) == pytest.approx(5e-6 + 2e-6 + 1e-3, rel=1e-12)
    assert CLUSTER.call("recv", 1e8, (8, 4)) == pytest.approx(5e-6 + 10e-6 + 40e-3, rel=1e-12)


def test_all_to_all_sends_every_block_separately():
    """With 8 ranks on 2 nodes, 4/7 of the received bytes come from the other node, at 2.5 GB/s, in
    7 messages of (2 * 2 + 10) / 3 us."""
    seconds = 5e-6 + 7 * 14e-6 / 3 + 4 / 7 * 1e8 / 2.5e9
    assert CLUSTER.call("all_to_all", 1e8, axis(0, 1, 8)) == pytest.approx(seconds, rel=1e-12)


def test_all_reduce_is_hierarchical_if_that_is_cheaper():
    """Between slow nodes, 7 ranks of each exchange a seventh with a peer, in 2 messages; a ring of
    14 has 26 hops, and every seventh hop is slow."""
    links = (Link(7, 2e-6, 100e9), Link(0, 1e-3, 10e9, node_bandwidth=70e9))
    machine = replace(CLUSTER, ranks_per_node=7, links=links)
    nbytes = 2 * 13 / 14 * 7e6
    inside = 2 * (6 * 2e-6 + 6e6 / 100e9)
    across = 2 * 1e-3 + 1e6 / 10e9
    seconds = machine.call("all_reduce", nbytes, axis(0, 1, 14))
    assert seconds == pytest.approx(5e-6 + inside + across, rel=1e-12)


def test_single_member_group_costs_nothing():
    assert CLUSTER.call("all_reduce", 1e6, (7,)) == 0


@given(
    st.sampled_from(sorted(ALGORITHMS)),
    st.integers(0, 7),
    st.integers(1, 16),
    st.integers(2, 16),
    st.floats(1, 1e10),
    st.floats(1, 1e10),
)
def test_cost_grows_with_the_bytes(op, start, stride, size, one, other):
    members = axis(start, stride, size)
    few, many = (CLUSTER.call(op, nbytes, members) for nbytes in sorted((one, other)))
    assert few <= many * (1 + 1e-12)


# Calls that were measured

TABLE = CallTable("all_gather", 4, 1, "alone", (1e3, 1e5), (1e-5, 1e-4))


@pytest.mark.parametrize(
    ("nbytes", "seconds"),
    [
        (1e3, 1e-5),
        (1e5, 1e-4),
        (1e4, 10**-4.5),  # halfway on a log scale
        # Beyond the knots on the line through them: 90 us for 99,000 bytes.
        (2e5, 1e-4 + 1e5 * 9e-5 / 9.9e4),
        (0, 1e-5 - 1e3 * 9e-5 / 9.9e4),
    ],
)
def test_measured_table_interpolates_and_extrapolates(nbytes, seconds):
    machine = replace(CLUSTER, measured=(TABLE,))
    assert machine.call("all_gather", nbytes, axis(4, 1, 4)) == pytest.approx(seconds, rel=1e-12)


@given(st.floats(0, 1e9))
def test_measured_table_never_yields_negative_time(nbytes):
    steep = replace(TABLE, seconds=(1e-6, 1e-3))
    falling = replace(TABLE, seconds=(1e-3, 1e-6))
    assert steep.time(nbytes) >= 0
    assert falling.time(nbytes) > 0


def test_measured_table_applies_only_to_its_kind_of_group():
    measured = replace(CLUSTER, measured=(TABLE,))
    same = [
        ("all_gather", axis(0, 4, 4)),
        ("all_gather", axis(0, 1, 2)),
        ("reduce_scatter", axis(0, 1, 4)),
        ("all_gather", (0, 1, 3)),
    ]
    for op, members in same:
        assert measured.call(op, 2e3, members) == CLUSTER.call(op, 2e3, members)
    assert measured.call("all_gather", 1e3, (3, 2, 1, 0)) == 1e-5


def test_concurrent_measurement_has_priority_over_an_isolated_one():
    together = replace(TABLE, groups="at once", seconds=(2e-5, 2e-4))
    for tables in ((TABLE, together), (together, TABLE)):
        machine = replace(CLUSTER, measured=tables)
        assert machine.call("all_gather", 1e3, axis(0, 1, 4)) == 2e-5


def test_isolated_measurement_does_not_apply_to_contended_groups():
    """There are 4 ranks on 4 nodes, and on each node 3 more ranks send at the same time."""
    far = replace(TABLE, stride=4)
    machine, members = replace(CLUSTER, measured=(far,)), axis(0, 4, 4)
    assert machine.call("all_gather", 1e3, members) == CLUSTER.call("all_gather", 1e3, members)
    machine = replace(CLUSTER, measured=(replace(far, groups="at once"),))
    assert machine.call("all_gather", 1e3, members) == 1e-5


def test_isolated_measurement_applies_to_groups_of_full_nodes():
    whole = replace(TABLE, members=8)
    machine = replace(CLUSTER, measured=(whole,))
    assert machine.call("all_gather", 1e3, range(8, 16)) == 1e-5


def test_all_reduce_of_two_dgx_a100_has_the_published_bandwidth():
    """A busbw of 192 GB/s with 8 adapters (NVIDIA/nccl issue 812), which is the received bytes of
    a rank per second."""
    machine = load(next(path for path in SHIPPED if path.stem == "a100-selene"))
    busbw = 1e10 / machine.call("all_reduce", 1e10, range(16))
    assert busbw == pytest.approx(192e9, rel=0.01)
    table = machine.measured[2]
    assert machine.call("all_reduce", table.bytes[5], range(8, 16)) == table.seconds[5]


@given(st.integers(0, 40), st.integers(1, 12), st.integers(2, 120), st.integers(1, 9))
def test_group_with_a_stride_is_placed_as_its_list_of_ranks(start, stride, size, ranks):
    machine = replace(CLUSTER, ranks_per_node=ranks)
    members = range(start, start + size * stride, stride)
    found, listed = machine.nodes(members), machine.nodes(tuple(members))
    assert (found[0], [*found[1]]) == (listed[0], [*listed[1]])
    assert machine.route(members) == machine.route(tuple(members))


def test_time_of_a_call_is_known_at_once_for_any_number_of_ranks():
    """With 2^60 ranks, no machine could create a list of all ranks."""
    members = range(1 << 60)
    assert CLUSTER.nodes(members) == (1 << 58, [0, 1, 2, 3])
    assert CLUSTER.call("all_reduce", 8, members) > CLUSTER.call("all_reduce", 8, range(8))
