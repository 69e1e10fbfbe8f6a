"""Modules with arrays on devices that are threads (tests/fakes/fake_device.py)."""

from time import perf_counter

import pytest

pytest.importorskip("torch")
pytest.importorskip("ml_dtypes")

import torch

from hpc3d.partition.execution.module_trainer import ModuleTrainer
from hpc3d.partition.execution.sample_batches import flat_inputs
from hpc3d.partition.execution.staged_model import staged_model
from hpc3d.partition.execution.torch_weights import values_in
from hpc3d.pipeline.program import program_of
from hpc3d.pipeline.schedule import find
from tests.fakes.fake_device import DeviceArray
from tests.partition.execution.modules import (
    HERE,
    STEPS,
    assert_trained_alike,
    config_of,
    copied,
    even_parts,
    prepared,
    trained,
)
from tests.training.test_on_devices import devices, ranks  # noqa: F401

CHAIN, DROPPING, EVERYTHING = (f"{HERE}:{name}" for name in ("chain", "dropping", "everything"))


def trained_on_devices(name, replicas, schedule, transport, dtype, **how):
    """Train as `trained` of modules.py does, on devices."""
    module, inputs, captured = prepared(name, dtype)
    config = config_of(captured, replicas, 2, schedule, **how)
    parts, split = even_parts(captured, len(replicas)), find(schedule).splits_backward
    again = [False] * len(replicas)
    model = staged_model(captured, parts, replicas, again, split=split)
    flat, values = flat_inputs(captured, inputs), dict(values_in(module, captured))

    def rank(mesh):
        first, program = mesh.rank == 0, program_of(config)
        batches = (lambda step: flat) if first else None
        trainer = ModuleTrainer(mesh, config, model, None, batches, program, perf_counter)
        trainer.fill(values if first else {})
        assert type(trainer.parameters.value) is DeviceArray
        losses = [trainer.step(number).loss for number in range(STEPS)]
        tensors = trainer.torch_weights.tensors.items()
        return {name: copied(value) for name, value in tensors}, losses

    return ranks(config, rank, transport)


@pytest.mark.parametrize(
    ("name", "replicas", "schedule", "transport", "dtype", "how"),
    [
        (DROPPING, (1, 1), "1f1b", "nccl", torch.float32, {}),
        (CHAIN, (2, 2), "zb-h1", "host-staged", torch.float32, {"zero": 1}),
        (DROPPING, (2, 2), "1f1b", "nccl", torch.bfloat16, {"zero": 1}),
        (CHAIN, (1, 1), "gpipe", "mpi", torch.float16, {}),
        (EVERYTHING, (2,), "none", "host-staged", torch.bfloat16, {}),
    ],
)
def test_modules_train_on_devices_as_on_the_host(name, replicas, schedule, transport, dtype, how):
    found = trained_on_devices(name, replicas, schedule, transport, dtype, **how)
    expected = trained(name, replicas, 2, schedule, dtype=dtype, **how)
    for each, (tensors, losses) in zip(found, expected, strict=True):
        assert_trained_alike([each], (tensors, losses), 1e-6)
