"""Small modules to partition and train, and the same training in unpartitioned torch."""

import copy
from functools import cache
from time import perf_counter

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from hpc3d.comm.threads import run_stages
from hpc3d.config.input_file import Config, MeshConfig, ParallelConfig, TrainConfig
from hpc3d.partition.capture import capture, state_of
from hpc3d.partition.capturing.named_outputs import NamedOutputs
from hpc3d.partition.execution.module_trainer import ModuleTrainer
from hpc3d.partition.execution.sample_batches import flat_inputs, rows_of
from hpc3d.partition.execution.staged_model import staged_model
from hpc3d.partition.execution.torch_weights import values_in
from hpc3d.partition.factory import function_at
from hpc3d.partition.tensor_parallel.shards import gathered
from hpc3d.pipeline.program import program_of
from hpc3d.pipeline.schedule import find

HERE = "tests.partition.execution.modules"
STEPS, RATE, DECAY, CLIP = 3, 1e-2, 0.1, 0.5


class Everything(nn.Module):
    """Module with a table read at both ends, a value that skips parts, two branches, normalization
    over the batch, a value without gradient, and several outputs."""

    def __init__(self, width=6, classes=5):
        super().__init__()
        self.table = nn.Embedding(classes, width)
        self.left, self.right = nn.Linear(width, width), nn.Linear(width, width)
        self.norm, self.last = nn.BatchNorm1d(width), nn.Linear(width, width, bias=False)
        self.register_buffer("scale", torch.tensor([1.5]))

    def forward(self, ids, labels):
        x = self.table(ids)
        mask = (ids > 1).unsqueeze(1)
        y = self.norm(functional.gelu(self.left(x)))
        z = self.last((y * mask + torch.tanh(self.right(x))) * self.scale)
        logits = (z + x) @ self.table.weight.T
        return {"logits": logits, "loss": functional.cross_entropy(logits, labels)}


def everything(batch=12):
    ids = torch.arange(batch) % 5
    return Everything(), {"ids": ids, "labels": (3 * ids + 1) % 5}


class Chain(nn.Module):
    def __init__(self, layers, dropout):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(layers))
        self.dropout = dropout

    def forward(self, x, y):
        for layer in self.layers:
            x = functional.dropout(torch.tanh(layer(x)), self.dropout, self.training)
        return functional.mse_loss(x, y)


def chain(layers=4, batch=12, dropout=0.0):
    numbers = torch.arange(batch * 4, dtype=torch.float64).reshape(batch, 4)
    return Chain(layers, dropout), (torch.sin(numbers), torch.cos(numbers))


class Growing(nn.Linear):
    """Layer scaled by a buffer that each call changes."""

    def __init__(self, width):
        super().__init__(width, width)
        self.register_buffer("scale", torch.ones(width))

    def forward(self, x):
        x = torch.tanh(super().forward(x))
        self.scale.mul_(1.1)
        return x * self.scale


def growing():
    module, inputs = chain()
    module.layers = nn.ModuleList(Growing(4) for _ in range(4))
    return module, inputs


class TimeMajor(nn.Module):
    """Layers on [T, B] rows: the rows of a sample are not contiguous."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x, y):
        x = x.transpose(0, 1).flatten(0, 1)
        for layer in self.layers:
            x = torch.tanh(layer(x)) + x
        return functional.mse_loss(x, y.repeat(3, 1))


def time_major(batch=12):
    numbers = torch.arange(batch * 12, dtype=torch.float64).reshape(batch, 3, 4)
    return TimeMajor(), (torch.sin(numbers), torch.cos(numbers[:, 0]))


def with_data(name, seed=0, dtype=torch.float64):
    """Return a module without dropout, in float64 or another type unless `dtype` is None, and
    nonzero inputs."""
    torch.manual_seed(seed)
    module, inputs, *_ = function_at(name)()
    module = module.to(dtype) if dtype else module
    draws = torch.Generator().manual_seed(1)

    def drawn(value):
        if not isinstance(value, torch.Tensor):
            return value
        if value.is_floating_point():
            drawn = torch.randn(value.shape, generator=draws, dtype=torch.float64)
            return (value if value.any() else drawn).to(dtype or value.dtype)
        return value if value.any() else torch.randint(0, 2, value.shape, generator=draws)

    inputs = (inputs,) if isinstance(inputs, torch.Tensor) else inputs
    if isinstance(inputs, dict):
        return module, {name: drawn(value) for name, value in inputs.items()}
    return module, tuple(map(drawn, inputs))


def prepared(name, dtype=torch.float64):
    """Return (module, inputs, Captured) of `MODULE:FACTORY`; they must not be changed."""
    return _prepared(name, dtype)


@cache
def _prepared(name, dtype):
    module, inputs = exact(name, dtype)
    captured = capture(module, inputs)
    reduction = (*function_at(name)(), "")[2]
    return module, inputs, captured._replace(loss=captured.loss._replace(reduction=reduction))


def exact(name, dtype=torch.float64):
    """Return a module and its inputs, without dropout unless its name contains it."""
    module, inputs = with_data(name, dtype=dtype)
    for part in () if "dropping" in name else module.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
        elif isinstance(getattr(part, "dropout", None), float):
            part.dropout = 0.0
    return module, inputs


def dropping():
    """Every layer drops a third of its elements."""
    return chain(dropout=1 / 3)


class Shifted(nn.Module):
    """Noise in a buffer, and in memory that is modified in place."""

    def __init__(self, width):
        super().__init__()
        self.register_buffer("noise", torch.zeros(width))

    def forward(self, x):
        self.noise.normal_(0.0, 0.1)
        return functional.rrelu(x + self.noise, training=True, inplace=True)


class Noisy(nn.Module):
    """Module with random operations of many kinds."""

    def __init__(self, width=4):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(4))
        self.cell = nn.GRU(width, width, num_layers=2, dropout=0.3, batch_first=True)
        self.shifted = Shifted(width)

    def forward(self, x, y):
        one, two, three, four = self.layers
        y_kept = torch.rand(x.shape[0], 1).add_(0.8).floor_()
        kept = x.new_empty((x.shape[0], 1)).bernoulli_(0.8).div_(0.8)
        x = x + kept * torch.tanh(one(x))
        mean, deviation = two(x), torch.exp(0.1 * three(x))
        x = self.shifted(mean + deviation * torch.randn_like(deviation))
        x = functional.alpha_dropout(four(x), 0.2, self.training) * y_kept
        x = x + functional.gumbel_softmax(x).T.contiguous().T
        x, _ = self.cell(x.unsqueeze(1) * torch.empty(x.shape[0], 2, 1).uniform_(0.5, 1.5))
        return functional.mse_loss(x[:, 1] + torch.normal(y, 0.1), y)


def noisy(batch=12):
    _, inputs = chain(batch=batch)
    return Noisy(), inputs


class Diffusion(nn.Module):
    """Model whose first layer adds noise, which the loss compares with its result."""

    def __init__(self, width=4):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(4))

    def forward(self, x):
        noise = torch.randn(x.shape, dtype=x.dtype)
        return self.loss(x, noise, torch.rand(x.shape[0], 1, dtype=x.dtype))

    def loss(self, x, noise, time):
        x = x * (1 - time) + noise * time
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return functional.mse_loss(x, noise)


def diffusion():
    _, (x, _) = chain()
    return Diffusion(), (x,)


def called(module, inputs):
    """Return the results of a module, and its loss."""
    outputs = NamedOutputs(module)
    given = ((), inputs) if isinstance(inputs, dict) else (inputs, {})
    found = module(*given[0], **given[1])
    del module.forward
    module._forward_hooks.popitem()
    return [*found.values()], found[outputs.loss()]


def part_of(inputs, batch, rows):
    """Return the inputs of some samples."""

    def cut(value):
        carries = isinstance(value, torch.Tensor) and value.dim() and len(value) == batch
        return value[rows.start : rows.stop] if carries else value

    if isinstance(inputs, dict):
        return {name: cut(value) for name, value in inputs.items()}
    return tuple(map(cut, inputs))


def trained_by_torch(name, micros, replicas=1, dtype=torch.float64):
    """Train the whole module with torch for STEPS steps, one microbatch of a replica at a time.

    Returns (parameters and buffers by name, losses). In 16 bits, gradients are added and
    parameters updated in float32. In float16, losses are scaled, and steps with overflowing
    gradients are skipped."""
    module, inputs, captured = prepared(name, dtype)
    module, batch = copy.deepcopy(module), captured.batch
    masters = [(each, _master(each)) for each in module.parameters()]
    optimizer = torch_optimizer([master for _, master in masters])
    losses, scale = [], 2.0**16 if dtype == torch.float16 else 1.0
    for _ in range(STEPS):
        optimizer.zero_grad()
        total = 0.0
        for micro in range(micros):
            for replica in range(replicas):
                rows = [*rows_of(batch, micros, replicas, replica)][micro]
                _, loss = called(module, part_of(inputs, batch, rows))
                (loss * (scale * len(rows) / batch)).backward()
                total += float(loss.detach()) * len(rows) / batch
                _add_gradients(masters, scale)
        graded = [master for _, master in masters if master.grad is not None]
        norm = sum(float((each.grad**2).sum()) for each in graded) ** 0.5
        losses.append(total)
        if not np.isfinite(norm):
            scale /= 2
            continue
        for each in graded:
            each.grad *= min(1.0, CLIP / norm)
        optimizer.step()
        for each, master in masters:
            each.data.copy_(master.data)
    return state(module), losses


def _master(parameter):
    wide = torch.promote_types(parameter.dtype, torch.float32)
    return torch.nn.Parameter(parameter.detach().to(wide, copy=True))


def _add_gradients(masters, scale):
    for each, master in masters:
        if each.grad is not None:
            grad = each.grad.to(master.dtype) / scale
            master.grad = grad if master.grad is None else master.grad + grad
            each.grad = None


def torch_optimizer(parameters):
    """Return the torch optimizer for `config_of`."""
    wide = [each for each in parameters if each.dim() > 1]
    narrow = [each for each in parameters if each.dim() < 2]
    groups = [{"params": wide, "weight_decay": DECAY}, {"params": narrow, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.95), eps=1e-8)


def state(module):
    """Return copies of the parameters and buffers of a module, with all their names."""
    held = [
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    ]
    return {name: copied(value) for name, value in held}


def copied(tensor):
    """Return the values of a tensor, in float32 if it has 16 bits."""
    wide = tensor.float() if tensor.dtype.itemsize == 2 else tensor
    return wide.detach().numpy().copy()


def even_parts(captured, count):
    """Split the pieces of a model into equal parts."""
    size = len(captured.pieces)
    return [range(size * part // count, size * (part + 1) // count) for part in range(count)]


def config_of(captured, replicas, micros, schedule, chunks=1, **how):
    """Return a Config for the training of `trained_by_torch`."""
    (dtype,) = {each.dtype for each in state_of(captured).values() if each.requires_grad}
    parallel = ParallelConfig(
        microbatches=micros, schedule=schedule, chunks=chunks, bucket_mb=1e-4, **how
    )
    train = TrainConfig(
        steps=STEPS,
        batch=captured.batch,
        learning_rate=RATE,
        warmup=0,
        decay="constant",
        weight_decay=DECAY,
        clip=CLIP,
        dtype=str(dtype).removeprefix("torch."),
    )
    mesh = MeshConfig(p=len(replicas), d=max(replicas), x=1, y=1, z=1)
    return Config(mesh=mesh, parallel=parallel, train=train)


def trained(*how, **more):
    """Return (tensors by name, losses) of every rank after STEPS steps; see `on_ranks`."""

    def steps(trainer):
        losses = [trainer.step(number).loss for number in range(STEPS)]
        return unsplit(trainer.torch_weights), losses

    return on_ranks(steps, *how, **more)


def on_ranks(
    work,
    name,
    replicas,
    micros,
    schedule,
    recompute=False,
    watched=lambda mesh: mesh,
    dtype=torch.float64,
    ways=1,
    **how,
):
    """Call `work(trainer)` on every rank, with threads as ranks, for a module in equal parts;
    `watched(mesh)` is the mesh of the training."""
    module, inputs, captured = prepared(name, dtype)
    config = config_of(captured, replicas, micros, schedule, **how)
    count = len(replicas) * config.parallel.chunks
    split = find(schedule).splits_backward
    parts = even_parts(captured, count)
    model = staged_model(captured, parts, replicas, [recompute] * count, split=split, ways=ways)
    flat, values = flat_inputs(captured, inputs), dict(values_in(module, captured))
    program = program_of(config)

    def rank(mesh, line):
        first = mesh.rank == 0
        batches = (lambda step: flat) if first else None
        trainer = ModuleTrainer(watched(mesh), config, model, line, batches, program, perf_counter)
        trainer.fill(values if first else {})
        return work(trainer)

    return run_stages(replicas, captured.batch // micros, rank, ways)


def unsplit(weights):
    """Return copies of all tensors of a rank, joined with those of tensor-parallel peers."""
    found = {}
    for name, value in weights.tensors.items():
        split = weights.splits.get(name)
        full = gathered(value.detach(), split, weights.ranks) if split else value.detach()
        found[name] = copied(full)
    return found


def assert_trained_alike(found, expected, close=1e-10):
    """Assert that all ranks have torch's tensors and losses."""
    tensors, losses = expected
    names = set()
    for ours, seen in found:
        np.testing.assert_allclose(seen, losses, rtol=close)
        for name in ours.keys() & tensors.keys():
            np.testing.assert_allclose(ours[name], tensors[name], 0, close, err_msg=name)
        names |= ours.keys()
    assert len({id(tensors[name]) for name in names & tensors.keys()}) > 0


# As runs on real ranks take them


def in_double():
    module, inputs = everything()
    return module.double(), inputs


def batch_of(step):
    """Return the inputs of `in_double` in a step."""
    ids = (torch.arange(12) + step) % 5
    return {"ids": ids, "labels": (3 * ids + 1 + step) % 5}


def dropping_in_double():
    module, inputs = dropping()
    return module.double(), inputs


def eight_layers():
    module, inputs = chain(layers=8)
    return module.double(), inputs


def points_of(step):
    """Return the inputs of `dropping_in_double` in a step."""
    numbers = torch.arange(48, dtype=torch.float64).reshape(12, 4) + step
    return torch.sin(numbers), torch.cos(numbers)


def too_few(step):
    return torch.zeros(3, 4), torch.zeros(3, 4)
