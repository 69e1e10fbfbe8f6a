"""Evaluation of a torch module during training, on the pipeline stages of its trainer.

The module computes its loss in evaluation mode: without dropout, and with the running statistics
of BatchNorm. No buffer is modified.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from math import nan
from typing import Any

import torch

from hpc3d.comm.stage_mesh import ranks_of
from hpc3d.partition.capture import state_of
from hpc3d.partition.execution.evaluation_model import read_in_training, trained_names
from hpc3d.partition.execution.loss_terms import LossTerms
from hpc3d.partition.execution.module_trainer import ModuleTrainer, sample_loader
from hpc3d.partition.execution.sample_batches import shared_by_root
from hpc3d.partition.execution.staged_model import StagedModel
from hpc3d.partition.execution.torch_stage import TorchStage
from hpc3d.training.evaluator import Evaluator


class ModuleEvaluator(Evaluator):
    """Evaluator of a module whose chunks in evaluation mode are in `model`.

    `batches(number)` returns the inputs of a batch as a flat list, and `batches.count` is the
    number of batches; `batches` is `None` on all ranks except rank 0. The loss is the mean over
    the batches. Call `fill` before the first evaluation to set the constants of the model.
    """

    def __init__(
        self,
        trainer: ModuleTrainer,
        model: StagedModel,
        batches: Any,
    ) -> None:
        self.model, self.loss_terms = model, LossTerms(model.captured)
        self.constants: dict[str, torch.Tensor] = {}
        self.weights = trainer.torch_weights.in_evaluation(model.captured, self.constants)
        feed = partial(sample_loader, model, self.loss_terms)
        super().__init__(trainer, batches and [batches], feed=feed)

    def fill(self, values: Mapping[str, torch.Tensor]) -> None:
        """Broadcast the tensors that the training step does not read, one at a time.

        Constants are broadcast from rank 0; `values` is empty on all other ranks. Parameters and
        buffers are broadcast from a rank that stores them for checkpoints.
        """
        captured, model = self.model.captured, self.trainer.model
        names, read = trained_names(captured, model), read_in_training(model)
        here = {name for stage in self.engine.stages for name in stage.program.weights}
        ranks, device = ranks_of(model.replicas, model.ways), self.weights.device
        for name, like in state_of(captured).items():
            stored = name in captured.program.state_dict
            if stored and name in read:
                continue
            known = self.trainer.torch_weights.tensors.get(names.get(name, ""))
            root = ranks[model.owners[name][0]][0] if stored else 0
            value = known.detach().cpu() if stored and known is not None else values.get(name)
            value = value if self.mesh.rank == root else None
            with self.mesh.trace.scope(phase="evaluation"):
                value = shared_by_root(self.mesh.world, value, like.shape, like.dtype, root)
            if name in here:
                self.constants[name] = value.to(device, copy=True) if known is None else known
        reads = self.loss_terms.reads & {*values}
        self.loss_terms.weights = {name: values[name] for name in reads}

    def stages(self) -> list[TorchStage]:
        """Return this rank's chunks in evaluation mode."""
        model, trainer = self.model, self.trainer
        stage, width, last = self.mesh.coord("p"), len(model.replicas), model.programs[-1]
        return [
            TorchStage(
                program,
                self.weights,
                (),
                trainer.config.seed,
                trainer.saving,
                model.loss if program is last else None,
            )
            for program in model.programs[stage::width]
        ]

    def count_tokens(self, micros: Mapping[int, Any]) -> int:
        """Return the number of samples in a batch."""
        return self.trainer.config.train.batch

    def totals(self, batches: Any, count: int) -> tuple[float, float, int]:
        """Return the summed loss, the accuracy (NaN: a module has none) and the sample count."""
        loss, _, samples = super().totals(batches, count)
        return loss, nan, samples
