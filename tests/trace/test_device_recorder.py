"""Recording of device events without waiting for the device within a step."""

import numpy as np
import pytest

from hpc3d.arrays.pool import Pool
from hpc3d.comm.mesh import queue_of
from hpc3d.trace.device_recorder import DeviceRecorder
from hpc3d.trace.schema import CATEGORY, OP
from hpc3d.trace.segment import read_segment, segment_path
from tests.fakes.timed_device import TICK, Comm, Simulated, TimedDevice

EXACT = 2_000  # ns by which a time may be wrong: half of a look at the clock, and ticks
BLOCK = np.zeros(500, np.float32)
RESULTS = 64, 2.5, 1.0, 1e-3, 9.0, 9.0  # of a step: tokens, loss ... and the host's seconds


@pytest.fixture
def host():
    return Simulated()


@pytest.fixture
def device(host):
    return TimedDevice(host)


@pytest.fixture
def recorder(tmp_path, device, host):
    (tmp_path / "trace").mkdir()
    return DeviceRecorder(tmp_path, {"rank": 0}, device, device.timing, clock=host)


def segment(recorder, number=0):
    recorder.flush()
    return read_segment(segment_path(recorder.run_dir, 0, number), 0)


def rows(recorder, stream):
    """Return (name, start, end) of the events on a stream, sorted by start."""
    found = segment(recorder)
    events = np.sort(found.events[found.events["stream"] == stream], order="t_start")
    names, starts = found.header["strings"], events["t_start"].tolist()
    ends = (events["t_start"] + events["dur"]).tolist()
    return [(names[name], *times) for name, *times in zip(events["name"], starts, ends)]


def agree(found, expected):
    assert [name for name, *_ in found] == [name for name, *_ in expected]
    for (_, *times), (_, *truth) in zip(found, expected):
        assert np.abs(np.subtract(times, truth)).max() <= EXACT


def work(recorder, device, name, duration, op="gemm"):
    """Record a span with device work; return its name, start and end."""
    with recorder.span(name, op):
        return name, *device.compute.work(duration)


def step(recorder, device, number, spans=3, duration=200_000):
    recorder.begin_step(number)
    done = [work(recorder, device, f"span {n}", duration) for n in range(spans)]
    recorder.end_step(Pool(), *RESULTS)
    return done


def test_span_records_device_time_not_host_time(recorder, device, host):
    recorder.begin_step(0)
    begin = host()
    done = [work(recorder, device, name, 300_000) for name in ("a", "b", "c")]
    posted = host()
    assert posted - begin < 30_000
    recorder.end_step(Pool(), *RESULTS)
    agree(rows(recorder, 1), done)


def test_idle_time_between_spans_belongs_to_none(recorder, device):
    recorder.begin_step(0)
    first = work(recorder, device, "a", 50_000)
    device.compute.work(70_000)
    second = work(recorder, device, "b", 50_000)
    recorder.end_step(Pool(), *RESULTS)
    assert second[1] - first[2] >= 70_000
    agree(rows(recorder, 1), [first, second])


def test_host_spans_are_on_their_own_stream(recorder, device, host):
    recorder.begin_step(0)
    with recorder.span("read the text", "none"):
        begin = host()
        host.skip(40_000)
    work(recorder, device, "a", 50_000)
    recorder.end_step(Pool(), *RESULTS)
    look, read = rows(recorder, 0)
    assert look[0] == "clock of the device" and 0 < look[2] - look[1] < 10_000
    agree([read], [("read the text", begin, begin + 40_000)])


def test_clock_drift_is_corrected(tmp_path, host):
    """The drift is 1 in 10,000: without a correction, a step of 1 s would be wrong by 0.1 ms."""
    (tmp_path / "trace").mkdir()
    device = TimedDevice(host, drift=1e-4)
    recorder = DeviceRecorder(tmp_path, {"rank": 0}, device, device.timing, clock=host)
    for number in range(3):
        done = step(recorder, device, number, duration=500_000_000)
    agree(rows(recorder, 1)[-3:], done)


def test_interrupted_clock_reading_is_discarded(recorder, device, host):
    step(recorder, device, 0)
    host.lag.extend([0, 400_000])
    done = step(recorder, device, 1) + step(recorder, device, 2)
    assert not host.lag
    agree(rows(recorder, 1)[3:], done)


def test_step_contains_its_events(recorder, device):
    for number in range(3):
        step(recorder, device, number)
    found = segment(recorder)
    for each in found.steps:
        own = found.events[found.events["step"] == each["step"]]
        assert len(own) == 4
        assert each["t_start"] <= own["t_start"].min()
        assert (own["t_start"] + own["dur"]).max() <= each["t_end"]


def test_pass_seconds_are_device_times(recorder, device):
    for number in range(2):
        recorder.begin_step(number)
        for phase, duration in [("forward", 100_000), ("recompute", 30_000), ("backward", 70_000)]:
            recorder.phase = phase
            work(recorder, device, phase, duration)
        recorder.phase = "optimizer"
        work(recorder, device, "update", 500_000)
        recorder.end_step(Pool(), *RESULTS)
    steps = segment(recorder).steps
    np.testing.assert_allclose(steps["forward_s"], 100e-6, atol=2e-6)
    np.testing.assert_allclose(steps["backward_s"], 100e-6, atol=4e-6)
    assert steps["loss"].tolist() == [2.5, 2.5]


def call_rows(recorder):
    found = segment(recorder)
    events = found.events[np.isin(found.events["stream"], (1, 2))]
    kinds = [CATEGORY[each] for each in events["category"]]
    return {kind: events[[each == kind for each in kinds]] for kind in set(kinds)}


def test_overlapped_call_has_no_exposed_time(recorder, device):
    comm = recorder.wrap(Comm(device), "x")
    recorder.begin_step(0)
    before = work(recorder, device, "before", 50_000)
    pending = comm.all_gather(BLOCK)
    meanwhile = work(recorder, device, "meanwhile", 400_000)
    whole = pending.wait()
    assert whole.shape == (1000,) and recorder.communication < EXACT
    recorder.end_step(Pool(), *RESULTS)
    kinds = call_rows(recorder)
    (stall,), (flight,) = kinds["comm"], kinds["copy"]
    assert (stall["stream"], flight["stream"]) == (1, 2)
    (start, end) = comm.comm.ran[0]
    assert abs(flight["t_start"] - start) < 4 * EXACT and flight["t_start"] >= before[2] - EXACT
    assert abs(flight["t_start"] + flight["dur"] - end) < EXACT
    assert stall["dur"] < EXACT and abs(stall["t_start"] - meanwhile[2]) < EXACT
    assert abs(stall["posted"] - before[2]) < EXACT
    assert (stall["seq"], flight["seq"]) == (0, -1)
    assert (stall["bytes"], flight["bytes"]) == (2000, 0)
    assert (stall["count"], OP[stall["op"]], OP[flight["op"]]) == (500, "all_gather", "all_gather")


def test_computation_stalls_until_a_block_arrives(recorder, device):
    comm = recorder.wrap(Comm(device, lasts=300_000), "x")
    recorder.begin_step(0)
    pending = comm.all_gather(BLOCK)
    meanwhile = work(recorder, device, "meanwhile", 100_000)
    pending.wait()
    after = work(recorder, device, "after", 10_000)
    spent = recorder.communication
    recorder.end_step(Pool(), *RESULTS)
    kinds = call_rows(recorder)
    (stall,) = kinds["comm"]
    ended = comm.comm.ran[0][1]
    assert abs(stall["t_start"] - meanwhile[2]) < EXACT
    assert abs(stall["t_start"] + stall["dur"] - ended) < EXACT and after[1] >= ended
    assert abs(spent - (ended - meanwhile[2])) < 2 * EXACT


def test_immediately_awaited_call_is_one_stall_row(recorder, device):
    comm = recorder.wrap(Comm(device), "x")
    recorder.begin_step(0)
    comm.all_gather(BLOCK).wait()
    recorder.end_step(Pool(), *RESULTS)
    kinds = call_rows(recorder)
    (stall,) = kinds["comm"]
    assert stall["posted"] == stall["t_start"] and stall["dur"] > 100_000


def test_unrecorded_compute_between_call_and_wait_is_no_stall(recorder, device, host):
    comm = recorder.wrap(Comm(device), "x")
    recorder.begin_step(0)
    pending = comm.all_gather(BLOCK)
    _, computed = device.compute.work(200_000)
    host.skip(50_000)
    pending.wait()
    recorder.end_step(Pool(), *RESULTS)
    (stall,) = call_rows(recorder)["comm"]
    assert abs(stall["t_start"] - computed) < EXACT and stall["dur"] < EXACT
    assert stall["t_start"] - stall["posted"] > 190_000


def test_call_that_blocks_the_host_has_its_own_row(recorder, device):
    comm = recorder.wrap(Comm(device, host=150_000), "x")
    recorder.begin_step(0)
    pending = comm.all_gather(BLOCK)
    work(recorder, device, "meanwhile", 300_000)
    pending.wait()
    spent = recorder.communication
    recorder.end_step(Pool(), *RESULTS)
    kinds = call_rows(recorder)
    (stall,) = kinds["comm"]
    (kept,) = kinds["copy"][kinds["copy"]["stream"] == 1]
    assert kept["t_start"] == stall["posted"] and abs(kept["dur"] - 150_000) < 8 * EXACT
    assert abs(spent - kept["dur"] - stall["dur"]) < EXACT
    assert kept["group"] == 0 and kept["seq"] == -1


def test_grouped_messages_are_one_transfer_row(recorder, device):
    comm = recorder.wrap(Comm(device), "p")
    recorder.begin_step(0)
    with comm.grouped():
        pending = [comm.send(BLOCK, 1), comm.recv((4,), np.float32, 1)]
    work(recorder, device, "meanwhile", 10_000)
    for each in pending:
        each.wait()
    recorder.end_step(Pool(), *RESULTS)
    kinds = call_rows(recorder)
    (flight,), both = kinds["copy"], kinds["comm"]
    assert [OP[op] for op in both["op"]] == ["send", "recv"]
    assert both["seq"].tolist() == [0, 0] and both["peer"].tolist() == [1, 1]
    assert abs(flight["t_start"] + flight["dur"] - comm.comm.ran[0][1]) < EXACT


def test_world_calls_use_the_host_recorder(recorder, device, host):
    world = recorder.wrap(Comm(device), "world")
    assert type(world).__name__ == "Traced"


def test_steady_step_creates_no_events_and_waits_only_at_its_ends(recorder, device):
    comm, counts = recorder.wrap(Comm(device), "x"), []
    for number in range(8):
        recorder.begin_step(number)
        waits, created = device.waits, device.created
        for _ in range(700):
            pending = comm.all_gather(BLOCK)
            work(recorder, device, "meanwhile", 20_000)
            pending.wait()
        counts.append((device.waits - waits, device.created - created))
        recorder.end_step(Pool(), *RESULTS)
        assert len(recorder.compute.events) <= 5 * 700 + 1
    assert all(waits == 0 for waits, _ in counts)
    # Of these, every call of Traffic makes two.
    assert [created for _, created in counts[-3:]] == [2 * 700] * 3


def test_unfinished_device_work_is_written_to_the_next_segment(recorder, device):
    """The all-gather of one step ends in the next step, and is in the second segment."""
    comm = recorder.wrap(Comm(device, lasts=5_000_000), "x")
    recorder.begin_step(0)
    first = work(recorder, device, "a", 100_000)
    pending = comm.all_gather(BLOCK)
    recorder.end_step(Pool(), *RESULTS)
    agree(rows(recorder, 1), [first])
    recorder.begin_step(1)
    second = work(recorder, device, "b", 100_000)
    pending.wait()
    recorder.end_step(Pool(), *RESULTS)
    found = segment(recorder, 1)
    streams = found.events["stream"].tolist()
    assert sorted(streams) == [0, 1, 1, 2]
    flight = found.events[streams.index(2)]
    assert flight["step"] == 0 and flight["dur"] >= 5_000_000 - TICK
    (stall,) = found.events[found.events["seq"] >= 0]
    assert stall["step"] == 1
    assert abs(stall["posted"] - first[2]) < EXACT
    assert abs(stall["t_start"] - second[2]) < EXACT
    assert not recorder.outstanding


def test_flushed_segments_free_their_times(recorder, device):
    for number in range(4):
        step(recorder, device, number, spans=100)
        recorder.flush()
    assert recorder.compute.count == 800
    assert len(recorder.compute.times) == 0 and recorder.compute.first == 800


@pytest.mark.parametrize(
    ("slow", "quick", "streams"), [("d", "x", (3, 2)), ("r", "x", (5, 2)), ("r", "d", (5, 3))]
)
def test_data_parallel_calls_overlap_with_others(slow, quick, streams, recorder, device):
    """Each call has its own queue: the slow call is posted first, and is still running when the
    quick one has ended."""
    replicas = recorder.wrap(Comm(device, lasts=900_000, queue=queue_of(slow)), slow)
    blocks = recorder.wrap(Comm(device, queue=queue_of(quick)), quick)
    recorder.begin_step(0)
    total, whole = replicas.all_reduce(BLOCK), blocks.all_gather(BLOCK)
    whole.wait(), total.wait()
    recorder.end_step(Pool(), *RESULTS)
    (long,), (short,) = (rows(recorder, stream) for stream in streams)
    assert short[0] == "all_gather" and long[0] == "all_reduce"
    assert long[1] < short[1] and short[2] + 700_000 < long[2]


def test_nvtx_ranges_have_the_names_of_spans(tmp_path, device, host):
    told = []
    ranges = told.append, lambda: told.append("end")
    recorder = DeviceRecorder(tmp_path, {"rank": 0}, device, device.timing, ranges, clock=host)
    with recorder.span("a", "gemm"), recorder.span("b", "none"):
        pass
    assert told == ["a", "b", "end", "end"] and recorder.count == 2


def test_captured_graph_work_is_not_recorded(recorder, device):
    comm = recorder.wrap(Comm(device), "x")
    device.compute.captures = device.queues["blocks"].captures = True
    with recorder.span("a"):
        block = comm.all_gather(BLOCK).wait()
    with recorder.span("b", "gemm", 30.0), recorder.span("c", "attention", 12.0):
        pass
    with comm.grouped():
        pending = comm.send(BLOCK, 1)
    pending.wait()
    assert recorder.count == recorder.compute.count == 0 and len(block) == 1000
    device.compute.captures = device.queues["blocks"].captures = False
    for _ in range(2):
        with recorder.span("graph", "graph"):
            device.compute.work(10_000)
    assert recorder.count == 2
    recorder.device.compare()  # waits for them
    assert [*segment(recorder).events["flops"]] == [42.0, 42.0]


def test_communication_share_mixes_known_and_pending_times(recorder, device):
    """The share is queried when only some times are known, and equals that of the final rows."""
    comm = recorder.wrap(Comm(device, lasts=50_000), "x")
    for number in range(2):
        recorder.begin_step(number)
        for _ in range(100):
            comm.all_gather(BLOCK).wait()
            device.host.skip(40_000)
        known = recorder.compute.known
        spent = recorder.communication
        recorder.end_step(Pool(), *RESULTS)
    assert 200 < known < recorder.compute.count
    stalls = call_rows(recorder)["comm"]
    assert spent == pytest.approx(stalls["dur"][stalls["step"] == 1].sum(), abs=100 * TICK)
    assert spent > 100 * 45_000


def test_evaluation_between_steps_records_device_time(recorder, device):
    """This also holds after the last step, although the clocks are no longer compared."""
    before = step(recorder, device, 0)
    with recorder.scope(phase="evaluation"):
        done = [work(recorder, device, name, 300_000) for name in ("a", "b")]
    recorder.end_evaluation(0, 2.5, 64, 0.5, 0.1)
    agree(rows(recorder, 1), before + done)
