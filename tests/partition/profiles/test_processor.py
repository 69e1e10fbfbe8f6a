"""Readings of the clock and the memory of a GPU, with a fake torch.cuda."""

from types import SimpleNamespace

import pytest

pytest.importorskip("torch")

from hpc3d.partition.profiles.processor import CudaMemory, CudaMoment, processor_of
from tests.fakes.fake_torch_cuda import HELD, LASTS, SCRATCH, TOTAL, FakeTorchCuda


@pytest.fixture
def cuda(monkeypatch):
    return FakeTorchCuda(monkeypatch)


class Ranks:
    """Job on the given hosts, seen by its first rank. All ranks have the same device number."""

    def __init__(self, *hosts):
        self.hosts = hosts

    def gather(self, value):
        if isinstance(value, str):
            return [value] * len(self.hosts)
        _, *device = value
        return [(host, *device) for host in self.hosts]

    def location(self):
        return {"host": self.hosts[0]}


GPU = SimpleNamespace(name="A GPU", bus="0000:01", uuid="7")


def test_difference_of_moments_is_the_time_of_the_device(cuda):
    """Readings do not wait for the device; their difference does."""
    start, before = CudaMoment(), cuda.device.host()
    for _ in range(3):
        cuda.device.compute.work(LASTS)
    end, waits = CudaMoment(), cuda.device.waits
    assert cuda.device.host() - before < LASTS and waits == 0
    assert end - start == pytest.approx(3 * LASTS / 1e9, rel=0.01)
    assert cuda.device.waits == 1


def test_difference_of_readings_is_the_memory_that_was_freed_again(cuda):
    before = CudaMemory()
    cuda.peak = HELD + SCRATCH
    after = CudaMemory()
    assert after - before == SCRATCH
    assert CudaMemory() - after == 0
    before.now = HELD + SCRATCH  # the work freed memory before it allocated
    assert after - before == 0


def test_ranks_share_the_memory_of_a_device(cuda):
    alone = processor_of(Ranks("a"), GPU)
    assert (alone.name, alone.memory, alone.usage) == ("A GPU", TOTAL, CudaMemory)
    assert alone.clock is alone.wall is CudaMoment
    assert processor_of(Ranks("a", "a", "b"), GPU).memory == TOTAL / 2


def test_cpu_has_clocks_of_its_own_and_no_workspace():
    found = processor_of(Ranks("a"), None)
    assert (found.name, found.usage) == ("CPU", None)
    assert isinstance(found.clock(), float) and found.clock is not found.wall
