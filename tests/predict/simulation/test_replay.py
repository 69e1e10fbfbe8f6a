"""A replayed pass has the same memory, calls and peaks as an executed pass."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from hpc3d.arrays.abstract import AbstractPool
from hpc3d.predict.simulation.memory_recorder import MemoryRecorder
from hpc3d.predict.simulation.replay import PassRecorder
from hpc3d.predict.simulation.simulated_clock import Clock
from tests.predict.fixed import MACHINE


def pass_recorder(machine=MACHINE):
    """Return a recorder of a rank without peers."""
    clock = Clock(machine)
    pool, ledger = AbstractPool(clock), MemoryRecorder(0, lambda: clock.now)
    return PassRecorder(SimpleNamespace(pool=pool, comms={}, trace=ledger))


@pytest.mark.parametrize(
    ("freed", "taken"), [("activation", "gradient"), ("gradient", "activation")]
)
def test_replayed_pass_frees_memory_before_it_allocates(freed, taken):
    """800 bytes are released, then 500 are allocated. In none of three passes is the memory above
    its initial value, although it would be in the reverse order."""
    recorder, micro = pass_recorder(), SimpleNamespace(first=0, cache=SimpleNamespace(arrays={}))
    pool = recorder.mesh.pool
    pool.count(taken, 0)  # neither the order in which kinds came nor that of their names matters
    held = [pool.empty((800,), "u1", freed) for _ in range(3)]
    with recorder.record("pass", micro):
        held.pop()
        held.append(pool.empty((500,), "u1", taken))
    for number in (1, 2):  # without an array of their own: what a pass keeps is only counted
        pool.reset_peak()
        with recorder.replay("pass", micro):
            pass
        assert (pool.live[freed], pool.live[taken]) == (800 * (2 - number), 500 * (1 + number))
        assert pool.peak["all"] == 800 * (3 - number) + 500 * number
        assert pool.peak[taken] == 500 * (1 + number)


def test_recorded_pass_loses_as_much_time_to_earlier_collectives_as_its_replay():
    """A kernel of 4 us takes twice as long, and one of 8 us loses half of the 10 us."""
    recorder = pass_recorder(replace(MACHINE, contention=2.0))
    clock, micro = recorder.clock, SimpleNamespace(first=0, cache=SimpleNamespace(arrays={}))
    for kind, work, takes in (("short", 4, 8), ("long", 8, 13)):
        for record in (recorder.record, recorder.replay):
            begin, clock.occupied = clock.now, clock.now + 10_000
            with record(kind, micro):
                if record == recorder.record:
                    clock.work(1e-6 * work)
            assert clock.now - begin == 1000 * takes
            assert clock.occupied == begin + 10_000
    assert recorder.passes["short"].length == recorder.passes["short"].busy == 4000
