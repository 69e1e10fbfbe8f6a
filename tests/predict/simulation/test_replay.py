"""A replayed pass has the same memory, calls and peaks as an executed pass."""

from types import SimpleNamespace

import pytest

from hpc3d.arrays.abstract import AbstractPool
from hpc3d.predict.simulation.memory_recorder import MemoryRecorder
from hpc3d.predict.simulation.replay import PassRecorder
from hpc3d.predict.simulation.simulated_clock import Clock
from tests.predict.fixed import MACHINE


def pass_recorder():
    """Return a recorder of a rank without peers, whose clock does not advance."""
    pool, ledger = AbstractPool(Clock(MACHINE)), MemoryRecorder(0, lambda: 0)
    return PassRecorder(SimpleNamespace(pool=pool, comms={}, trace=ledger))


@pytest.mark.parametrize(
    ("freed", "taken"), [("activation", "gradient"), ("gradient", "activation")]
)
def test_replayed_pass_frees_memory_before_it_allocates(freed, taken):
    """800 bytes are released, then 500 are allocated. In none of three passes is the memory above
    its initial value, although it would be in the reverse order."""
    recorder, micro = pass_recorder(), SimpleNamespace(cache=SimpleNamespace(arrays={}))
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
