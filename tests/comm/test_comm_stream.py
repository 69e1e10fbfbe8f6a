"""Reuse of the memory that a communication call reads or writes."""

from functools import partial

import pytest

from hpc3d.comm.comm_stream import AsyncCall, CommStream
from tests.comm.test_device_communicators import fresh, on_devices


def test_memory_of_a_posted_call_is_not_reused_before_it_ends():
    """Blocks are released as soon as they are posted, and new ones are allocated at once."""

    def rank(comm):
        pending = [comm.all_gather(fresh(comm, number)) for number in range(20)]
        return [float(each.wait().max()) for each in pending]

    assert on_devices(2, rank) == [[float(number) for number in range(20)]] * 2


def test_memory_of_a_call_without_wait_is_not_reused_early():
    def rank(comm):
        for number in range(20):
            comm.all_reduce(fresh(comm, number))
        return float(comm.all_reduce(fresh(comm, 1.0)).wait().max())

    assert on_devices(2, rank) == [2.0, 2.0]


class Careless(CommStream):
    """Stream that does not keep the arrays of its calls."""

    def post(self, call, *arrays, **how):
        flight = super().post(call, *arrays, **how)
        flight.arrays.clear()
        return flight


class Hasty(CommStream):
    """Stream whose calls do not wait for earlier work, or are not waited for by later work."""

    def __init__(self, device, group, queue, forgets):
        super().__init__(device, group, queue)
        self.forgets = forgets

    def begin(self):
        return super().begin() if self.forgets == "after" else AsyncCall()

    def finish(self, flight):
        if self.forgets == "before":
            super().finish(flight)


@pytest.mark.parametrize(
    "traffic",
    [
        Careless,
        partial(Hasty, forgets="before"),
        partial(Hasty, forgets="after"),
    ],
    ids=["arrays forgotten", "nothing before", "nothing after"],
)
def test_fake_device_detects_missing_stream_ordering(traffic):
    """Each missing rule of CommStream is detected, by a wrong result or by the device."""

    def rank(comm):
        for number in range(20):
            pending, scratch = comm.all_gather(fresh(comm, number)), fresh(comm, -1.0)
            result = pending.wait()
            assert float(result.max()) == float(result.min()) == number, "rubbish"
            del result, scratch

    with pytest.raises((AssertionError, TimeoutError)):
        on_devices(2, rank, "nccl", traffic)
