"""Results of measurements, with simulated clocks."""

import threading
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("torch")

from hpc3d.comm import threads
from hpc3d.partition.execution.torch_stage import TorchStage
from hpc3d.partition.plan_file import names_of
from hpc3d.partition.profiles.measurement import (
    measured_pieces,
    measured_run,
    sizes,
    timed_calls,
)
from hpc3d.partition.profiles.processor import CudaMemory, CudaMoment
from tests.fakes.fake_torch_cuda import SCRATCH, FakeTorchCuda
from tests.fakes.timed_device import Comm
from tests.partition.profiles.test_piece_timer import run_of


@pytest.mark.parametrize(("batch", "rows"), [(1, [1]), (8, [1, 2, 4, 8]), (6, [1, 2, 4, 6])])
def test_measured_rows_are_powers_of_two_and_the_batch(batch, rows):
    assert sizes(batch) == rows


def test_piece_times_add_up_to_the_measured_pass():
    """The clock, read before, between and after both passes, gives one second for each pass."""
    run = run_of("chain")
    found = [*measured_pieces(run, [1, 4], 2)]
    assert len(found) == 2
    for seconds in found:
        np.testing.assert_allclose(seconds.sum(1), 1.0)
    forward, _ = found[0]
    assert forward.max() < 0.5 and forward.min() > 0


def test_pieces_on_a_gpu_have_its_times_and_its_workspace(monkeypatch):
    """A product takes 1 ms: one forward in each of four layers; backward one for the weight and,
    except in the first layer, one for the input. No other operation takes time or memory."""
    run, cuda = run_of("chain"), FakeTorchCuda(monkeypatch)
    run.clock = CudaMoment
    with cuda:
        ((forward, backward, workspace),) = measured_pieces(run, [4], 1, CudaMemory)
    layers = [number for number, name in enumerate(names_of(run.captured)) if "linear" in name]
    np.testing.assert_allclose(forward[layers], [1e-3] * 4, 0.02)
    np.testing.assert_allclose(backward[layers], [1e-3, 2e-3, 2e-3, 2e-3], 0.02)
    assert workspace[layers].tolist() == [SCRATCH] * 4
    for values in (forward, backward, workspace):
        assert np.delete(values, layers).max() <= 0.02 * values.max()


def test_per_stage_overhead_is_measured(monkeypatch):
    """Three seconds forward and five backward are added to every part."""
    run = run_of("chain")
    now = [0.0]
    run.clock = lambda: now[0]

    def slow(name, seconds):
        method = getattr(TorchStage, name)

        def slower(*arguments):
            now[0] += seconds
            return method(*arguments)

        monkeypatch.setattr(TorchStage, name, slower)

    slow("forward", 3.0)
    slow("backward", 5.0)
    found = measured_run(run, 2)
    assert (found["forward"], found["backward"]) == (3.0, 5.0)


def test_step_overhead_and_update_time_are_measured(monkeypatch):
    """Tests 640 bytes of parameters."""
    run = run_of("chain")
    found = measured_run(run, 2)
    step = run.step()
    assert found["step"] == step.rest > 0
    assert found["update"] == step.update / 640 > 0


class FewRanks:
    """Job on threads, as seen by rank `rank`."""

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
    """In an all-reduce of three ranks, each receives two thirds of the bytes twice."""
    send, total = tables
    assert total["bytes"] == pytest.approx([4 / 3 * each for each in send["bytes"]])


def test_single_rank_times_no_calls():
    assert timed_calls(FewRanks(1), None, 1) == []


class Two:
    """Job of two ranks with equal values, seen by rank 0."""

    size = 2
    comm = SimpleNamespace(Barrier=lambda: None)

    def gather(self, value):
        return [value, value]


def test_calls_of_gpus_are_timed_on_the_device(monkeypatch):
    """Each call takes 0.1 ms on the device; a round trip consists of two messages."""
    comm = Comm(FakeTorchCuda(monkeypatch).device, lasts=100_000)
    for table in timed_calls(Two(), comm, 1, CudaMoment):
        np.testing.assert_allclose(table["seconds"], 1e-4, 0.1)
