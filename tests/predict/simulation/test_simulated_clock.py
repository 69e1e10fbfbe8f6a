"""A clock of ranks that share cores and a network card."""

from dataclasses import replace

import numpy as np
import pytest

from hpc3d.arrays.abstract import AbstractPool
from hpc3d.arrays.pool import value_of
from hpc3d.comm.grid import Grid
from hpc3d.predict.simulation.abstract_gpu import DeviceShapes
from hpc3d.predict.simulation.memory_recorder import MemoryRecorder
from hpc3d.predict.simulation.simulated_clock import Clock, HostDrivenClock, representative
from tests.predict.fixed import MACHINE
from tests.predict.machine.test_between_hosts import ALPHA, MB, WIRE, hosts


def call(clock, members=(0, 1), axis="x"):
    """Return a call with half a MB that is waited for."""
    end = clock.post("all_gather", MB / 2, members, axis)
    return clock.until(end, Done())


class Done:
    def wait(self):
        return None


def test_rank_that_waits_for_the_nic_does_not_need_a_core():
    """With a third of a core, the rank's own work takes three times as long, but not its waits."""
    taken = []
    for slowdown in (1.0, 3.0):
        clock = HostDrivenClock(hosts(1), slowdown)
        clock.work(1e-3)
        call(clock).wait()
        taken.append((clock.now, clock.busy, clock.wired))
    (now, busy, wired), (crowded, more, same) = taken
    assert wired == same == round((ALPHA + MB / 2 / WIRE) * 1e9)
    assert now == busy + wired
    assert (more, crowded) == pytest.approx((3 * busy, 3 * busy + wired), abs=3)


def test_work_overlaps_with_network_time():
    clock = HostDrivenClock(hosts(1))
    pending = call(clock)
    clock.work(5e-3)
    pending.wait()
    assert clock.now == pytest.approx(clock.busy + clock.wired, abs=2)
    assert clock.wired == pytest.approx((ALPHA + MB / 2 / WIRE - 5e-3) * 1e9, abs=2)


def test_calls_of_both_queues_share_the_nic():
    """The second call waits for the first, in the same or in another queue."""
    clock, one = HostDrivenClock(hosts(1)), ALPHA + MB / 2 / WIRE
    first, second = call(clock), call(clock, axis="d")
    second.wait()
    assert clock.wired == pytest.approx(2 * one * 1e9, rel=0.05)
    assert clock.now == pytest.approx(clock.busy + clock.wired, abs=2)
    first.wait()
    assert clock.now == pytest.approx(clock.busy + clock.wired, abs=2)


def test_reductions_between_groups_do_not_delay_other_calls():
    """With hybrid sharding, calls along x, d and r run concurrently; those along d and c share a
    queue. Each takes one unit of time."""
    clock, done = Clock(MACHINE), []
    unit = clock.call("all_gather", MB / 2, (0, 1))
    for axis in ("r", "d", "x", "c d", "r"):
        done.append(clock.post("all_gather", MB / 2, (0, 1), axis))
    assert done == [unit, unit, unit, 2 * unit, 2 * unit]


@pytest.mark.parametrize("axes", ["d", "x d", "x d r"])
@pytest.mark.parametrize(
    ("work", "takes"),
    [
        (0.25, 0.5),  # entirely beside a collective of one unit of time
        (0.5, 1.0),
        (2.0, 2.5),  # half of a unit is lost until the collective ends
    ],
)
def test_kernel_takes_longer_while_collectives_run(work, takes, axes):
    """With a contention of 2, whether one or several collectives run at the same time."""
    clock = Clock(replace(MACHINE, contention=2.0))
    unit, *_ = (clock.post("all_gather", MB / 2, (0, 1), axis) for axis in axes.split())
    clock.work(work * unit / 1e9)
    assert (clock.now, clock.busy) == pytest.approx((takes * unit, takes * unit), abs=2)
    begin = clock.now
    clock.reach(unit)
    clock.work(work * unit / 1e9)
    assert clock.now == pytest.approx(max(begin, unit) + work * unit, abs=2)


def test_messages_do_not_slow_down_kernels():
    clock = Clock(replace(MACHINE, contention=2.0))
    clock.send_done(MB, (0, 1), 0)
    clock.pass_on(MB, (0, 1), "c")
    clock.work(1e-5)
    assert clock.now == clock.busy == 10_000


@pytest.mark.parametrize(("computing", "takes"), [(1.0, 1.5), (0.5, 4 / 3), (0.0, 1.0)])
def test_replayed_pass_loses_the_time_of_its_kernels(computing, takes):
    """A pass of one unit of time begins with a collective of the same length.

    Until the collective ends, the pass runs at 1 / (1 + computing) of its speed.
    """
    clock = Clock(replace(MACHINE, contention=2.0))
    unit = clock.post("all_gather", MB / 2, (0, 1), "d")
    clock.advance(unit, round(computing * unit), 0)
    clock.contend(0, round(computing * unit), clock.occupied)
    assert clock.now == pytest.approx(takes * unit, abs=2)
    assert clock.busy == pytest.approx((computing + takes - 1) * unit, abs=3)


LAUNCHED = replace(MACHINE, launch_s=0.0, host_s=5e-6)


@pytest.mark.parametrize(
    ("kernel", "takes"),
    [
        (20, 5 + 10 * 20),  # the GPU is the bottleneck: it waits for the first launch only
        (2, 10 * 5 + 2),  # the host is the bottleneck: the last kernel follows its launch
    ],
)
def test_kernel_starts_when_it_has_been_launched_and_the_gpu_is_free(kernel, takes):
    clock = Clock(LAUNCHED)
    for _ in range(10):
        clock.kernel("gelu", 1e-6 * kernel * MACHINE.memory_bandwidth)
    assert (clock.now, clock.busy) == (1000 * takes, 10_000 * kernel)
    several = Clock(LAUNCHED)
    with several.counting(10):
        several.kernel("gelu", 1e-6 * kernel * MACHINE.memory_bandwidth)
    assert (several.now, several.host) == (clock.now, clock.host)


def test_host_runs_ahead_until_it_waits_for_a_result():
    """A long kernel hides the launches of the next ones, unless the host waits for it."""
    for waits, takes in ((False, 5 + 100 + 3), (True, 5 + 100 + 3 * 5 + 1)):
        clock = Clock(LAUNCHED)
        clock.kernel("gelu", 1e-4 * MACHINE.memory_bandwidth)
        if waits:
            clock.synchronize()
        for _ in range(3):
            clock.kernel("gelu", 1e-6 * MACHINE.memory_bandwidth)
        assert clock.now == 1000 * takes


def test_host_waits_for_values_and_for_calls_over_all_ranks():
    clock = Clock(LAUNCHED)
    pool = DeviceShapes(clock)
    world = representative(Grid({"p": 1, "d": 2}), pool).world
    loss = pool.empty((1,), np.float32)
    for wait in (lambda: value_of(loss), lambda: world.all_reduce(loss)):
        clock.work(1e-3)
        assert clock.host < clock.now
        wait()
        assert clock.host >= clock.now


def test_host_launches_a_graph_once():
    clock = Clock(LAUNCHED)
    clock.begin_graph()
    for _ in range(10):
        clock.kernel("gelu", 1e-6 * MACHINE.memory_bandwidth)
    clock.end_graph()
    assert (clock.now, clock.host) == (15_000, 5000)


def test_host_posts_calls_while_the_gpu_computes():
    """A call starts when the host has posted it, but does not wait for the kernel before."""
    clock = Clock(replace(LAUNCHED, dispatch_s=7e-6))
    clock.work(1e-6)
    unit = clock.call("all_gather", MB / 2, (0, 1))
    assert clock.post("all_gather", MB / 2, (0, 1), "d") == 7000 + unit
    assert clock.send_done(MB / 2, (0, 1), 0) == 14_000 + clock.call("send", MB / 2, (0, 1))
    assert clock.now == 1000


def test_reading_the_clock_does_not_change_it():
    clock = HostDrivenClock(hosts(1))
    call(clock)
    before = dict(vars(clock)), dict(clock.ends)
    for _ in range(3):
        _ = clock.now, clock.busy, clock.wired
        clock.wake_up(clock.now)
    assert (dict(vars(clock)), dict(clock.ends)) == before


def test_mesh_of_any_number_of_ranks_is_simulated_at_once():
    """With 2^60 ranks, neither a mesh nor its recorder could have a list of all ranks."""
    grid = Grid({"p": 1, "d": 1 << 57, "x": 8})
    mesh = representative(grid, AbstractPool(Clock(MACHINE)))
    mesh = mesh.traced(MemoryRecorder(0, lambda: 0))
    block = mesh.empty((2,), "float64")
    pending = [mesh.comm(axis).all_reduce(block) for axis in ("d", "x")]
    pending.append(mesh.world.all_reduce(block))
    assert [each.wait().shape for each in pending] == [(2,)] * 3
    assert 0 < mesh.pool.meter.now < 1e9  # less than a second
