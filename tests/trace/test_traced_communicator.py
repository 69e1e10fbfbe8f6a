"""Rows that a traced communicator records."""

import numpy as np
import pytest

from hpc3d.comm import threads
from hpc3d.comm.communicator import Communicator, Pending
from hpc3d.trace.recorder import Recorder
from hpc3d.trace.schema import CATEGORY, DTYPE, OP
from tests.trace.recording import end_step, recorded


class Fake(Communicator):
    """Member 1 of ranks 3, 5, 7; posting a call takes 100 ns, and waiting takes 1000 ns."""

    def __init__(self, clock):
        super().__init__(1, 3, (3, 5, 7))
        self.clock = clock

    def slow(self, result):
        self.clock.skip(100)

        def finish():
            self.clock.skip(1000)
            return result

        return Pending(finish)

    def _all_gather(self, block):
        return self.slow(np.concatenate([block] * 3))

    def _reduce_scatter(self, block):
        return self.slow(block[: len(block) // 3])

    def _all_reduce(self, block, op):
        return self.slow(block)

    def _broadcast(self, block, root):
        return self.slow(np.zeros((6, 2)))

    def _reduce(self, block, root):
        return self.slow(block)

    def _all_to_all(self, block):
        return self.slow(block)

    def _send(self, block, peer):
        return self.slow(block)

    def _recv(self, shape, dtype, peer):
        return self.slow(np.zeros(shape, dtype))


BLOCK = np.zeros((6, 2))  # 96 bytes
CALLS = {
    # op: (the call, bytes to receive, peer)
    "all_gather": (lambda comm: comm.all_gather(BLOCK), 192, -1),
    "reduce_scatter": (lambda comm: comm.reduce_scatter(BLOCK), 64, -1),
    "all_reduce": (lambda comm: comm.all_reduce(BLOCK), 128, -1),
    "broadcast": (lambda comm: comm.broadcast(BLOCK[:0], 2), 96, 7),
    "reduce": (lambda comm: comm.reduce(BLOCK, 2), 96, 7),
    "all_to_all": (lambda comm: comm.all_to_all(BLOCK), 64, -1),
    "send": (lambda comm: comm.send(BLOCK, 0), 96, 3),
    "recv": (lambda comm: comm.recv((6, 2), np.dtype(float), 0), 96, 3),
}


@pytest.mark.parametrize("op", CALLS)
def test_call_row_has_the_received_bytes_and_peer(op, recorder, clock):
    call, received, peer = CALLS[op]
    comm = recorder.wrap(Fake(clock), "y")
    recorder.begin_step(0)
    pending = call(comm)
    clock.skip(77_000)  # computing, while the block is on its way
    pending.wait()
    copy, row = recorded(recorder).events
    assert OP[row["op"]] == OP[copy["op"]] == op
    assert (row["bytes"], row["peer"]) == (received, peer)
    assert (row["group"], row["seq"], CATEGORY[row["category"]]) == (0, 0, "comm")
    assert (copy["group"], copy["seq"], CATEGORY[copy["category"]]) == (0, -1, "copy")
    assert DTYPE[row["dtype"]] == "float64"
    assert copy["dur"] + row["dur"] == 1100 + 2 * 10 == recorder.communication
    assert row["posted"] == copy["t_start"] == row["t_start"] - copy["dur"] - 77_000 - 10


def test_immediately_awaited_call_is_one_row(recorder, clock):
    comm = recorder.wrap(Fake(clock), "y")
    comm.all_gather(BLOCK).wait()
    (row,) = recorded(recorder).events
    assert row["posted"] == row["t_start"]
    assert row["dur"] == recorder.communication == 1100 + 3 * 10


def test_interleaved_calls_do_not_overlap(recorder, clock):
    """Two calls are posted, then both are waited for at once; the first wait takes some time."""
    x, y = (recorder.wrap(Fake(clock), axis) for axis in "xy")
    first, second = x.all_gather(BLOCK), y.all_gather(BLOCK)
    first.wait()
    second.wait()
    rows = np.sort(recorded(recorder).events, order="t_start")
    assert [CATEGORY[row["category"]] for row in rows] == ["copy", "copy", "comm", "comm"]
    assert (rows["t_start"][1:] >= (rows["t_start"] + rows["dur"])[:-1]).all()


def test_call_awaited_in_the_next_step_keeps_its_posting_step(recorder, clock):
    comm = recorder.wrap(Fake(clock), "y")
    recorder.begin_step(4)
    pending = comm.recv((6, 2), np.dtype(float), 0)
    end_step(recorder)
    recorder.begin_step(5)
    pending.wait()
    copy, row = recorded(recorder).events
    assert (copy["step"], row["step"]) == (4, 5)


def test_root_receives_no_bytes_of_a_broadcast(recorder, clock):
    comm = recorder.wrap(Fake(clock), "y")
    comm.broadcast(BLOCK, 1).wait()
    comm.reduce(BLOCK, 0).wait()
    assert recorded(recorder).events["bytes"].tolist() == [0, 0]


def test_calls_are_numbered_per_group_in_posting_order(recorder, clock):
    x, y = (recorder.wrap(Fake(clock), axis) for axis in "xy")
    pending = [x.all_gather(BLOCK), y.all_gather(BLOCK), x.all_reduce(BLOCK)]
    for one in reversed(pending):
        one.wait()
    segment = recorded(recorder)
    numbered = segment.events[segment.events["seq"] >= 0]
    assert numbered[["group", "seq"]].tolist() == [(0, 1), (1, 0), (0, 0)]
    groups = [{"axis": axis, "members": [3, 5, 7]} for axis in "xy"]
    assert segment.header["groups"] == groups


def test_traced_communicator_returns_the_same_results():
    def rank(mesh):
        comm = mesh.comm("x")
        recorder = Recorder(None, {"rank": mesh.rank})
        traced = mesh.traced(recorder).comm("x")
        assert (traced.rank, traced.size, traced.members) == (comm.rank, comm.size, comm.members)
        block = np.arange(4.0) + comm.rank
        results = [
            [
                one.all_gather(block, 0).wait(),
                one.reduce_scatter(block).wait(),
                one.all_reduce(block, "max").wait(),
                one.broadcast(block if comm.rank else block[:0], 1).wait(),
            ]
            for one in (comm, traced)
        ]
        for plain, ours in zip(*results, strict=True):
            np.testing.assert_array_equal(plain, ours)
        return recorder.count

    assert threads.run({"x": 2}, rank) == [4, 4]
