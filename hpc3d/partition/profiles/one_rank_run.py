"""Run a module on a single rank to time passes, steps and optimizer updates."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from hpc3d.arrays.pool import Pool
from hpc3d.comm.communicator import Self
from hpc3d.comm.stage_mesh import stage_mesh
from hpc3d.config.input_file import Config, MeshConfig, ParallelConfig, TrainConfig
from hpc3d.model.layers import immediately
from hpc3d.partition.capture import Captured, carries_batch, gradient_bytes
from hpc3d.partition.execution.module_trainer import ModuleTrainer
from hpc3d.partition.execution.sample_batches import SampleRows, flat_inputs
from hpc3d.partition.execution.stage_program import graded, stage_programs
from hpc3d.partition.execution.staged_model import staged_model
from hpc3d.partition.execution.torch_stage import TorchStage
from hpc3d.partition.execution.torch_weights import values_in
from hpc3d.pipeline.program import program_of
from hpc3d.pipeline.schedule import ONE_STAGE


class StepSeconds(NamedTuple):
    """Times in seconds of a one-microbatch step: all passes, the update, and the remainder."""

    passes: float
    update: float
    rest: float


class OneRankRun:
    """Timed run of a captured module on real data.

    All steps use the same `batch` samples; `inputs` with fewer samples are repeated. The learning
    rate is 0, so that the weights do not change. `clock()` returns a reading, and the difference
    of two readings is a time in seconds. `pool` allocates the arrays, on a GPU if it is the pool
    of a device.
    """

    def __init__(
        self,
        captured: Captured,
        module: torch.nn.Module,
        inputs: tuple | dict,
        batch: int,
        clock: Callable[[], Any],
        pool: Pool | None = None,
    ) -> None:
        self.captured, self.clock, self.batch = captured, clock, batch
        self.inputs = dict(zip(captured.inputs, _repeated(captured, inputs, batch), strict=True))
        every = range(len(captured.pieces))
        self.model = staged_model(captured, [every], (1,), (False,))
        train = TrainConfig(steps=1, batch=batch, dtype=self.model.dtype, learning_rate=0.0)
        parallel = ParallelConfig(schedule=ONE_STAGE, chunks=1)
        config = Config(mesh=MeshConfig(x=1, y=1, z=1), parallel=parallel, train=train)
        world = Self(pool)
        mesh = stage_mesh((1,), batch, world, lambda members: world, Self())
        flat = [*self.inputs.values()]
        self.trainer = ModuleTrainer(
            mesh, config, self.model, Self, lambda step: flat, program_of(config), clock
        )
        self.trainer.fill(dict(values_in(module, captured)))
        self.weights: Mapping[str, torch.Tensor] = self.trainer.torch_weights.tensors
        self.steps = 0

    @property
    def device(self) -> torch.device:
        """Device on which torch computes."""
        return self.trainer.torch_weights.device

    @property
    def trained_bytes(self) -> int:
        """Total size in bytes of the gradients."""
        return sum(gradient_bytes(each) for each in self.weights.values() if each.requires_grad)

    def micro(self, rows: int) -> SampleRows:
        """Return the first `rows` samples of the batch as a microbatch."""
        inputs = dict(self.inputs)
        for node, value in inputs.items():
            if isinstance(value, torch.Tensor):
                own = value[:rows] if carries_batch(node) else value
                inputs[node] = own.to(self.device)
        return SampleRows(0, 0, rows, inputs, 1 / rows)

    def stages(self, parts: Sequence[Sequence[int]]) -> list[TorchStage]:
        """Return one stage for each list of piece indices; all stages use the same weights."""
        programs = stage_programs(self.captured, parts)
        crossing, last = graded(self.captured, programs), len(programs) - 1
        return [
            TorchStage(
                program,
                self.trainer.torch_weights,
                self.model.graded | crossing,
                0,
                self.trainer.saving,
                self.model.loss if number == last else None,
            )
            for number, program in enumerate(programs)
        ]

    def passes(self, stages: Sequence[TorchStage], rows: int) -> tuple[float, float]:
        """Run a microbatch through all stages; return forward and backward times in seconds."""
        micro, times, kept, block = self.micro(rows), [self.clock()], [], None
        for stage in stages:
            block, saved = stage.forward(block, micro)
            kept.append(saved)
        times.append(self.clock())
        block = None
        for stage in reversed(stages):
            # On a single rank, completed gradients need no reduction.
            block = stage.backward(block, kept.pop(), micro, immediately, lambda unit: None)
        times.append(self.clock())
        return times[1] - times[0], times[2] - times[1]

    def step(self) -> StepSeconds:
        """Run the next training step and return its times."""
        start = self.clock()
        self.trainer.step(self.steps)
        whole = self.clock() - start
        self.steps += 1
        spent = self.trainer.engine.seconds
        passes, update = spent["F"] + spent["BW"], spent["Step"]
        return StepSeconds(passes, update, whole - passes - update)


def _repeated(captured: Captured, inputs: tuple | dict, batch: int) -> list[Any]:
    """Return the inputs in program order, with samples repeated to obtain `batch` samples."""
    rows = torch.arange(batch) % captured.batch
    return [
        value[rows] if carries_batch(node) else value
        for node, value in zip(captured.inputs, flat_inputs(captured, inputs), strict=True)
    ]
