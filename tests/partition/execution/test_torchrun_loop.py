"""Code at the beginning of files for torchrun, in one process."""

import sys

import pytest

pytest.importorskip("torch")

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import ScheduleGPipe

from hpc3d.partition.execution.torchrun_loop import (
    ComputedAgain,
    CutModel,
    ModelPart,
    PartTrainer,
    crossing,
    main,
)

RATE, SHIFT = 1e-2, torch.tensor([1.0, 2.0, 3.0])


class Model(nn.Module):
    """Mean square of a layer after a normalization."""

    def __init__(self):
        super().__init__()
        self.norm, self.layers = nn.BatchNorm1d(3), nn.ModuleList([nn.Linear(3, 3)])
        self.register_buffer("factor", torch.full((3,), 2.0), persistent=False)

    def forward(self, x):
        return (self.layers[0](self.norm(x)) * self.factor + SHIFT).square().mean()


class Whole(ModelPart):
    """The same model as a part."""

    reads_weights = (
        *(f"norm.{name}" for name in ("weight", "bias", "running_mean", "running_var")),
        *("layers.0.weight", "layers.0.bias", "factor"),
    )
    writes_buffers = ("norm.running_mean", "norm.running_var")

    def forward(self, inputs=None):
        x, shift = inputs["x"], inputs["shift"][0]
        norm, layer = self.norm, getattr(self.layers, "0")
        means = norm.running_mean, norm.running_var, norm.weight, norm.bias
        x = nn.functional.batch_norm(x, *means, training=True)
        x = nn.functional.linear(x, layer.weight, layer.bias) * self.factor + shift
        return x.square().mean()


def made():
    torch.manual_seed(3)
    return Model().double(), (torch.randn(8, 3, dtype=torch.float64),)


def named(inputs):
    return {"x": inputs[0], "shift": SHIFT}


def cut(processes=1, recompute=False):
    return CutModel(
        make=made,
        named=named,
        undivided=["shift"],
        parts=[Whole],
        borders=[],
        recompute=[recompute],
        constants={},
        stages=1,
        replicas=processes,
        microbatches=2,
        schedule=ScheduleGPipe,
    )


@pytest.fixture
def mesh():
    """Mesh of one process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1, 1), mesh_dim_names=("stage", "replica"))
    dist.destroy_process_group()


@pytest.mark.parametrize("recompute", [False, True])
def test_trainer_step_matches_torch(recompute, mesh):
    """After two steps, gradients were reset, and buffers were written once per microbatch."""
    model, (x,) = made()
    trainer = PartTrainer(cut(recompute=recompute), mesh, model, 8, RATE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    for _ in range(2):
        found = trainer.step(named((x,)))
        optimizer.zero_grad()
        losses = [model(rows) / 2 for rows in x.chunk(2)]
        sum(losses).backward()
        optimizer.step()
        assert abs(found.item() - sum(losses).item()) < 1e-14
    ours, theirs = trainer.state(), model.state_dict()
    assert theirs.keys() - ours.keys() == {"norm.num_batches_tracked"}
    assert ours.keys() <= theirs.keys()
    for name, value in ours.items():
        assert torch.allclose(value, theirs[name], rtol=0, atol=1e-14), name


def test_recomputation_restores_buffers_and_random_state():
    """Two passes are in flight before the first is recomputed."""
    weights = {**made()[0].state_dict(keep_vars=True), "factor": torch.ones(3)}

    class Shifted(Whole):
        def forward(self, inputs=None):
            x = inputs["x"] - self.norm.running_mean
            x = nn.functional.dropout(x, 0.5)
            return super().forward({"x": x * x, "shift": inputs["shift"]})

    gradients = []
    for wrapped in (lambda part: part, ComputedAgain):
        torch.manual_seed(5)
        fresh = {
            name: nn.Parameter(each.detach().clone())
            if isinstance(each, nn.Parameter)
            else each.clone()
            for name, each in weights.items()
        }
        part = wrapped(Shifted(fresh, ()))
        x = torch.arange(24, dtype=torch.float64).view(8, 3).sin()
        losses = [part(inputs={"x": rows, "shift": SHIFT[None]}) for rows in (x, x + 1)]
        sum(losses).backward()
        gradients.append([*fresh["layers.0.weight"].grad.flatten(), *fresh["norm.running_mean"]])
    assert gradients[0] == gradients[1] and any(gradients[0])


def test_crossing_tensors_are_on_the_meta_device():
    like = crossing([2, 3], torch.float64, graded=True)
    assert (*like.shape, like.dtype, like.is_meta) == (2, 3, torch.float64, True)
    assert like.requires_grad and not crossing([2], torch.int64, graded=False).requires_grad


def test_wrong_number_of_processes_is_rejected(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["plan.py"])
    monkeypatch.setenv("WORLD_SIZE", "1")
    with pytest.raises(SystemExit, match="--nproc-per-node 2"):
        main(cut(processes=2))
