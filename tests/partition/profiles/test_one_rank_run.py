"""A module in the trainer of a run, on a single rank."""

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("ml_dtypes")

import torch

from hpc3d.partition.profiles.one_rank_run import OneRankRun
from tests.fakes.fake_device import DeviceArray, plain
from tests.partition.execution.modules import HERE, config_of, even_parts, prepared
from tests.partition.profiles.test_piece_timer import reading, run_of
from tests.partition.sample_models import branches, captured
from tests.training.test_on_devices import devices, ranks  # noqa: F401


@pytest.mark.parametrize("name", ["chain", "everything"])
def test_gradients_do_not_depend_on_the_number_of_stages(name):
    run = run_of(name)
    found = []
    for parts in (1, 3):
        stages = run.stages(even_parts(run.captured, parts))
        assert len(stages) == parts
        run.trainer.parameters.grad.fill(0)
        run.passes(stages, 4)
        found.append(run.trainer.parameters.grad.copy())
    assert np.abs(found[0]).max() > 0
    np.testing.assert_allclose(*found, 0, 1e-12)


def test_timed_step_has_passes_update_and_rest_and_keeps_the_weights():
    run = run_of("chain")
    before = {name: each.detach().clone() for name, each in run.weights.items()}
    step = run.step()
    assert min(step) > 0 and run.step().passes == step.passes
    assert all((before[name] == each).all() for name, each in run.weights.items())


def test_larger_batch_repeats_the_inputs():
    module, inputs, captured = prepared(f"{HERE}:chain")
    run = OneRankRun(captured, module, inputs, 30, reading())
    first, *_ = run.micro(30).inputs.values()
    assert len(first) == 30 and (first[12:24] == inputs[0]).all()
    assert (run.micro(5).inputs[captured.inputs[0]] == inputs[0][:5]).all()


def test_trained_bytes_count_parameters():
    """Four layers of 4 x 4 with biases, in float64."""
    assert run_of("chain").trained_bytes == 4 * (16 + 4) * 8


def test_model_without_a_loss_is_rejected():
    graph = captured("tests.partition.sample_models:branches")
    module, inputs = branches()
    with pytest.raises(ValueError, match="must return its loss"):
        OneRankRun(graph, module, (inputs,), 6, reading())


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, pytest.param(torch.float32, marks=pytest.mark.slow)]
)
def test_run_on_a_device_has_the_gradients_of_the_host(dtype):
    """The device is a thread (tests/fakes/fake_device.py)."""
    module, inputs, captured = prepared(f"{HERE}:everything", dtype)

    def gradients(mesh):
        run = OneRankRun(captured, module, inputs, captured.batch, reading(), mesh.pool)
        assert min(run.step()) > 0
        run.trainer.parameters.grad.fill(0)
        run.passes(run.stages(even_parts(captured, 2)), 4)
        return type(run.trainer.parameters.value), plain(run.trainer.parameters.grad).copy()

    config = config_of(captured, (1,), 1, "none")
    ((_, expected),) = ranks(config, gradients, None)
    ((kind, found),) = ranks(config, gradients, "host-staged")
    assert kind is DeviceArray and np.abs(expected).max() > 0
    np.testing.assert_array_equal(found, expected)
