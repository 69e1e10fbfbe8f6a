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

from hpc3d.partition.capture import state_of
from hpc3d.partition.execution.evaluation_model import trained_names
from hpc3d.partition.execution.loss_terms import LossTerms
from hpc3d.partition.execution.module_trainer import ModuleTrainer, sample_loader
from hpc3d.partition.execution.sample_batches import shared_by_root
from hpc3d.partition.execution.staged_model import StagedModel
from hpc3d.partition.execution.torch_stage import TorchStage
from hpc3d.training.evaluator import Evaluator


class ModuleEvaluator(Evaluator):
    """Evaluator of a module whose chunks in evaluation mode are in `model`.

    `batches(number)` returns the inputs of a batch as a flat list, and `batches.count` is the
    number of batches. `values` maps the names of the weights to tensors. On all ranks except rank
    0, `batches` is `None`, and `values` is empty. The loss is the mean over the batches.
    """

    def __init__(
        self,
        trainer: ModuleTrainer,
        model: StagedModel,
        batches: Any,
        values: Mapping[str, torch.Tensor],
    ) -> None:
        self.model, terms = model, LossTerms(model.captured)
        terms.weights = {name: values[name] for name in terms.reads & {*values}}
        with trainer.mesh.trace.scope(phase="evaluation"):
            constants = self._constants(trainer, values)
        self.weights = trainer.torch_weights.in_evaluation(model.captured, constants)
        super().__init__(trainer, batches, feed=partial(sample_loader, model, terms))

    def _constants(self, trainer, values):
        """Return the constants of the program in evaluation mode, by name.

        Rank 0 broadcasts the values. If this rank stores a constant for training, the result
        contains that tensor.
        """
        captured, found = self.model.captured, {}
        names = trained_names(captured, trainer.model)
        for name, like in state_of(captured).items():
            if name in captured.program.state_dict:
                continue
            value = shared_by_root(trainer.mesh.world, values.get(name), like.shape, like.dtype)
            known = trainer.torch_weights.tensors.get(names.get(name, ""))
            found[name] = value.clone() if known is None else known
        return found

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

    def totals(self) -> tuple[float, float, int]:
        """Return the summed loss, NaN because a module has no accuracy, and the sample count."""
        loss, _, samples = super().totals()
        return loss, nan, samples
