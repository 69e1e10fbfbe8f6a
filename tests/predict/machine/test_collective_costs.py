"""Costs of collectives by algorithm: closed forms, limits, and the selected algorithm."""

from math import ceil, log2

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc3d.predict.machine.collective_costs import (
    ALGORITHMS,
    best,
    binomial,
    bruck,
    chain,
    doubling,
    doubling_all_reduce,
    hierarchical_all_reduce,
    message,
    pairwise,
    rabenseifner,
    ring,
    ring_all_reduce,
    scatter_all_gather,
)

ALPHA, BETA = 10.0, 0.5  # of the examples by hand
# MPICH's default of MPIR_CVAR_ALLGATHER_LONG_MSG_SIZE and of that of reduce-scatter, in bytes.
SHORT = 524288
OPS = st.sampled_from(sorted(ALGORITHMS))
SIZES = st.integers(2, 4096)
BYTES = st.floats(1, 1e12)
LATENCIES = st.floats(1e-7, 1e-2)
BYTE_TIMES = st.floats(1e-13, 1e-6)


@pytest.mark.parametrize(
    ("cost", "g", "nbytes", "seconds"),
    [
        (message, 2, 100, 10 + 50),
        (ring, 5, 100, 4 * 10 + 50),
        (doubling, 8, 100, 3 * 10 + 50),
        (doubling, 5, 100, 3 * 10 + 50),
        # 700 bytes of 800 are received: 400 go out in each of 3 steps.
        (pairwise, 8, 700, 7 * 10 + 350),
        (bruck, 8, 700, 3 * (10 + 200)),
        (ring_all_reduce, 5, 160, 8 * 10 + 80),
        # A block of 100: 2 * 7/8 * 100 bytes are received.
        (rabenseifner, 8, 175, 6 * 10 + 87.5),
        (doubling_all_reduce, 8, 175, 3 * (10 + 50)),
        # 5 members: one hands over 100 bytes before and gets 100 back; a power of two goes on.
        (rabenseifner, 5, 160, 6 * 10 + 80 + 2 * 50),
        (doubling_all_reduce, 5, 160, 4 * (10 + 50)),
        (binomial, 8, 100, 3 * (10 + 50)),
        (scatter_all_gather, 8, 100, 10 * 10 + 2 * 7 / 8 * 50),
        # k = sqrt(3 * 100 * 0.5 / 10) = sqrt(15).
        (chain, 5, 100, 3 * 10 + 2 * 1500**0.5 + 50),
        # One segment: the block is too short to cut.
        (chain, 5, 4, 4 * (10 + 2)),
    ],
)
def test_collective_costs_match_the_closed_forms(cost, g, nbytes, seconds):
    assert cost(ALPHA, BETA, g, nbytes) == pytest.approx(seconds, rel=1e-12)


@given(SIZES, BYTES, LATENCIES, BYTE_TIMES)
def test_chain_cost_is_optimal_in_the_number_of_segments(g, nbytes, alpha, beta):
    cost = chain(alpha, beta, g, nbytes)
    for k in (1, 2, 3, 10, 100, 1000):
        assert cost <= (g - 2 + k) * (alpha + nbytes * beta / k) * (1 + 1e-12)


@given(OPS, BYTES, LATENCIES, BYTE_TIMES)
def test_single_member_call_costs_nothing(op, nbytes, alpha, beta):
    assert best(op, 1, nbytes, alpha, beta) == 0


@given(OPS, SIZES, BYTES, LATENCIES, BYTE_TIMES)
def test_call_costs_respect_the_lower_bounds(op, g, nbytes, alpha, beta):
    """The last member is reached after log2 g messages, and every byte must arrive."""
    seconds = best(op, g, nbytes, alpha, beta)
    steps = 1 if op in ("send", "recv") else ceil(log2(g))
    assert seconds >= max(steps * alpha, nbytes * beta) * (1 - 1e-12)


@pytest.mark.parametrize(
    ("op", "steps"),
    [
        ("all_gather", 3),
        ("reduce_scatter", 3),
        ("all_reduce", 3),
        ("broadcast", 3),
        ("reduce", 3),
        ("all_to_all", 3),
        ("send", 1),
        ("recv", 1),
    ],
)
def test_call_without_bytes_costs_only_latency(op, steps):
    assert best(op, 8, 0, ALPHA, BETA) == steps * ALPHA


@given(OPS, SIZES, BYTES, BYTE_TIMES)
def test_call_without_latency_costs_only_bandwidth(op, g, nbytes, beta):
    assert best(op, g, nbytes, 0.0, beta) == pytest.approx(nbytes * beta, rel=1e-9)


@given(OPS, SIZES, BYTES, BYTES, LATENCIES, BYTE_TIMES)
def test_cost_grows_with_the_bytes(op, g, one, other, alpha, beta):
    few, many = sorted((one, other))
    least, most = (best(op, g, nbytes, alpha, beta) for nbytes in (few, many))
    assert least <= most * (1 + 1e-12)


@pytest.mark.parametrize(
    ("op", "g", "nbytes", "taken"),
    [
        ("all_gather", 8, SHORT, doubling),
        ("all_gather", 6, SHORT, doubling),
        ("all_gather", 8, SHORT + 1, ring),
        ("reduce_scatter", 8, SHORT, doubling),
        ("reduce_scatter", 6, SHORT, ring),
        ("all_reduce", 8, 8, doubling_all_reduce),
        ("all_reduce", 8, 1e9, rabenseifner),
        ("all_reduce", 6, 1e9, ring_all_reduce),
        ("broadcast", 8, 8, binomial),
        ("broadcast", 8, 1e9, chain),
        ("all_to_all", 8, 8, bruck),
        ("all_to_all", 8, 1e9, pairwise),
    ],
)
def test_best_algorithm_matches_that_of_libraries(op, g, nbytes, taken):
    alpha, beta = 1e-5, 1e-10
    assert best(op, g, nbytes, alpha, beta) == taken(alpha, beta, g, nbytes)


def test_ring_and_chain_use_the_adjacent_hop_latency():
    for op, nbytes, cost in (("all_gather", 1e9, ring), ("broadcast", 1e9, chain)):
        assert best(op, 8, nbytes, 1e-5, 1e-10, hop=1e-6) == cost(1e-6, 1e-10, 8, nbytes)
    assert best("all_gather", 8, 8, 1e-5, 0.0, hop=1e-6) == 7e-6
    assert best("all_gather", 8, 8, 1e-6, 0.0, hop=1e-5) == 3e-6


def test_hierarchical_all_reduce_cost():
    """4 members on each of 2 nodes, with a block of 4 MB: 3/4 of it twice within a node, in 3
    steps each, as it is long; between nodes, a quarter of it, 1 MB in and out, in 2 steps."""
    nbytes = 2 * 7 / 8 * 4e6
    inside, across = (4, 1e-6, 1e-11), (2, 1e-5, 1e-10)
    seconds = 2 * (3e-6 + 3e6 * 1e-11) + 2e-5 + 1e6 * 1e-10
    assert hierarchical_all_reduce(nbytes, inside, across) == pytest.approx(seconds, rel=1e-12)
