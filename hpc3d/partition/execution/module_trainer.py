"""Trainer for an unmodified torch module that is partitioned into pipeline stages."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from hpc3d.comm.mesh import DATA
from hpc3d.comm.stage_mesh import TENSOR, Line, ranks_of
from hpc3d.partition.capture import state_of
from hpc3d.partition.execution.loss_terms import LossTerms
from hpc3d.partition.execution.sample_batches import SampleLoader, rows_of, shared_by_root
from hpc3d.partition.execution.saved_tensors import SavedTensors
from hpc3d.partition.execution.staged_model import Owners, StagedModel
from hpc3d.partition.execution.torch_stage import TorchStage
from hpc3d.partition.execution.torch_weights import TorchWeights, stored_tensors
from hpc3d.pipeline.gradient_buckets import Buckets
from hpc3d.training.trainer import Trainer

if TYPE_CHECKING:
    from hpc3d.comm.communicator import Communicator
    from hpc3d.comm.mesh import Mesh
    from hpc3d.config.input_file import Config
    from hpc3d.model.parameters import Parameter, Parameters
    from hpc3d.pipeline.instruction import Placement
    from hpc3d.pipeline.program import Program


class ModuleTrainer(Trainer):
    """Trainer for the model chunks of one rank, on a mesh from hpc3d.comm.stage_mesh.

    `line(ranks)` creates a communicator for a list of ranks. `batches(step)` returns the inputs of
    a step as a flat list; `batches` is `None` on all ranks except rank 0. The weights are
    uninitialized until `fill` is called.
    """

    has_tied_ends = False

    def __init__(
        self,
        mesh: Mesh,
        config: Config,
        model: StagedModel,
        line: Line,
        batches: Callable[[int], list[Any]] | None,
        program: Program,
        clock: Callable[[], float],
    ) -> None:
        self.model, stage = model, mesh.coord("p")
        ranks = ranks_of(model.replicas, model.ways, mesh.coord(TENSOR))
        lines = lines_of_owners(model.owners, ranks, stage, line)
        self.lines = {stages: mesh.wrapped(line, DATA) for stages, line in lines.items()}
        self.loss_terms = LossTerms(model.captured)
        feed = partial(sample_loader, model, self.loss_terms)
        super().__init__(mesh, config, 0, batches, program, clock, feed)
        self.tokens = config.train.batch
        self.torch_weights.bind()

    def stages(self, placement: Placement) -> list[TorchStage]:
        model, stage = self.model, self.mesh.coord("p")
        here = [placement.part(stage, chunk) for chunk in range(placement.chunks)]
        read = [name for part in here for name in model.programs[part].weights]
        held = [name for name, owners in model.owners.items() if stage in owners]
        names = [*dict.fromkeys((*read, *held))]
        shared = {
            name: owners[0] == stage
            for name, owners in model.owners.items()
            if len(owners) > 1 and stage in owners
        }
        self.torch_weights = TorchWeights(
            model.captured, self.parameters, names, shared, model.splits
        )
        parallel, dtype = self.config.parallel, self.parameters.dtype
        offload = "activations" in parallel.offload
        self.saving = SavedTensors(self.mesh, dtype, parallel.keep_dtype, offload)
        return [self._stage(part) for part in here]

    def _stage(self, part):
        model, last = self.model, part == len(self.model.programs) - 1
        return TorchStage(
            model.programs[part],
            self.torch_weights,
            model.graded,
            self.config.seed,
            self.saving,
            model.loss if last else None,
            model.recompute[part],
        )

    def manifest(self) -> dict[str, Any]:
        return {"module": stored_tensors(self.model.captured)}

    def sums(self, size: float) -> Buckets:
        items, owners = self.torch_weights.items, self.model.owners
        trained = [name for name in owners if name in items and not items[name].frozen]
        shared = [
            (line, [items[name] for name in trained if owners[name] == stages])
            for stages, line in self.lines.items()
        ]
        return TiedBuckets(self.parameters, size, [each for each in shared if each[1]])

    def fill(self, values: Mapping[str, torch.Tensor]) -> None:
        """Broadcast the parameters, buffers and constants from rank 0, one tensor at a time.

        `values` is empty on all ranks except rank 0.
        """
        for name, like in state_of(self.model.captured).items():
            value = shared_by_root(self.mesh.world, values.get(name), like.shape, like.dtype)
            self.torch_weights.fill(name, value)
        self.loss_terms.weights = {
            name: values[name] for name in self.loss_terms.reads & {*values}
        }
        self.optimizer.copy_to_masters()

    def update(self) -> None:
        """Average modified buffers over the replicas of the stage, then update the weights."""
        written = [name for stage in self.engine.stages for name in stage.program.written]
        self.torch_weights.average(written, self.mesh.comm(DATA))
        super().update()


def sample_loader(
    model: StagedModel,
    terms: LossTerms,
    mesh: Mesh,
    config: Config,
    batches: Callable[[int], list[Any]] | None,
    program: Program,
) -> SampleLoader:
    """Return the loader of this rank's samples for a training or evaluation program."""
    batch, micros = config.train.batch, config.parallel.microbatches
    rows = rows_of(batch, micros, mesh.size(DATA), mesh.coord(DATA))
    here = model.programs[mesh.coord("p") :: len(model.replicas)]
    read = {node for each in here for node in each.inputs}
    return SampleLoader(mesh, terms, batches, rows, batch, read, program.training)


def lines_of_owners(
    owners: Owners, ranks: Sequence[range], stage: int, line: Line
) -> dict[tuple[int, ...], Communicator]:
    """Create a communicator for each group of stages that share a weight.

    Each communicator contains the `ranks` of the group's stages. Groups that do not contain
    `stage` are omitted.
    """
    groups = sorted({stages for stages in owners.values() if len(stages) > 1 and stage in stages})
    return {
        stages: line([rank for number in stages for rank in ranks[number]]) for stages in groups
    }


class TiedBuckets(Buckets):
    """Gradient buckets with an additional all-reduce for weights shared by several stages.

    The gradient of a shared weight is reduced over all ranks that hold the weight, and counted
    once in the gradient norm. Other reductions skip the gradients of shared weights, because the
    `partial` field of such a Parameter lists no mesh axis.
    """

    def __init__(
        self,
        parameters: Parameters,
        size: int,
        shared: Sequence[tuple[Communicator, Sequence[Parameter]]],
    ) -> None:
        super().__init__(parameters, size)
        self.shared = shared

    def wait(self) -> None:
        super().wait()
        for line, items in self.shared:
            mine = np.concatenate([item.grad.reshape(-1) for item in items])
            total, start = line.all_reduce(mine).wait(), 0
            for item in items:
                item.grad.reshape(-1)[...] = total[start : start + item.grad.size]
                start += item.grad.size
