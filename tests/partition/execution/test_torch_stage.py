"""A part of a module as a pipeline stage: its messages, saved data and gradients."""

import inspect

import numpy as np
import pytest

pytest.importorskip("torch")

from hpc3d.comm.communicator import Self
from hpc3d.comm.mesh import Mesh
from hpc3d.model.layers import immediately
from hpc3d.model.parameters import Parameters
from hpc3d.partition.execution.loss_terms import LossTerms
from hpc3d.partition.execution.sample_batches import SampleLoader, flat_inputs, rows_of
from hpc3d.partition.execution.saved_tensors import SavedTensors
from hpc3d.partition.execution.staged_model import staged_model
from hpc3d.partition.execution.torch_stage import TorchStage
from hpc3d.partition.execution.torch_weights import TorchWeights, values_in
from tests.partition.execution.modules import HERE, even_parts, prepared
from tests.pipeline.test_stage_protocol import violations


def test_torch_stage_implements_the_stage_protocol():
    assert not [*violations(TorchStage)]
    assert "saving" in inspect.signature(TorchStage).parameters


def stages(name, count, recompute=False, split=False):
    """Return all parts of a module on one rank, and a microbatch of half of its samples."""
    module, inputs, captured = prepared(name)
    parts, again = even_parts(captured, count), [recompute] * count
    model = staged_model(captured, parts, [1] * count, again, split=split)
    mesh = Mesh({}, {}, {}, Self())
    parameters = Parameters(mesh, "float64")
    weights = TorchWeights(captured, parameters, captured.weights.values(), {})
    parameters.allocate(seed=0)
    weights.bind()
    for key, value in values_in(module, captured):
        weights.fill(key, value)
    saving = SavedTensors(mesh, "float64")
    loss = [None] * (count - 1) + [model.loss]
    made = [
        TorchStage(program, weights, model.graded, 0, saving, end, recompute)
        for program, end in zip(model.programs, loss, strict=True)
    ]
    flat = flat_inputs(captured, inputs)
    terms, rows = LossTerms(captured), rows_of(12, 2, 1, 0)
    loader = SampleLoader(mesh, terms, lambda step: flat, rows, 12, captured.inputs)
    return made, weights, loader.fetch(0)[1]


@pytest.mark.parametrize("recompute", [False, True])
def test_stage_blocks_have_the_announced_shapes_and_types(recompute):
    made, weights, micro = stages(f"{HERE}:everything", 4, recompute)
    before = {name: tensor.detach().clone() for name, tensor in weights.tensors.items()}
    x, saved = None, []
    for stage in made:
        if x is not None:
            assert [(array.shape, array.dtype) for array in x] == stage.incoming("F", micro)
        x, kept = stage.forward(x, micro)
        saved.append(kept)
    assert isinstance(x, float)
    counter = weights.tensors["norm.num_batches_tracked"].clone()
    dy, finished = None, []
    for stage in reversed(made):
        if dy is not None:
            assert [(array.shape, array.dtype) for array in dy] == stage.incoming("B", micro)
        dy = stage.backward(dy, saved.pop(), micro, immediately, finished.append)
    assert dy is None and {*finished} == {unit for stage in made for unit in stage.units}
    assert weights.tensors["norm.num_batches_tracked"] == counter == 1, "written once"
    assert (before["norm.running_mean"] != weights.tensors["norm.running_mean"]).any()


def test_recomputation_saves_only_the_received_inputs():
    for recompute in (False, True):
        made, _, micro = stages(f"{HERE}:chain", 2, recompute)
        x, _ = made[0].forward(None, micro)
        _, kept = made[1].forward(x, micro)
        assert (kept.edges is None) == recompute
        for received in kept.received:
            np.testing.assert_array_equal(received.value(), x[0])
        assert len(kept.received) == recompute
