"""Memory shared by torch and the arrays of a rank on a GPU; tested here without a GPU."""

from types import SimpleNamespace

import pytest

pytest.importorskip("torch")

import torch

from hpc3d.comm.device_setup import Hardware
from hpc3d.config.input_file import Config, TrainConfig
from hpc3d.console.sanitize import Problems
from hpc3d.cuda import gpu
from hpc3d.partition.execution import torch_device
from hpc3d.partition.execution.torch_device import (
    device_names,
    refuse_without_cuda,
    torch_hardware,
    use_device,
)
from tests.checkpoints.killed_runs import ThreadJob

ON_GPU = Config(train=TrainConfig(backend="cupy"))


@pytest.fixture
def job():
    return ThreadJob(SimpleNamespace(rank=0, ranks=1))


def test_torch_without_cuda_is_rejected(job, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(Problems, match="finds no CUDA device; install a build of PyTorch"):
        torch_hardware(job, ON_GPU)
    with pytest.raises(Problems, match="finds no CUDA device"):
        refuse_without_cuda(job, ON_GPU)
    assert torch_hardware(job, Config()).device is None


def test_torch_computes_on_the_stream_of_the_arrays(job, monkeypatch):
    device, said = SimpleNamespace(number=3, compute=SimpleNamespace(ptr=77)), []
    found = Hardware(device, "none")
    monkeypatch.setattr(torch_device, "hardware", lambda job, config: found)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "ExternalStream", lambda *how: how)
    monkeypatch.setattr(torch.cuda, "set_device", said.append)
    monkeypatch.setattr(torch.cuda, "set_stream", said.append)
    assert torch_hardware(job, ON_GPU) is found
    assert said == [3, (77, 3)]


def test_names_of_devices_are_listed_once():
    class Ranks:
        def gather(self, value):
            return ["B", value, "A", value]

    assert device_names(Ranks(), SimpleNamespace(name="B")) == "A, B"
    assert device_names(ThreadJob(SimpleNamespace(rank=0, ranks=1)), None) == "CPU"


def test_device_is_closed_at_the_end_of_the_job(job, monkeypatch):
    used, device = [], SimpleNamespace(close=lambda: None)
    monkeypatch.setattr(gpu, "use", lambda *how: used.append(how))
    job.exit_hooks = []
    use_device(job, device, "pool", tf32=True)
    assert job.exit_hooks == [device.close] and used == [("pool", True)]
