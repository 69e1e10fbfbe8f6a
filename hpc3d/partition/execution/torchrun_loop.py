"""Training loop for a partitioned model on the stages of torch.distributed.pipelining.

hpc3d.partition.execution.torchrun_file copies this source code, without this docstring, to the
beginning of each file that it writes. It must not import anything from hpc3d.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from importlib import import_module
from itertools import count
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import PipelineStage, ScheduleInterleaved1F1B
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint


class ModelPart(nn.Module):
    """Module that computes one model chunk.

    `reads_weights` contains the names of the chunk's weights in the full model, and
    `writes_buffers` the names of the buffers that it modifies. Tensors in `weights` that are not
    parameters become buffers, which are persistent if their names are in `state`.
    """

    reads_weights: tuple[str, ...] = ()
    writes_buffers: tuple[str, ...] = ()

    def __init__(self, weights: Mapping[str, torch.Tensor], state: Collection[str]) -> None:
        super().__init__()
        for name in self.reads_weights:
            *path, last = name.split(".")
            home: nn.Module = self
            for each in path:
                if each not in dict(home.named_children()):
                    setattr(home, each, nn.Module())
                home = getattr(home, each)
            if isinstance(weights[name], nn.Parameter):
                home.register_parameter(last, weights[name])
            else:
                home.register_buffer(last, weights[name], persistent=name in state)


class ComputedAgain(nn.Module):
    """Model chunk with activation checkpointing.

    Only the received tensors and the initial values of modified buffers are saved for each
    microbatch. The backward pass recomputes all other activations.
    """

    def __init__(self, part: ModelPart) -> None:
        super().__init__()
        self.part = part

    def forward(self, *received: torch.Tensor, inputs: Any = None) -> Any:
        before = {name: buffer.clone() for name, buffer in _written(self.part).items()}
        passes, more = count(), {"inputs": inputs}

        def computed(*received: torch.Tensor) -> Any:
            if next(passes) == 0:
                return self.part(*received, **more)
            return functional_call(self.part, before, received, more)

        return checkpoint(computed, *received, use_reentrant=False)


def _written(part):
    """Return the buffers that a forward pass modifies, as a dict from name to buffer."""
    return {name: part.get_buffer(name) for name in part.writes_buffers}


class CutModel(NamedTuple):
    """Partitioned model, and the settings of its pipeline.

    `parts` contains the classes of the model chunks. Chunk n is on stage n mod `stages`; each
    stage has `replicas` replicas. `make()` returns the model with its initial weights, and the
    inputs of a step. `named` converts the inputs to a dict with the names that the chunks use;
    inputs in `undivided` have no batch dimension. `borders[n](rows)` returns the tensors that
    chunk n sends for a microbatch of `rows` samples. `recompute` is True for chunks with
    activation checkpointing. `constants` maps names to the tensors that the model creates itself.
    The last chunk returns the loss, a mean over samples.
    """

    make: Callable[[], tuple[nn.Module, Any]]
    named: Callable[[Any], dict[str, torch.Tensor]]
    undivided: Collection[str]
    parts: Sequence[type[ModelPart]]
    borders: Sequence[Callable[[int], list[torch.Tensor]]]
    recompute: Sequence[bool]
    constants: Mapping[str, torch.Tensor]
    stages: int
    replicas: int
    microbatches: int
    schedule: type

    @property
    def processes(self) -> int:
        return self.stages * self.replicas


def crossing(shape: Sequence[int], dtype: torch.dtype, graded: bool) -> torch.Tensor:
    """Return a meta tensor that represents a tensor sent between chunks.

    `graded` is True if the sent tensor has a gradient.
    """
    return torch.empty(shape, dtype=dtype, device="meta", requires_grad=graded)


class PartTrainer:
    """Trainer for the model chunks of this process.

    The axes of `mesh` are "stage" and "replica". `model` is the full model with the initial
    weights. A step has `samples` samples.
    """

    def __init__(
        self,
        cut: CutModel,
        mesh: DeviceMesh,
        model: nn.Module,
        samples: int,
        learning_rate: float,
    ) -> None:
        self.cut, self.mesh, self.samples = cut, mesh, samples
        self.stage, self.replica = (mesh.get_local_rank(axis) for axis in ("stage", "replica"))
        self.device = _device()
        here = range(self.stage, len(cut.parts), cut.stages)
        names = {name for number in here for name in cut.parts[number].reads_weights}
        weights = {name: self._weight(model, name) for name in sorted(names)}
        self.parts = [cut.parts[number](weights, model.state_dict().keys()) for number in here]
        self.schedule = self._scheduled(here)
        self.trained = {name: each for name, each in weights.items() if each.requires_grad}
        self.owners = self._owners()
        group = {"params": [*self.trained.values()]}
        self.optimizer = torch.optim.AdamW([group], lr=learning_rate)

    def _weight(self, model, name):
        home, _, last = name.rpartition(".")
        held = getattr(model.get_submodule(home), last, self.cut.constants.get(name))
        copied = held.detach().to(self.device, copy=True)
        trained = isinstance(held, nn.Parameter)
        return nn.Parameter(copied, held.requires_grad) if trained else copied

    def _scheduled(self, here):
        """Return the pipeline schedule for the stages of this process.

        Shapes are passed explicitly, because torch would infer them by running a forward pass on
        uninitialized memory.
        """
        cut = self.cut
        rows = self.samples // (cut.replicas * cut.microbatches)
        ends = [[], *(border(rows) for border in cut.borders), [torch.empty((), device="meta")]]
        stages = [
            PipelineStage(
                ComputedAgain(part) if cut.recompute[number] else part,
                number,
                len(cut.parts),
                self.device,
                input_args=tuple(ends[number]),
                output_args=tuple(ends[number + 1]),
                group=self.mesh.get_group("stage"),
            )
            for number, part in zip(here, self.parts, strict=True)
        ]
        given = stages if cut.schedule is ScheduleInterleaved1F1B else stages[0]
        return cut.schedule(given, cut.microbatches, loss_fn=self._share, scale_grads=False)

    def _share(self, loss, target):
        """Scale the loss of a microbatch so that the sum over microbatches is the mean loss."""
        return loss / self.cut.microbatches

    def _owners(self):
        """Return a dict from the name of each trained weight on several processes to their group.

        All processes create all groups in the same order.
        """
        cut, stages = self.cut, {}
        for number, part in enumerate(cut.parts):
            for name in part.reads_weights:
                stages.setdefault(name, set()).add(number % cut.stages)
        found = {name: tuple(sorted(numbers)) for name, numbers in stages.items()}
        groups = {}
        for numbers in sorted({*found.values()}):
            ranks = [rank for stage in numbers for rank in self.mesh.mesh[stage].tolist()]
            if len(ranks) > 1:
                groups[numbers] = dist.new_group(ranks)
        return {name: groups[found[name]] for name in self.trained if found[name] in groups}

    def step(self, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Run a training step and return the loss, averaged over all samples.

        The result is 0 on all stages except the last one.
        """
        self.optimizer.zero_grad()
        mine = {name: self._share_of(name, value) for name, value in inputs.items()}
        more = {"inputs": mine} if mine else {}
        losses, places = [], torch.zeros(self.cut.microbatches)
        self.schedule.step(target=places, losses=losses, return_outputs=False, **more)
        self._sum_gradients()
        self.optimizer.step()
        self._average_buffers()
        loss = sum((each.detach() for each in losses), torch.zeros((), device=self.device))
        dist.all_reduce(loss, group=self.mesh.get_group("replica"))
        return loss / self.cut.replicas

    def _share_of(self, name, value):
        """Return this replica's rows of an input.

        An input without a batch dimension is repeated for each microbatch.
        """
        value = value.to(self.device)
        if name in self.cut.undivided:
            return value.expand(self.cut.microbatches, *value.shape)
        rows = len(value) // self.cut.replicas
        return value[self.replica * rows : (self.replica + 1) * rows]

    def _sum_gradients(self):
        """Average gradients over replicas, and sum them over stages that share a weight.

        Gradients are reduced in the order of the weight names, which is the same on all processes.
        """
        sums = []
        for name, group in self.owners.items():
            weight = self.trained[name]
            if weight.grad is None:
                weight.grad = torch.zeros_like(weight)
            weight.grad /= self.cut.replicas
            sums.append(dist.all_reduce(weight.grad, group=group, async_op=True))
        for each in sums:
            each.wait()

    def _average_buffers(self):
        for part in self.parts if self.cut.replicas > 1 else ():
            for buffer in _written(part).values():
                if buffer.is_floating_point():
                    dist.all_reduce(buffer, group=self.mesh.get_group("replica"))
                    buffer /= self.cut.replicas

    def state(self) -> dict[str, torch.Tensor]:
        """Return the entries of the full model's state dict that this process holds."""
        return {key: value for part in self.parts for key, value in part.state_dict().items()}


def _device():
    if torch.cuda.is_available():
        return torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    return torch.device("cpu")


def _options():
    parser = argparse.ArgumentParser(description="Train the model under torchrun.")
    parser.add_argument("--steps", type=int, default=10, metavar="K")
    parser.add_argument("--learning-rate", type=float, default=1e-3, metavar="X")
    parser.add_argument(
        "--seed", type=int, default=0, help="random seed for initial weights and dropout"
    )
    inputs = "function(step) that returns the inputs of a step (default: the example inputs)"
    parser.add_argument("--inputs", metavar="MODULE:FUNCTION", help=inputs)
    parser.add_argument(
        "--save", metavar="FOLDER", help="write the final state dict, one file per stage"
    )
    return parser.parse_args()


def main(cut: CutModel) -> None:
    """Train the model in a process that was started by torchrun."""
    options = _options()
    if int(os.environ.get("WORLD_SIZE", "0")) != cut.processes:
        command = f"torchrun --nproc-per-node {cut.processes} {sys.argv[0]}"
        sys.exit(f"this plan requires {cut.processes} processes; run {command}")
    device = _device()
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    try:
        _train(cut, options)
        dist.barrier()  # keeps a process from exiting while a peer is sending
        gc.collect()  # frees references to groups; otherwise their threads outlive the next line
    finally:
        dist.destroy_process_group()


def _train(cut, options):
    sys.path.insert(0, os.getcwd())
    torch.manual_seed(options.seed)
    model, example = cut.make()
    batches = _batches(cut, options.inputs, example)
    samples = _samples(cut, batches(0))
    axes = {"mesh_shape": (cut.stages, cut.replicas), "mesh_dim_names": ("stage", "replica")}
    mesh = init_device_mesh(_device().type, **axes)
    trainer = PartTrainer(cut, mesh, model, samples, options.learning_rate)
    torch.manual_seed(options.seed + 1 + dist.get_rank())
    for step in range(options.steps):
        loss = trainer.step(batches(step))
        if dist.get_rank() == cut.processes - cut.replicas:
            print(f"step {step}  loss {loss.item():.12g}", flush=True)
    if options.save and trainer.replica == 0:
        os.makedirs(options.save, exist_ok=True)
        torch.save(trainer.state(), os.path.join(options.save, f"stage-{trainer.stage}.pt"))


def _batches(cut, place, example):
    module, _, function = (place or "").partition(":")
    given = getattr(import_module(module), function) if place else lambda step: example

    def batches(step):
        inputs = given(step)
        return cut.named((inputs,) if isinstance(inputs, torch.Tensor) else inputs)

    return batches


def _samples(cut, inputs):
    """Return the number of samples per step; exit if the samples cannot be split evenly."""
    samples = next(len(value) for name, value in inputs.items() if name not in cut.undivided)
    if samples % (cut.replicas * cut.microbatches):
        shares = f"{cut.microbatches} microbatches x {cut.replicas} replicas"
        sys.exit(
            f"a batch of {samples} samples must be divisible by {shares}; use another batch size"
        )
    return samples
