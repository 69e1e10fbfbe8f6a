"""Simulated times of messages along the context axis, compared with known values."""

from collections import Counter
from dataclasses import replace
from math import inf

import numpy as np
import pytest

from hpc3d import trace
from hpc3d.arrays.abstract import AbstractPool
from hpc3d.comm.grid import Grid
from hpc3d.model.context import Context
from hpc3d.model.context_attention import Ring
from hpc3d.predict.machine.between_hosts import legs
from hpc3d.predict.machine.machine import Link
from hpc3d.predict.simulation.count import predict
from hpc3d.predict.simulation.simulated_clock import Clock, HostDrivenClock, representative
from hpc3d.predict.simulation.simulator import simulate, step_length
from hpc3d.predict.simulation.summary import summary, waits_of
from hpc3d.predict.simulation.write_trace import write_trace
from hpc3d.trace.schema import MESSAGE_CODES, OP
from tests.pipeline.mixes import config_of
from tests.predict.fixed import ALPHA, FLOPS, LAUNCH, LINE, MACHINE
from tests.predict.machine.test_between_hosts import ALPHA as FAR
from tests.predict.machine.test_between_hosts import WIRE, hosts

MB = 10**6


def ring_of(clock, size=4, heads=1, length=64):
    """Return the Ring of a rank with this clock, and a block of 1 MB."""
    context = Context(length, size // heads, heads)
    mesh = representative(Grid({"p": 1, "c": size}), AbstractPool(clock), context=context)
    return Ring(mesh.comm("c"), context), mesh.empty((MB,), np.uint8)


def around(clock, work, size=4):
    """Return the seconds of a trip of a block around a ring, with `work` seconds per hop."""
    ring, block = ring_of(clock, size)
    for _ in ring.around(block):
        clock.work(work)
    return clock.now / 1e9


@pytest.mark.parametrize("work", [0.0, 2e-5, 1e-3])
def test_ring_hop_takes_the_longer_of_message_and_work(work):
    """A hop takes the maximum of its message and its work; the last work has no message."""
    message = LAUNCH + ALPHA + MB / LINE
    expected = 3 * max(work, message) + work
    assert around(Clock(MACHINE), work) == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize(("ranks", "work"), [(4, 1e-3), (1, 1e-3), (1, 0.1)])
def test_core_moves_the_blocks_of_a_ring(ranks, work):
    """A core sends and receives a block in each of three hops; between hosts, the network card
    moves blocks while the core computes."""
    machine = hosts(ranks)
    send, recv = (legs(machine, op, MB, (0, 1)) for op in ("send", "recv"))
    assert send.wired == pytest.approx((FAR + MB / WIRE) * (ranks == 1))
    expected = 3 * (send.work + recv.work + max(send.wired, work)) + work
    assert around(HostDrivenClock(machine), work) == pytest.approx(expected, rel=1e-6)


def test_message_waits_for_earlier_calls_of_its_queue():
    clock = Clock(MACHINE)
    ring, block = ring_of(clock, 2)
    end = clock.post("all_gather", MB, (0, 1), "x")
    ring.pass_on(block).wait()
    assert clock.now == end + clock.call("send", MB, (0, 1))


def test_slowest_message_of_a_ring_and_of_ulysses():
    """On nodes of four, a ring of eight crosses nodes. An exchange among four does not, and its
    ring crosses only as often as necessary."""
    machine = replace(MACHINE, ranks_per_node=4, links=(Link(4, 1e-6, 1e11), Link(0, 1e-5, 1e9)))
    ring, _ = ring_of(Clock(machine), 8)
    assert ring.comm.slowest(ring.peer(1)) == (3, 4)
    ring, _ = ring_of(Clock(machine), 8, heads=4)
    assert ring.peer(1) == 4 and machine.nodes(ring.comm.slowest(4))[0] == 2
    for peer in (1, 2, 3):
        low, high = ring.comm.slowest(peer)
        assert low // 4 == high // 4


@pytest.mark.parametrize(("size", "heads"), [(4, 1), (4, 2), (6, 3), (8, 2), (3, 1)])
def test_ring_neighbors_of_all_ranks_are_equally_distant(size, heads):
    context = Context(24 * size, size // heads, heads)

    class Rank:
        def __init__(self, rank):
            self.rank, self.size = rank, size

    first = Ring(Rank(0), context)
    for number in range(size):
        here = Ring(Rank(number), context)
        for step in range(1, first.size):
            assert context.peer(number, first.peer(step)) == here.peer(step)
            assert context.peer(number, first.peer(-step)) == here.peer(-step)
        others = {context.peer(number, member) for member in range(1, heads)}
        start = number // heads * heads
        assert others == {*range(start, start + heads)} - {number}


NO_WORK = replace(
    MACHINE,
    launch_s=0.0,
    memory_bandwidth=inf,
    gemm={"float64": replace(MACHINE.gemm["float64"], rate=(1e300,))},
)
RING = "c=4 schedule=none microbatches=2 sequence=64 batch=4 layers=3 kind=llama kv_heads=4 ffn=48"


def test_ring_wait_equals_its_message_time_without_work():
    """2 (r - 1) keys and values and r - 1 gradients of them per layer and microbatch; K has 2
    sequences of 16 tokens with 4 heads of 2 features."""
    config = config_of(RING)
    (run,) = simulate(config, 29, NO_WORK)
    message = ALPHA + 2 * (2 * 16 * 4 * 2) * 8 / LINE
    assert waits_of(run)["c"] == pytest.approx(3 * 2 * 9 * message, rel=1e-3)


def test_free_links_cause_no_wait():
    quick = replace(MACHINE, launch_s=0.0, links=(Link(0, 0.0, inf),))
    (run,) = simulate(config_of(RING), 29, quick)
    assert waits_of(run)["c"] == 0 and step_length([run]) > 0


def test_mfu_counts_full_attention_and_hfu_the_executed_work():
    """A causal ring of four computes 9/16 of it, times 14/12 because it recomputes scores."""
    config = config_of(RING)
    runs = simulate(config, 29, MACHINE)
    found = summary(runs, config, MACHINE)
    tokens, hidden, peak = 4 * 64, 24, 4 * FLOPS * found["step_time_s"]
    square = 3 * 3 * tokens * 4 * 64 * hidden
    products = 3 * tokens * 2 * (3 * (hidden * (40 + 24) + 3 * 48 * hidden) + 29 * hidden)
    assert found["mfu"] * peak == pytest.approx(square + products, rel=1e-9)
    padded = 3 * tokens * 2 * 3 * hidden  # columns of the vocabulary, for 4 ranks
    done = 14 / 12 * 9 / 16 * square + products
    assert found["hfu"] * peak == pytest.approx(done, abs=padded)


@pytest.mark.parametrize("window", [1, 9, 16])
def test_simulated_rank_has_the_attention_of_the_busiest_rank(window):
    """The first chunks of the sequence have fewer keys in their windows."""
    config = config_of(f"{RING} window={window} global_every=2")
    (run,) = simulate(config, 29, MACHINE)
    found = [predict(config, 29, config.grid().coords(rank)).flops() for rank in range(4)]
    rows = run.rows[run.rows["op"] == OP.index("attention")]
    counts = [flops["attention"] for flops in found]
    assert rows["flops"].sum() == max(counts) and len({*counts}) > (window > 1)


@pytest.mark.parametrize(
    "line",
    [
        RING,
        f"{RING} window=5",
        "c=6 x=2 sequence=12 context=both ulysses=3",
        "c=8 sequence=64 context=both ulysses=2 window=3",
    ],
)
def test_simulated_trace_has_the_real_ring_peers(line, tmp_path):
    config = config_of(line)
    path = write_trace(tmp_path, simulate(config, 29, MACHINE), config, MACHINE)
    grid = config.grid()
    with trace.open(path) as opened:
        events = opened.events.columns()
        for rank in range(grid.size):
            wanted = predict(config, 29, grid.coords(rank)).events
            here = np.isin(events["op"], MESSAGE_CODES) & (events["rank"] == rank)
            here &= events["peer"] >= 0
            real = wanted[np.isin(wanted["op"], MESSAGE_CODES)]
            assert Counter(zip(events["op"][here], events["peer"][here])) == Counter(
                zip(real["op"].tolist(), real["peer"].tolist())
            )
