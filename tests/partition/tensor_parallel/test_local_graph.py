"""Random modules on shards, with threads as ranks, compared with full tensors."""

import random

import pytest

pytest.importorskip("torch")

import torch
from torch import nn
from torch.nn import functional

from hpc3d.comm import threads
from hpc3d.partition.capture import capture, loss_of
from hpc3d.partition.execution.random_numbers import Draw
from hpc3d.partition.execution.stage_program import stage_programs
from hpc3d.partition.tensor_parallel import propagation
from hpc3d.partition.tensor_parallel.shards import gathered, looked_up, own_part

HEADS, ROWS = 4, 6


def heads(x):
    return x.unflatten(-1, (HEADS, -1)).transpose(1, 2)


def merged(x):
    return x.transpose(1, 2).flatten(2)


def fused(x, layer):
    a, b, c = layer(x).chunk(3, -1)
    return a * torch.sigmoid(b) + c


def attention(x, q, k, v):
    return merged(functional.scaled_dot_product_attention(*(heads(f(x)) for f in (q, k, v))))


def eager_attention(x, q, k, v):
    """Each rank has some query heads, but all of the single key head, which is repeated."""
    keys, values = (heads(f(x))[:, :1].expand(-1, HEADS, -1, -1) for f in (k, v))
    return merged((heads(q(x)) @ keys.transpose(-1, -2)).softmax(-1) @ values)


# Functions of a value of some width and of layers, whose widths follow in multiples of it.
STEPS = {
    "linear": (lambda x, layer: layer(x), (2,)),
    "narrower": (lambda x, layer: layer(x), (0.5,)),
    "matmul": (lambda x, layer: x @ layer.weight.T, (1,)),
    "twice": (lambda x, layer: torch.tanh(layer(x)) @ layer.weight, (2,)),
    "gate": (lambda x, a, b: functional.silu(a(x)) * b(x), (1, 1)),
    "fused": (fused, (3,)),
    "attention": (attention, (1, 1, 1)),
    "eager": (eager_attention, (1, 1, 1)),
    "scaled": (lambda x, layer: x * layer.weight[0, 0] + layer.weight.sum(0)[0], (1,)),
    "heads": (lambda x: merged(heads(x).softmax(-1)), ()),
    "dropout": (lambda x: functional.dropout(x, 0.3), ()),
    "act": (lambda x: torch.where(x > 0, x, 0.1 * x) + 1, ()),
    "flip": (lambda x: x.flip(-1), ()),
    "mean": (lambda x: x - x.mean(1, keepdim=True), ()),
    "norm": (lambda x: functional.layer_norm(x, x.shape[-1:]), ()),
}


class Drawn(nn.Module):
    def __init__(self, seed):
        super().__init__()
        draws, width = random.Random(seed), 8
        self.steps, self.layers = draws.choices([*STEPS], k=8), nn.ModuleList()
        for name in self.steps:
            for factor in STEPS[name][1]:
                self.layers.append(nn.Linear(width, int(factor * width), draws.random() < 0.5))
            if name in ("linear", "narrower"):
                width = int(STEPS[name][1][0] * width) if 8 <= width <= 16 else 8
                self.layers[-1] = nn.Linear(self.layers[-1].in_features, width)

    def forward(self, x):
        layers = iter(self.layers)
        for name in self.steps:
            function, widths = STEPS[name]
            x = function(x, *(next(layers) for _ in widths))
        return x.square().mean()


def results(programs, captured, weights, x, ranks):
    """Return loss and gradients of the trained weights; values pass from chunk to chunk."""
    sent, outputs, inputs = (), (), dict.fromkeys(captured.inputs, x)
    for program in programs:
        sent, outputs = program.run(Draw(0, 0, 0, ROWS), sent, inputs, weights, ranks=ranks)
    loss = outputs[programs[-1].outputs.index(loss_of(captured))]
    return loss, torch.autograd.grad(loss, [*weights.values()], allow_unused=True)


@pytest.mark.slow
@pytest.mark.parametrize("large", [1 / 16, 2])
@pytest.mark.parametrize("seed", range(12))
def test_random_modules_on_shards_match_full_tensors(seed, large, monkeypatch):
    """Tests one and two chunks, with and without weights large enough to be split alone."""
    monkeypatch.setattr(propagation, "_LARGE", large)
    torch.manual_seed(seed)
    module, x = Drawn(seed).double(), torch.randn(ROWS, 3, 8, dtype=torch.float64)
    captured, ways = capture(module, (x,)), 2 + 2 * (seed % 2)
    half = len(captured.pieces) // 2
    everything = range(len(captured.pieces))
    chunks = [everything[:half], everything[half:]] if seed % 3 else [everything]
    programs = stage_programs(captured, chunks, ways=ways)
    splits = programs[0].sharding.weights
    values = {name: each.detach() for name, each in module.named_parameters()}
    values = {name: values[name] for name in dict.fromkeys(captured.weights.values())}
    full = {name: each.clone().requires_grad_() for name, each in values.items()}
    loss, expected = results(stage_programs(captured, [everything]), captured, full, x, None)

    def rank(mesh):
        ranks = mesh.comm("x")
        own = {
            name: own_part(each, splits[name], ranks) if name in splits else each
            for name, each in values.items()
        }
        own = {name: each.clone().requires_grad_() for name, each in own.items()}
        mine, gradients = results(programs, captured, own, x, ranks)
        torch.testing.assert_close(mine, loss, rtol=1e-10, atol=0)
        for name, gradient, theirs in zip(values, gradients, expected, strict=True):
            if gradient is not None and name in splits:
                gradient = gathered(gradient, splits[name], ranks)
            both = [torch.zeros(()) if each is None else each for each in (gradient, theirs)]
            assert (both[0] - both[1]).abs().max() <= 1e-10 * max(1, both[1].abs().max()), name

    threads.run({"x": ways}, rank)


@pytest.mark.parametrize("row", [-1, 4])
def test_split_table_has_no_row_out_of_range(row):
    with pytest.raises(IndexError, match="table with 4 rows"):
        looked_up(torch.zeros(2, 3), torch.tensor([0, row]), -1, 4, None)
