"""Tables of calls, between threads as ranks."""

import threading

import pytest

pytest.importorskip("torch")

from hpc3d.comm import threads
from hpc3d.partition.profiles.message_timer import timed_calls


class FewRanks:
    """A job on threads, as rank `rank` sees it: what is asked of one."""

    def __init__(self, size, rank=0, barrier=None, values=None):
        self.size, self.rank, self.comm = size, rank, self
        self.barrier = barrier or threading.Barrier(size)
        self.values = values or [None] * size

    def of(self, rank):
        return FewRanks(self.size, rank, self.barrier, self.values)

    def Barrier(self):
        self.barrier.wait()

    def gather(self, value):
        self.values[self.rank] = value
        self.barrier.wait()
        found = [*self.values]
        self.barrier.wait()
        return found


@pytest.fixture(scope="module")
def tables():
    job = FewRanks(3)
    everyone = threads.run({"x": 3}, lambda mesh: timed_calls(job.of(mesh.rank), mesh.world, 1))
    assert everyone[0] == everyone[1] == everyone[2]
    return everyone[0]


def test_send_and_all_reduce_are_timed_at_several_sizes(tables):
    send, total = tables
    assert (send["op"], send["members"]) == ("send", 2)
    assert (total["op"], total["members"]) == ("all_reduce", 3)
    for table in tables:
        assert len(table["bytes"]) == len(table["seconds"]) > 3 and min(table["seconds"]) > 0
    assert send["seconds"][-1] > send["seconds"][0]


def test_timed_bytes_are_the_received_ones(tables):
    """Of a sum of three, two thirds come twice."""
    send, total = tables
    assert total["bytes"] == pytest.approx([4 / 3 * each for each in send["bytes"]])


def test_single_rank_times_no_calls():
    assert timed_calls(FewRanks(1), None, 1) == []
