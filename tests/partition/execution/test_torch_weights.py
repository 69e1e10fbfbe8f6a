"""Torch tensors in the flat arrays of the parameters."""

import numpy as np
import pytest

pytest.importorskip("torch")

import torch

from hpc3d.checkpoints import sharded
from hpc3d.checkpoints.block_slices import stored_shape
from hpc3d.comm.communicator import Self
from hpc3d.comm.mesh import Mesh
from hpc3d.model.parameters import Parameters
from hpc3d.partition.capture import state_of
from hpc3d.partition.execution.torch_weights import TorchWeights, stored_tensors, values_in
from hpc3d.training.optimizers.optimizer import AdamW
from tests.partition.execution.modules import HERE, prepared
from tests.partition.sample_models import HERE as SAMPLES
from tests.partition.user_models import HERE as USERS

NAME = f"{HERE}:everything"


def bound(shared=()):
    module, _, captured = prepared(NAME)
    return module, *filled(module, captured, "float64", shared)


def filled(module, captured, dtype, shared=()):
    parameters = Parameters(Mesh({}, {}, {}, Self()), dtype)
    weights = TorchWeights(captured, parameters, captured.weights.values(), dict(shared))
    parameters.allocate(seed=0)
    weights.bind()
    for name, value in values_in(module, captured):
        weights.fill(name, value)
    return parameters, weights


def test_flat_array_holds_the_values_of_the_module():
    module, _, weights = bound()
    held = dict(module.named_parameters()) | dict(module.named_buffers())
    assert weights.tensors.keys() == held.keys()
    for name, tensor in weights.tensors.items():
        assert (tensor == held[name]).all() and tensor.shape == held[name].shape


def test_gradients_are_written_to_the_flat_array():
    _, parameters, weights = bound()
    done = []
    weights.completed = done.append
    for name, item in weights.items.items():
        tensor = weights.tensors[name]
        if not item.frozen:
            (tensor * 3).sum().backward()
            assert (item.grad == 3).all()
    assert len(done) == 8 and (parameters.grad == 3).all()
    parameters.value[:] = 7
    assert (weights.tensors["table.weight"] == 7).all()


class Exact(torch.nn.Linear):
    """A layer in bfloat16 with buffers of other data types."""

    def __init__(self):
        super().__init__(4, 4, dtype=torch.bfloat16)
        self.register_buffer("scale", torch.tensor([1 + 2.0**-20]))
        self.register_buffer("total", torch.tensor(1 / 3, dtype=torch.float64))
        self.register_buffer("calls", torch.tensor(2**40 + 1))
        self.register_buffer("kept", torch.tensor([True, False]))

    def forward(self, x):
        self.calls += 1
        y = super().forward(x) * self.scale.to(x.dtype) + self.total.to(x.dtype)
        return torch.where(self.kept[0], y, 0).square().mean()


def exact():
    return Exact(), torch.ones(4, 4, dtype=torch.bfloat16)


def test_buffers_keep_their_data_types_in_checkpoints(tmp_path):
    pytest.importorskip("ml_dtypes")
    module, _, captured = prepared(f"{__name__}:exact", None)
    parameters, weights = filled(module, captured, "bfloat16")
    folder = tmp_path / "step-00000001.tmp"
    folder.mkdir()
    optimizer = AdamW(parameters, 0.0)
    sharded.write_shard(folder, 0, sharded.Snapshot(parameters, optimizer))
    assert sharded.complete(folder, 1, {"step": 1, "updates": 1}, keep=1) is None
    before = {name: tensor.clone() for name, tensor in weights.tensors.items()}
    with torch.no_grad():
        for tensor in weights.tensors.values():
            tensor.zero_()
    sharded.restore(sharded.Checkpoint(folder.with_suffix("")), parameters, optimizer)
    for name, tensor in weights.tensors.items():
        assert (
            torch.equal(tensor, before[name]) and tensor.dtype == module.state_dict()[name].dtype
        )


def test_decayed_and_frozen_parameters():
    _, _, weights = bound(shared={"table.weight": False})
    items = weights.items
    assert {name for name, item in items.items() if item.decay} == {
        *("table.weight", "left.weight", "right.weight", "last.weight")
    }
    assert {name for name, item in items.items() if item.frozen} == {
        *("scale", "norm.running_mean", "norm.running_var", "norm.num_batches_tracked")
    }
    assert {name for name, item in items.items() if not item.counted} == {"table.weight"}


@pytest.mark.parametrize(
    ("shape", "stored"), [((), (1,)), ((3,), (3,)), ((3, 4), (3, 4)), ((3, 4, 5, 2), (3, 40))]
)
def test_tensors_are_stored_as_vectors_or_matrices(shape, stored):
    assert stored_shape(shape) == stored


def test_checkpoints_exclude_constants():
    _, _, captured = prepared(NAME)
    found = stored_tensors(captured)
    assert {*found["frozen"]} < {*found["shapes"]} == {*state_of(captured)}
    _, _, held = prepared(f"{SAMPLES}:held")
    assert stored_tensors(held) == {"shapes": {}, "frozen": [], "aliases": {}}


def test_plain_tensor_attribute_keeps_its_value():
    module, _, captured = prepared(f"{SAMPLES}:held")
    ((name, value),) = values_in(module, captured)
    assert name == "table" and np.array_equal(value, module.table)


def test_tensors_without_readers_are_stored():
    _, _, captured = prepared(f"{USERS}:idle")
    found = stored_tensors(captured)
    assert {"unused", "note", "seen", "counts"} <= {*found["frozen"]} <= {*found["shapes"]}


def test_constants_keep_their_values():
    module, _, captured = prepared(f"{USERS}:constants")
    values = [value for _, value in values_in(module, captured)]
    expected = [module.angles, module.plain, module.listed[0], module.keyed["k"][0]]
    expected += [module.held.table, torch.arange(1.0, 7).double()]
    for each in expected:
        assert sum(torch.equal(each, value) for value in values) == 1
