"""What a rank records: exact rows under a clock of our own, and the bytes that design gives."""

import tracemalloc

import numpy as np
import pytest

from hpc3d.arrays.pool import Pool
from hpc3d.comm import threads
from hpc3d.comm.communicator import Communicator, Pending
from hpc3d.comm.mesh import NullRecorder
from hpc3d.predict.simulation.memory_recorder import MemoryRecorder
from hpc3d.trace.recorder import MOST, ROW, Recorder
from hpc3d.trace.schema import CATEGORY, DTYPE, MEMORY_KIND, OP, PHASE
from hpc3d.trace.segment import count_segments, read_segment, segment_path

HEADER = {"rank": 3, "world_size": 8}


class Clock:
    """Nanoseconds that pass by 10 a reading, or by `skip`."""

    def __init__(self):
        self.now = 0

    def __call__(self):
        self.now += 10
        return self.now

    def skip(self, duration):
        self.now += duration


class Fake(Communicator):
    """Member 1 of ranks 3, 5, 7; a call takes 100 ns to post and 1000 ns to wait for."""

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


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def recorder(tmp_path, clock):
    (tmp_path / "trace").mkdir()
    return Recorder(tmp_path, HEADER, capacity=64, clock=clock)


def recorded(recorder):
    """The first segment, written now if there is none."""
    if not recorder.segments:
        recorder.flush()
    return read_segment(segment_path(recorder.run_dir, 3, 0), 3)


def end_step(recorder, pool=None):
    recorder.end_step(pool or Pool(), 96, 5.5, 2.0, 1e-3, 0.25, 0.5)


@pytest.mark.parametrize("kind", ["records", "keeps rows in memory", "records nothing"])
def test_a_scope_is_of_a_layer_and_a_phase_and_restores_them(recorder, kind):
    """Inside of each other, and when an error leaves them."""
    if kind != "records":
        recorder = NullRecorder() if kind == "records nothing" else MemoryRecorder(0, lambda: 0)
    seen = []

    def look():
        seen.append((recorder.layer, recorder.phase))

    look()
    with pytest.raises(KeyError), recorder.scope(phase="backward"):
        look()
        with recorder.scope(layer=2):
            look()
            with recorder.scope(layer=5, phase="recompute"):
                look()
            look()
            with recorder.scope(layer=0, phase="optimizer"):
                look()
                raise KeyError
    look()
    back = -1, "backward"
    inside = [(2, "backward"), (5, "recompute"), (2, "backward"), (0, "optimizer")]
    assert seen == [(-1, "other"), back, *inside, (-1, "other")]


def test_a_span_is_a_row(recorder, clock):
    recorder.begin_step(7)
    with recorder.scope(2, "backward"), recorder.span("product", "gemm", flops=48):
        clock.skip(500)
    with recorder.scope(phase="optimizer"), recorder.span("update"):
        pass
    segment = recorded(recorder)
    first, second = segment.events
    assert first["dur"] == 510
    assert first["t_start"] == first["t_global"] == second["t_start"] - 520
    assert (first["rank"], first["step"], first["layer"], first["flops"]) == (3, 7, 2, 48)
    assert (first["group"], first["seq"], first["peer"], first["parent"]) == (-1, -1, -1, -1)
    names = [segment.header["strings"][row["name"]] for row in (first, second)]
    assert names == ["product", "update"]
    assert [CATEGORY[row["category"]] for row in (first, second)] == ["compute", "optimizer"]
    assert [PHASE[row["phase"]] for row in (first, second)] == ["backward", "optimizer"]
    assert [OP[row["op"]] for row in (first, second)] == ["gemm", "elementwise"]


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
def test_a_call_is_a_row_with_what_must_be_received(op, recorder, clock):
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


def test_a_call_that_is_waited_for_at_once_is_one_row(recorder, clock):
    comm = recorder.wrap(Fake(clock), "y")
    comm.all_gather(BLOCK).wait()
    (row,) = recorded(recorder).events
    assert row["posted"] == row["t_start"]
    assert row["dur"] == recorder.communication == 1100 + 3 * 10


def test_calls_that_cross_each_other_do_not_overlap(recorder, clock):
    """Two posted, two waited for, all at once: the first wait is longer than nothing."""
    x, y = (recorder.wrap(Fake(clock), axis) for axis in "xy")
    first, second = x.all_gather(BLOCK), y.all_gather(BLOCK)
    first.wait()
    second.wait()
    rows = np.sort(recorded(recorder).events, order="t_start")
    assert [CATEGORY[row["category"]] for row in rows] == ["copy", "copy", "comm", "comm"]
    assert (rows["t_start"][1:] >= (rows["t_start"] + rows["dur"])[:-1]).all()


def test_a_call_that_is_waited_for_in_the_next_step_was_made_in_its_own(recorder, clock):
    comm = recorder.wrap(Fake(clock), "y")
    recorder.begin_step(4)
    pending = comm.recv((6, 2), np.dtype(float), 0)
    end_step(recorder)
    recorder.begin_step(5)
    pending.wait()
    copy, row = recorded(recorder).events
    assert (copy["step"], row["step"]) == (4, 5)


def test_the_root_receives_nothing_of_a_broadcast(recorder, clock):
    comm = recorder.wrap(Fake(clock), "y")
    comm.broadcast(BLOCK, 1).wait()
    comm.reduce(BLOCK, 0).wait()
    assert recorded(recorder).events["bytes"].tolist() == [0, 0]


def test_calls_count_a_group_each_in_the_order_of_posting(recorder, clock):
    x, y = (recorder.wrap(Fake(clock), axis) for axis in "xy")
    pending = [x.all_gather(BLOCK), y.all_gather(BLOCK), x.all_reduce(BLOCK)]
    for one in reversed(pending):
        one.wait()
    segment = recorded(recorder)
    numbered = segment.events[segment.events["seq"] >= 0]
    assert numbered[["group", "seq"]].tolist() == [(0, 1), (1, 0), (0, 0)]
    groups = [{"axis": axis, "members": [3, 5, 7]} for axis in "xy"]
    assert segment.header["groups"] == groups


def test_a_traced_communicator_gives_what_the_other_gives():
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


def test_a_step_is_a_row_with_its_memory(recorder):
    pool = Pool()
    held = pool.empty((10,), "float64", "gradient")
    recorder.begin_step(4)
    dropped = pool.empty((100,), "float64", "activation")
    del dropped
    end_step(recorder, pool)
    recorder.phase = "forward"
    with recorder.span("between steps"):
        pass
    del held
    segment = recorded(recorder)
    (step,) = segment.steps
    assert step["t_end"] - step["t_start"] == 10
    names = ["rank", "step", "tokens", "loss", "grad_norm", "learning_rate"]
    assert [step[name] for name in names] == [3, 4, 96, 5.5, 2.0, 1e-3]
    assert (step["forward_s"], step["backward_s"], step["skipped"]) == (0.25, 0.5, 0)
    memory = {MEMORY_KIND[row["kind"]]: (row["bytes"], row["peak"]) for row in segment.memory}
    assert memory["gradient"] == (80, 80)
    assert memory["activation"] == (0, 800)
    assert memory["all"] == (80, 880)
    assert segment.events["step"].tolist() == [-1]


def fill(recorder, events):
    recorder.begin_step(0)
    for number in range(events):
        with recorder.span("event", flops=number):
            pass


def test_a_full_table_grows_and_keeps_every_event(recorder):
    fill(recorder, 1000)
    segment = recorded(recorder)
    assert segment.events["flops"].tolist() == [*range(1000)]
    assert segment.header["dropped"] == 0
    assert recorder.capacity == 1024


def test_a_table_is_a_gibibyte_at_most():
    assert MOST * ROW.size <= 2**30 < (MOST + 1) * ROW.size


def test_a_table_that_may_not_grow_counts_what_it_drops(tmp_path, clock):
    recorder = Recorder(tmp_path, HEADER, capacity=64, clock=clock, most=100)
    fill(recorder, 170)
    segment = recorded(recorder)
    assert segment.events["flops"].tolist() == [*range(100)]
    assert segment.header["dropped"] == 70


def test_what_is_read_is_of_category_io(recorder):
    with recorder.span("read the text", "none"):
        pass
    (row,) = recorded(recorder).events
    assert (CATEGORY[row["category"]], OP[row["op"]]) == ("io", "none")


def test_a_segment_is_written_between_steps_only_when_it_is_due(recorder, clock, tmp_path):
    def step(number, events):
        recorder.begin_step(number)
        for _ in range(events):
            with recorder.span("event"):
                pass
        end_step(recorder)
        return count_segments(tmp_path).get(3, 0)

    assert step(0, 32) == 0  # half full is not yet more than half
    assert step(1, 1) == 1
    assert step(2, 1) == 1
    clock.skip(31_000_000_000)
    assert step(3, 1) == 2
    events = [read_segment(segment_path(tmp_path, 3, number), 3).events for number in (0, 1)]
    assert [part["step"].tolist() for part in events] == [[0] * 32 + [1], [2, 3]]


def test_an_event_allocates_nothing_that_stays(tmp_path, clock):
    recorder = Recorder(tmp_path, HEADER, capacity=6000, clock=clock)

    def events():
        for _ in range(3000):
            with recorder.span("event", "gemm", 1.0):
                pass

    events()
    tracemalloc.start()
    events()
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held < 3000
