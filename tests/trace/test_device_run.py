"""Runs on devices with simulated times: their traces are valid, and reports accept them."""

import json
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest

from hpc3d.analyze.export.formats import events_of, export
from hpc3d.analyze.metrics.breakdown import DISJOINT, breakdown, rank_rows
from hpc3d.analyze.metrics.columns import own_time
from hpc3d.analyze.metrics.critical_path import critical_path
from hpc3d.analyze.metrics.step import step_row, time_rows
from hpc3d.analyze.metrics.wait_states import calls_of
from hpc3d.analyze.report.step_timeline import lanes, timeline
from hpc3d.arrays.pool import Pool
from hpc3d.benchmarks.harness import RandomBatches
from hpc3d.comm import threads
from hpc3d.comm.communicator import Pending
from hpc3d.comm.mesh import Mesh
from hpc3d.report import main
from hpc3d.trace.checks_per_rank import violations
from hpc3d.trace.device_recorder import DeviceRecorder, DeviceSpan
from hpc3d.trace.merge import merge
from hpc3d.trace.recorder import Recorder
from hpc3d.training.trace_setup import recorder_of
from hpc3d.training.trainer import Trainer
from tests.analyze.traces import config_of, header, opened
from tests.fakes.timed_device import TICK, Comm, Real, Simulated, TimedDevice

SPAN, CALL = 30_000, 60_000  # ns on the device


class Busy(DeviceSpan):
    """Span in which the device is busy."""

    __slots__ = ()

    def __enter__(self):
        super().__enter__()
        self.recorder.compute.stream.work(SPAN)
        return self


class Playing(DeviceRecorder):
    def span(self, name, op="elementwise", flops=0):
        span = super().span(name, op, flops)
        if isinstance(span, DeviceSpan):
            return Busy(self, span.name, span.op, span.flops)
        return span


class DeviceComm(Comm):
    """Communicator between threads whose simulated device takes time."""

    def __init__(self, inner, device):
        super().__init__(device, inner.rank, inner.size, CALL, self.last)
        self.members, self.pool, self.inner = inner.members, inner.pool, inner

    def last(self, start):
        return int(self.inner._all_reduce(np.array([start]), "max").wait()[0])

    def _all_gather(self, block):
        return self.fly(self.inner._all_gather(block).wait(), block)

    def _reduce_scatter(self, block):
        return self.fly(self.inner._reduce_scatter(block).wait(), block)

    def _all_reduce(self, block, op):
        return self.fly(self.inner._all_reduce(block, op).wait(), block)

    def _send(self, block, peer):
        self.inner._send(block, peer)
        leaves = max(self.device.host(), self.device.compute.free)  # when it has been computed
        self.inner._send(np.array([leaves]), peer)
        return self.fly(block, block)

    def _recv(self, shape, dtype, peer):
        block, time = self.inner._recv(shape, dtype, peer), self.inner._recv((1,), np.int64, peer)
        flight = self.fly(None)

        def finish():
            result, sent = block.wait(), int(time.wait()[0])
            flight.wait()
            self.device.compute.free = max(self.device.compute.free, sent + CALL)
            return result

        return Pending(finish)


def ran(folder, ranks, **values):
    """Train on ranks with such devices."""
    config = config_of(ranks, train__steps=2, **values)

    def rank(mesh):
        device = TimedDevice(Real())
        comms = {axis: DeviceComm(comm, device) for axis, comm in mesh.comms.items()}
        mesh = Mesh(mesh.sizes, mesh.coords, comms, mesh.world)
        recorder = Playing(folder, header(config, mesh.rank, ranks), device, device.timing)
        batches = RandomBatches(config, 17) if mesh.rank == 0 else None
        trainer = Trainer(mesh.traced(recorder), config, 17, batches)
        shares = [trainer.step(number).communication for number in range(config.train.steps)]
        recorder.flush()
        return shares

    folder.mkdir(exist_ok=True)
    shares = threads.run(config.sizes(), rank)
    merge(folder)
    return folder, shares


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    how = {"mesh__p": 2, "mesh__x": 2, "parallel__scheme": "1d", "parallel__microbatches": 2}
    sizes = {"model__layers": 2, "train__batch": 4, "model__hidden": 8}
    return ran(tmp_path_factory.mktemp("runs") / "devices", 4, **how, **sizes)


@pytest.fixture
def trace(run):
    with opened(run[0]) as trace:
        yield trace


def test_device_trace_is_valid(trace):
    assert violations(trace) == []
    assert trace.attrs["complete"]


def test_rows_are_on_three_streams(trace):
    stream, events = trace.events["stream"], trace.events
    assert np.unique(stream).tolist() == [0, 1, 2]
    labels = events.labels("category")
    on = [{labels[code] for code in np.unique(events["category"][stream == n])} for n in (1, 2)]
    assert on[0] >= {"compute", "comm", "optimizer"} and on[1] == {"copy"}
    # Where the device has to wait for the host, what it does begins with the event before it.
    assert events["dur"][(stream == 1) & (events["flops"] > 0)].min() >= SPAN - 2 * TICK
    assert events["dur"][stream == 2].min() >= CALL - 2 * TICK


def test_times_add_up_to_the_step(trace):
    for row in rank_rows(trace, calls_of(trace)):
        assert sum(row[part] for part in DISJOINT) == pytest.approx(row["step_s"])
        assert row["compute_s"] > 0 and row["unrecorded_s"] >= 0
        assert row["outstanding_s"] <= row["compute_s"]
    assert all(row["seconds"] >= 0 for row in breakdown(trace, ("rank", "step", "category")))
    table = time_rows(trace)
    assert sum(row["share"] for row in table) == pytest.approx(1)
    assert 0 < step_row(trace, table)["communication_share"] < 1


def test_host_time_counts_only_while_its_device_is_idle(trace):
    """Compared with samples at every 100 ns of the first step of a rank."""
    events, rows = trace.events, trace.rows(0)
    step = trace.steps["t_start"][0], trace.steps["t_end"][0]
    ticks = np.arange(*step, 100)
    busy = {}
    for stream in (0, 1):
        mine = np.flatnonzero(events["stream"][rows] == stream)
        start = events["t_start"][rows][mine]
        place = np.searchsorted(start, ticks, "right") - 1
        end = np.maximum.accumulate(start + events["dur"][rows][mine])
        busy[stream] = (place >= 0) & (ticks < end[place])
    own = own_time(trace)[rows]
    inside = (events["step"][rows] == 0) & (events["stream"][rows] == 0)
    alone = 100 * int((busy[0] & ~busy[1]).sum())
    assert abs(int(own[inside].sum()) - alone) <= 100 * 2 * int(inside.sum())


def test_host_work_covered_by_its_device_takes_no_time(tmp_path):
    host = Simulated()
    device = TimedDevice(host)
    top = header(config_of(1), 0, 1)
    recorder = DeviceRecorder(tmp_path, top, device, device.timing, clock=host)
    recorder.begin_step(0)
    with recorder.span("a"):
        device.compute.work(300_000)
    for _ in range(2):
        with recorder.span("read the text", "none"):
            host.skip(200_000)
    recorder.end_step(Pool(), 64, 2.5, 1.0, 1e-3, 1.0, 1.0)
    recorder.flush()
    merge(tmp_path)
    with opened(tmp_path) as trace:
        look, hidden, half = own_time(trace)[trace.events["stream"] == 0].tolist()
    assert 0 < look < 10_000 and hidden == 0 and abs(half - 100_000) < 10_000


def test_training_loop_reports_the_communication_share(run, trace):
    stalls = (trace.events["stream"] == 1) & (trace.events["group"] >= 0)
    for rank in range(4):
        mine = stalls & (trace.events["rank"] == rank) & (trace.events["step"] == 0)
        assert trace.events["dur"][mine].sum() > 0
    assert all(0 < share < 1 for shares in run[1] for share in shares)


def test_critical_path_ends_with_the_step(trace):
    path = critical_path(trace, calls_of(trace), 1)
    steps = trace.steps["step"] == 1
    begin, end = trace.steps["t_start"][steps].min(), trace.steps["t_end"][steps].max()
    assert sum(each.seconds for each in path) == pytest.approx((end - begin) * 1e-9)
    assert "compute" in {each.category for each in path}


def test_streams_have_separate_lanes(trace, tmp_path):
    calls = calls_of(trace)
    chart = timeline(trace, calls, 1, critical_path(trace, calls, 1), 10_000)
    offset, height = lanes(chart.events)
    assert height == pytest.approx(1 / 3)
    stream = chart.events["stream"]
    means = [offset[stream == number].mean() for number in range(3)]
    np.testing.assert_allclose(means, [-1 / 3, 0, 1 / 3], atol=1e-6)
    (path,) = export(["perfetto"], events_of(trace, calls), tmp_path)
    lines = json.loads(path.read_text())["traceEvents"]
    threads_of = {
        (line["pid"], line["tid"]): line["args"]["name"]
        for line in lines
        if line["name"] == "thread_name"
    }
    assert threads_of[1, 1] == "stream 1, computation"
    assert threads_of[1, 2] == "stream 2, communication"


def test_kernels_of_one_stream_do_not_overlap_in_hta(trace, tmp_path):
    (folder,) = export(["hta"], events_of(trace, calls_of(trace)), tmp_path)
    lines = json.loads((folder / "rank-00000.json").read_text())["traceEvents"]
    kernels = sorted(
        (line["ts"], line["ts"] + line["dur"])
        for line in lines
        if line["cat"] == "kernel" and line["tid"] == 7
    )
    assert len(kernels) > 20
    assert all(end <= start for (_, end), (start, _) in pairwise(kernels))
    assert {line["name"] for line in lines if line["cat"] == "cpu_op"} >= {"clock of the device"}


def test_gpu_run_uses_the_device_recorder(tmp_path):
    device, told = TimedDevice(Real()), []
    create, elapsed = device.timing
    nvtx = SimpleNamespace(RangePush=told.append, RangePop=lambda: told.append("end"))
    cuda = SimpleNamespace(Event=create, get_elapsed_time=elapsed, nvtx=nvtx)
    device.cupy = SimpleNamespace(cuda=cuda)
    config = config_of(1, train__backend="cupy", trace__nvtx="true")
    pool = SimpleNamespace(device=device)
    recorder = recorder_of(tmp_path, {"rank": 0}, pool, config)
    with recorder.span("a"):
        device.compute.work(SPAN)
    assert type(recorder) is DeviceRecorder and told == ["a", "end"]
    plain = recorder_of(tmp_path, {"rank": 0}, pool, config_of(1))
    assert type(plain) is Recorder


@pytest.mark.parametrize(
    ("backend", "key", "value"),
    [("cupy", "trace__clock", "cpu"), ("numpy", "trace__nvtx", "true")],
)
def test_trace_settings_invalid_for_the_backend_are_rejected(backend, key, value):
    with pytest.raises(ValueError, match=f"{key.replace('__', '.')} = {value}: only valid for "):
        config_of(1, train__backend=backend, **{key: value})


@pytest.mark.slow
def test_report_of_a_device_trace_is_written(run, tmp_path, capsys):
    assert main([str(run[0]), "--out", str(tmp_path / "report")]) in (0, None)
    assert (tmp_path / "report" / "report.md").is_file()
