"""Training of a public model with a plan, on threads as ranks, and with torch in one process.

Both use the same random numbers. `in_double` lets a model compute in float64 what it converts to
float32, such as its loss, because rounding in float32 would hide small differences.
"""

import copy
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from math import prod
from time import perf_counter
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import torch
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._python_dispatch import TorchDispatchMode

from hpc3d.comm.threads import run_stages
from hpc3d.config.input_file import Config
from hpc3d.config.package_data import default_machine
from hpc3d.ops.random import keep_mask, philox_key
from hpc3d.partition import plan_file
from hpc3d.partition.capture import Captured, captured_of
from hpc3d.partition.capturing.sample_layout import arguments_of
from hpc3d.partition.execution.module_trainer import ModuleTrainer
from hpc3d.partition.execution.random_numbers import Draw, RandomNumbers
from hpc3d.partition.execution.random_operations import is_random
from hpc3d.partition.execution.sample_batches import flat_inputs, rows_of
from hpc3d.partition.execution.staged_model import staged_model
from hpc3d.partition.execution.torch_weights import values_in
from hpc3d.partition.execution.verification import verified
from hpc3d.partition.factory import made_with_data
from hpc3d.partition.module_plan import Wanted
from hpc3d.partition.operation_costs import Operations
from hpc3d.partition.tensor_parallel.plans import tensor_plan
from hpc3d.pipeline.program import program_of
from hpc3d.pipeline.schedule import find
from hpc3d.predict.machine import machine_file
from tests.partition.execution.modules import (
    CLIP,
    DECAY,
    RATE,
    STEPS,
    config_of,
    part_of,
    state,
    unsplit,
)

MICROBATCHES = 2


class Trained(NamedTuple):
    """Parameters and buffers by name, and the loss of each step."""

    tensors: dict[str, np.ndarray]
    losses: list[float]


@contextmanager
def in_double() -> Iterator[None]:
    """Let conversions to float32 in the code of transformers return float64."""
    plain = torch.Tensor.to

    def converted(tensor, *args, **how):
        caller = sys._getframe(1).f_globals["__name__"]
        if caller.startswith("transformers."):
            args = [_wider(each) for each in args]
            how = {name: _wider(each) for name, each in how.items()}
        return plain(tensor, *args, **how)

    with patch.multiple(torch.Tensor, float=torch.Tensor.double, to=converted):
        yield


def _wider(given):
    return torch.float64 if given is torch.float32 else given


class Case(NamedTuple):
    """Captured model, its costs, and the module with data, for any number of plans."""

    name: str
    captured: Captured
    operations: Operations
    module: torch.nn.Module
    inputs: dict[str, Any]


def prepared(name: str) -> Case:
    """Capture the model of the factory `name` as `hpc3d.partition` does."""
    captured = captured_of(name)
    return Case(name, captured, Operations(captured), *made_with_data(name, 0))


def normalizes_batches(case: Case) -> bool:
    """Return True if a model has BatchNorm, whose statistics are those of a microbatch."""
    return any(isinstance(part, _BatchNorm) for part in case.module.modules())


def verify(case: Case) -> None:
    """Compare the captured program with the module, as a run does before its first step."""
    rows = rows_of(case.captured.batch, MICROBATCHES, 1, 0)
    flat = flat_inputs(case.captured, case.inputs)
    verified(case.module, case.captured, flat, [*rows])


def trained_on_ranks(case: Case, replicas: tuple[int, ...], ways: int = 1) -> list[Trained]:
    """Plan stages with these replicas of `ways` ranks, and train them on threads; one result per
    rank."""
    captured = case.captured
    wanted = Wanted(ways * sum(replicas), replicas=replicas, microbatches=MICROBATCHES)
    plan = tensor_plan(case.operations, _machine(), captured.batch, wanted, ways)
    plan = plan_file.saved(plan, captured, case.name, "")
    how = {"split": find(plan.schedule).splits_backward, "ways": plan.tensor}
    model = staged_model(captured, plan.pieces(captured), plan.replicas, plan.recompute, **how)
    layout = plan.replicas, plan.microbatches, plan.schedule, plan.chunks
    config = config_of(captured, *layout, zero=plan.zero)
    flat, values = flat_inputs(captured, case.inputs), dict(values_in(case.module, captured))
    program = program_of(config)

    def rank(mesh, line):
        first = mesh.rank == 0
        batches = (lambda step: flat) if first else None
        trainer = ModuleTrainer(mesh, config, model, line, batches, program, perf_counter)
        trainer.fill(values if first else {})
        losses = [trainer.step(number).loss for number in range(STEPS)]
        return Trained(unsplit(trainer.torch_weights), losses)

    return run_stages(plan.replicas, captured.batch // plan.microbatches, rank, ways)


def _machine():
    """Return the default machine, which computes as fast in float64 as in float32."""
    machine = machine_file.load(default_machine())
    return replace(machine, gemm={**machine.gemm, "float64": machine.gemm["float32"]})


def trained_by_torch(case: Case) -> Trained:
    """Train the module by torch on one process, on all samples of a step at once.

    A module with BatchNorm processes one microbatch after the other.
    """
    module, batch = copy.deepcopy(case.module), case.captured.batch
    trained = [each for each in module.parameters() if each.requires_grad]
    groups = [
        {"params": [each for each in trained if each.dim() > 1], "weight_decay": DECAY},
        {"params": [each for each in trained if each.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.95), eps=1e-8)
    micros, losses = MICROBATCHES if normalizes_batches(case) else 1, []
    for step in range(STEPS):
        optimizer.zero_grad()
        total = 0.0
        for micro in range(micros):
            rows = range(batch * micro // micros, batch * (micro + 1) // micros)
            with Redrawn(case.captured, step, rows) as drawn:
                loss = module(**part_of(case.inputs, batch, rows))["loss"] / micros
            assert drawn.done()
            loss.backward()
            total += loss.item()
        found = [each.grad for each in trained if each.grad is not None]
        norm = sum(float((each**2).sum()) for each in found) ** 0.5
        for each in found:
            each *= min(1.0, CLIP / norm)
        optimizer.step()
        losses.append(total)
    return Trained(state(module), losses)


class Redrawn(TorchDispatchMode):
    """Draws the random numbers of a step from the seed, operation, step and sample.

    In the order of the captured program, each random operation is one call: dropout calls
    `bernoulli_`, and stochastic depth calls `rand`.
    """

    def __init__(self, captured, step, rows):
        super().__init__()
        self.draw = Draw(Config().seed, step, rows.start, len(rows))
        self.nodes = [node for node in captured.program.graph.nodes if is_random(node)]

    def done(self):
        return not self.nodes

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.aten.bernoulli_.float:
            return args[0].copy_(self._kept(*self._next(), args[0].shape))
        if function is torch.ops.aten.rand.default:
            node, dim = self._next()
            return RandomNumbers(node.name, self.draw, dim, kwargs["dtype"]).uniform(args[0])
        return function(*args, **(kwargs or {}))

    def _next(self):
        """Return the next random operation, and the batch dimension of its result."""
        node = self.nodes.pop(0)
        sizes = enumerate(node.meta["val"].shape)
        return node, next((dim for dim, size in sizes if isinstance(size, torch.SymInt)), None)

    def _kept(self, node, dim, shape):
        sizes = [1, *shape] if dim is None else [shape[dim], *shape[:dim], *shape[dim + 1 :]]
        first = 0 if dim is None else sizes[0] // self.draw.samples * self.draw.first
        rows, width = range(first, first + sizes[0]), prod(sizes[1:])
        given = arguments_of(node)
        rate = given.get("p", given.get("dropout_p"))
        key = philox_key((self.draw.seed, node.name, self.draw.step))
        kept = torch.from_numpy(keep_mask(key, rate, rows, range(width), width)).view(sizes)
        return kept[0] if dim is None else kept.movedim(0, dim)


def differences(case: Case, found: list[Trained], expected: Trained) -> tuple[float, float]:
    """Return the largest difference of a loss, and of an element of a parameter or buffer.

    Tensors that no rank holds must be those that torch does not change.
    """
    losses = [each.losses for each in found]
    tensors = [
        np.abs(value.astype(float) - expected.tensors[name]).max(initial=0.0)
        for each in found
        for name, value in each.tensors.items()
        if name in expected.tensors
    ]
    held, start = {name for each in found for name in each.tensors}, state(case.module)
    for name, _ in [*case.module.named_parameters(), *case.module.named_buffers()]:
        assert name in held or np.array_equal(start[name], expected.tensors[name]), name
    return float(np.abs(np.subtract(losses, expected.losses)).max()), float(max(tensors))
