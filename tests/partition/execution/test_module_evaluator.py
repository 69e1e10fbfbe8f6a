"""Evaluation of modules on threads: loss of torch, and unchanged training."""

import copy
from time import perf_counter

import numpy as np
import pytest

pytest.importorskip("torch")

import torch
from torch import nn
from torch.nn import functional

from hpc3d.comm.threads import run_stages
from hpc3d.partition.capture import capture, captured_by_sample
from hpc3d.partition.capturing.user_module import in_evaluation
from hpc3d.partition.execution.evaluation_model import staged_evaluation
from hpc3d.partition.execution.module_evaluator import ModuleEvaluator
from hpc3d.partition.execution.module_run import StepInputs
from hpc3d.partition.execution.module_trainer import ModuleTrainer
from hpc3d.partition.execution.sample_batches import flat_inputs
from hpc3d.partition.execution.staged_model import staged_model
from hpc3d.partition.execution.torch_weights import values_in
from hpc3d.pipeline.program import program_of
from hpc3d.pipeline.schedule import find
from tests.partition.execution.modules import config_of, even_parts, prepared, unsplit

HERE = "tests.partition.execution.test_module_evaluator"
STEPS, BATCHES = 3, 2


class Blocks(nn.Module):
    """`body(model, x)` four times, and the loss of the valid targets."""

    def __init__(self, body, norm=nn.Identity):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.norms = nn.ModuleList(norm() for _ in range(4))
        self.body = body

    def forward(self, x, labels):
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = self.body(self, norm(layer(x)), x)
        return {"loss": functional.cross_entropy(x, labels)}


def inputs_of(number, batch=12):
    """Return labels, a varying number of which are -100."""
    draws = torch.Generator().manual_seed(number)
    x = torch.randn(batch, 4, generator=draws, dtype=torch.float64)
    labels = torch.randint(0, 4, (batch,), generator=draws)
    labels[: 2 + 3 * number] = -100
    return x, labels


def of(body, norm=nn.Identity):
    return Blocks(body, norm), inputs_of(0)


def dropping():
    def body(model, y, x):
        return functional.dropout(torch.tanh(y), 0.3, model.training) + x

    return of(body, lambda: nn.BatchNorm1d(4))


def paired():
    """Layers that tensor-parallel ranks split, with dropout in between."""
    return of(lambda model, y, x: functional.dropout(functional.gelu(y), 0.3, model.training))


def skipping():
    """Stochastic depth, and different constants in both modes."""

    def body(model, y, x):
        if model.training:
            keep = torch.rand(x.shape[0], 1, dtype=x.dtype).add(0.8).floor()
            return x + torch.tanh(y) / 0.8 * keep * torch.tensor([1.0, 2.0, 1.0, 1.0])
        return x + torch.tanh(y) * torch.tensor([1.0, 1.0, 3.0, 1.0])

    return of(body)


class Counting(nn.Module):
    """Noise in a buffer that every call changes, also in evaluation mode."""

    def __init__(self, persistent=True):
        super().__init__()
        self.register_buffer("total", torch.ones(4), persistent=persistent)

    def forward(self, x):
        self.total.mul_(1.5)
        return x + self.total


def counting():
    return of(lambda model, y, x: torch.tanh(y) + x, Counting)


def counting_in_memory():
    return of(lambda model, y, x: torch.tanh(y) + x, lambda: Counting(persistent=False))


def recurrent():
    class Recurrent(Blocks):
        def __init__(self):
            super().__init__(lambda model, y, x: model.dropped(torch.tanh(y)) + x)
            self.cell = nn.GRU(4, 4, num_layers=2, dropout=0.4, batch_first=True)
            self.dropped = nn.AlphaDropout(0.3)

        def forward(self, x, labels):
            x, _ = self.cell(x.unsqueeze(1))
            return super().forward(x.squeeze(1), labels)

    return Recurrent(), inputs_of(0)


def auxiliary():
    """Second loss with a layer that only training uses."""

    class Auxiliary(Blocks):
        def __init__(self):
            super().__init__(lambda model, y, x: torch.tanh(y) + x)
            self.second = nn.Linear(4, 4)

        def forward(self, x, labels):
            found = super().forward(x, labels)["loss"]
            if self.training:
                found = found + functional.cross_entropy(self.second(x), labels)
            return {"loss": found}

    return Auxiliary(), inputs_of(0)


def calibrated():
    """Return layers with scales that only the evaluation reads."""

    def body(model, y, x):
        return torch.tanh(y) + x if model.training else torch.tanh(y) * model.scales + x

    module, inputs = of(body)
    module.scales = nn.Parameter(torch.tensor([1.0, 2.0, 0.5, 1.5]))
    return module, inputs


def in_evaluation_mode(name):
    module, inputs, _ = prepared(name)
    module = copy.deepcopy(module)
    with in_evaluation(module):
        return captured_by_sample(module, inputs, lambda: (module.eval(), inputs))


def expected_loss(module):
    """Return torch's mean loss over the validation batches."""
    module.eval()
    with torch.no_grad():
        copies = [copy.deepcopy(module) for _ in range(BATCHES)]
        return np.mean([float(each(*inputs_of(n))["loss"]) for n, each in enumerate(copies)])


def trained(name, replicas, micros, schedule, evaluate=True, recompute=False, ways=1, **how):
    """Return (evaluations, losses, tensors after each step) of each rank."""
    module, inputs, captured = prepared(name)
    config = config_of(captured, replicas, micros, schedule, **how)
    count = len(replicas) * config.parallel.chunks
    parts, split = even_parts(captured, count), find(schedule).splits_backward
    model = staged_model(captured, parts, replicas, [recompute] * count, split=split, ways=ways)
    assert ways == 1 or model.splits
    evaluated = staged_evaluation(in_evaluation_mode(name), model, parts)
    flat, program = flat_inputs(captured, inputs), program_of(config)

    def rank(mesh, line):
        first, found = mesh.rank == 0, []
        batches = (lambda step: flat) if first else None
        trainer = ModuleTrainer(mesh, config, model, line, batches, program, perf_counter)
        trainer.fill(dict(values_in(module, captured)) if first else {})
        validation = StepInputs(evaluated.captured, inputs_of, captured.batch, BATCHES)
        values = dict(values_in(module, evaluated.captured))
        evaluator = ModuleEvaluator(trainer, evaluated, validation if first else None)
        evaluator.fill(values if first else {})
        for number in range(STEPS):
            loss = trainer.step(number).loss
            after = evaluator.evaluate(number) if evaluate else None
            tensors = unsplit(trainer.torch_weights).items()
            found.append((loss, after, {key: torch.as_tensor(each) for key, each in tensors}))
        return found

    return run_stages(replicas, captured.batch // micros, rank, ways)


def assert_as_torch(name, *how, **options):
    found, without = (trained(name, *how, evaluate, **options) for evaluate in (True, False))
    for steps, others in zip(found, without, strict=True):
        for (loss, _, tensors), (other, _, undisturbed) in zip(steps, others, strict=True):
            assert loss == other
            assert all(torch.equal(each, undisturbed[key]) for key, each in tensors.items())
    for number, after in enumerate(zip(*found, strict=True)):
        module = copy.deepcopy(prepared(name)[0])
        tensors = {key: each for _, _, held in after for key, each in held.items()}
        module.load_state_dict(tensors, strict=False)
        for key, buffer in module.named_buffers():
            buffer.copy_(tensors[key])
        for _, evaluation, _ in after:
            np.testing.assert_allclose(evaluation.loss, expected_loss(module), rtol=1e-10)
            assert evaluation.tokens == 12 * BATCHES and np.isnan(evaluation.accuracy)
            assert evaluation.step == number


ON_TWO = ("skipping", "recurrent", "auxiliary", "calibrated", "counting", "counting_in_memory")


@pytest.mark.parametrize(
    ("name", "replicas", "micros", "schedule", "how"),
    [
        ("dropping", (2, 1), 2, "1f1b", {"zero": 1}),
        *[
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [
                ("dropping", (1, 1), 3, "interleaved", {"chunks": 2, "recompute": True}),
                ("dropping", (1, 2, 1), 2, "zb-h1", {}),
                ("dropping", (2,), 3, "none", {}),
                ("paired", (1, 1), 2, "1f1b", {"ways": 2}),
                ("paired", (1, 2), 2, "1f1b", {"ways": 2, "recompute": True}),
                ("dropping", (2, 2), 3, "gpipe", {"zero": 1, "recompute": True}),
                *[(name, (1, 1), 2, "1f1b", {}) for name in ON_TWO],
                ("skipping", (2, 1, 1), 2, "1f1b", {}),
            ]
        ],
    ],
)
def test_evaluation_matches_torch_and_does_not_affect_training(
    name, replicas, micros, schedule, how
):
    assert_as_torch(f"{HERE}:{name}", replicas, micros, schedule, **how)


def test_weights_that_evaluation_splits_differently_are_refused():
    """In evaluation, all columns of the first layer are required at once."""

    def body(model, y, x):
        return functional.gelu(y) if model.training else y.softmax(-1)

    module, inputs = of(body)
    captured = capture(module.double(), inputs)
    parts = even_parts(captured, 1)
    model = staged_model(captured, parts, [1], [False], ways=2)
    with in_evaluation(module):
        evaluated = captured_by_sample(module, inputs, lambda: (module.eval(), inputs))
    with pytest.raises(ValueError, match="split differently over the 2 tensor-parallel ranks"):
        staged_evaluation(evaluated, model, parts)


def double(name):
    """Return one of the modules, for runs on real ranks."""
    module, inputs = globals()[name]()
    return module.double(), inputs
