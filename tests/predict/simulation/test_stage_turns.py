"""Simulated stages run one at a time and never deadlock."""

import threading
from functools import partial

import pytest

from hpc3d.predict.simulation.stage_turns import StageTurns


def test_stages_exchange_times_and_only_one_runs_at_a_time():
    """Messages are received in the order in which they are expected, not in the order of waits."""
    running = threading.Lock()

    def stage(step, peers):
        assert running.acquire(blocking=False)
        before, after = (peers.rank + step) % peers.size, (peers.rank - step) % peers.size
        for number in range(3):
            peers.send(100 * peers.rank + number, after)
        first, second, third = (peers.recv(before) for _ in range(3))
        running.release()
        found = [wait() for wait in (third, first, second)]
        latest = [peers.latest(peers.rank * sign) for sign in (1, -1)]
        assert found == [100 * before + number for number in (2, 0, 1)]
        return latest

    for step in (1, 2):
        assert StageTurns(5).run(partial(stage, step)) == [[4, 0]] * 5
    assert StageTurns(1).run(lambda peers: peers.latest(7)) == [7]


def test_failed_stage_stops_the_waiting_ones():
    stopped = []

    def stage(peers):
        if peers.rank == 2:
            raise ValueError("stage 2")
        try:
            peers.recv(2)() if peers.rank else peers.latest(0)
        except Exception:
            stopped.append(peers.rank)
            raise

    with pytest.raises(ValueError, match="stage 2"):
        StageTurns(4).run(stage)
    assert sorted(stopped) == [0, 1]  # stage 3 has not begun


def test_stages_that_wait_for_each_other_are_refused():
    with pytest.raises(RuntimeError, match="deadlock: the simulated stages 0, 1 cannot proceed"):
        StageTurns(3).run(lambda peers: peers.rank == 2 or peers.recv(1 - peers.rank)())
