"""Evaluation of the loss on held-out data, during training or of a trained model.

An evaluation runs only forward passes, on the mesh of the run and through its pipeline, without
dropout and without saved activations. Gradients, gradient buckets, the optimizer, and the
in-flight microbatches of an asynchronous schedule are left untouched: training continues as if
there had been no evaluation. Every stage uses its newest weights, so all stages have the same
number of updates, even if a schedule keeps older weights.
"""

from __future__ import annotations

import logging
import os
import time
from math import isfinite, nan
from statistics import fmean
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from hpc3d.arrays.pool import has_values, on_host
from hpc3d.data.validation import VALIDATION
from hpc3d.model.microbatch import count_targets
from hpc3d.model.parameters import Parameters
from hpc3d.model.stage import build
from hpc3d.pipeline.engine import EVALUATION, Engine
from hpc3d.pipeline.program import forward_program_of
from hpc3d.training.microbatch_loader import MicrobatchLoader
from hpc3d.training.trainer import parts_of, spec_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from hpc3d.comm.mesh import Mesh
    from hpc3d.config.input_file import Config
    from hpc3d.pipeline.passes import Group
    from hpc3d.pipeline.program import Program
    from hpc3d.pipeline.stage_protocol import PipelineStage
    from hpc3d.training.trainer import Trainer

log = logging.getLogger(__name__)


class Evaluation(NamedTuple):
    """Result of an evaluation after training step `step`.

    `loss` is the mean loss in nats over all tokens with a target, and `tokens` is the number of
    these tokens. `accuracy` is the fraction of them predicted correctly. For a torch module,
    `tokens` is the number of samples, and `accuracy` is NaN.

    If there are several validation texts, `texts` contains their evaluations. `loss` and
    `accuracy` are then means over the texts, and `tokens` and `seconds` are sums.
    """

    step: int
    loss: float
    tokens: int
    accuracy: float
    seconds: float
    texts: tuple[Evaluation, ...] = ()

    @property
    def perplexity(self) -> float:
        """Return the perplexity exp(loss), or infinity on overflow."""
        with np.errstate(over="ignore"):
            return float(np.exp(self.loss))


def _mean(texts: tuple[Evaluation, ...]) -> Evaluation:
    """Combine the evaluations of several texts after one step; each text has the same weight."""
    _, losses, tokens, accuracies, seconds, _ = zip(*texts)
    loss, accuracy = fmean(losses), fmean(accuracies)
    return Evaluation(texts[0].step, loss, sum(tokens), accuracy, sum(seconds), texts)


class Best(NamedTuple):
    """Lowest evaluation loss of a run, and the number of steps completed at that evaluation."""

    step: int
    loss: float


class Evaluator:
    """Evaluates a trainer's model every `train.eval_every` steps and after the last step.

    `texts` is the number of validation texts. Only rank 0 passes `batches`, which has one item per
    text, such as ValidationBatches; the attribute `count` of an item is its number of batches. The
    constructor and the methods are collective: all ranks must call them. `best` is the best
    evaluation so far. To evaluate another model, override `stages` and `count_tokens`.
    """

    def __init__(
        self,
        trainer: Trainer | FrozenModel,
        batches: Sequence[Any] | None,
        program: Program | None = None,
        feed: Callable[..., Any] = MicrobatchLoader,
        texts: int = 1,
    ) -> None:
        self.trainer, self.mesh, self.feed = trainer, trainer.mesh, feed
        self.batches = batches or [None] * texts
        self.program = program or forward_program_of(trainer.config)
        counts = np.array([each.count if each else 0 for each in self.batches])
        with self.mesh.trace.scope(phase="evaluation"):
            self.counts = self.mesh.world.all_reduce(counts, "max").wait().tolist()
        weights = self.program.weights(trainer.parameters)
        self.engine = Engine(
            self.mesh,
            self.stages(),
            self.program.placement,
            trainer.buckets,
            weights,
            trainer.update,
            trainer.clock,
        )
        self.best: Best | None = None

    def stages(self) -> Sequence[PipelineStage]:
        """Return this rank's pipeline stages."""
        return self.trainer.engine.stages

    def groups(self, micros: Mapping[int, Any]) -> Sequence[Group]:
        """Return this stage's groups of instructions for the microbatches of a batch."""
        return self.program.stages[self.mesh.coord("p")]

    def count_tokens(self, micros: Mapping[int, Any]) -> int:
        """Return the number of tokens with a target in the microbatches of a batch."""
        return sum(count_targets(micro.targets) for micro in micros.values())

    def after(self, number: int) -> Evaluation | None:
        """Evaluate after step `number` if an evaluation is due; otherwise, return `None`."""
        done, train = number + 1, self.trainer.config.train
        if done % train.eval_every and done != train.steps:
            return None
        found = self.evaluate(number)
        if isfinite(found.loss) and (self.best is None or found.loss < self.best.loss):
            self.best = Best(done, found.loss)
        return found

    def evaluate(self, number: int) -> Evaluation:
        """Evaluate the model with its current weights, after training step `number`."""
        trace = self.mesh.trace
        with trace.scope(phase="evaluation"):
            if self.trainer.buckets:
                self.trainer.buckets.complete()
            every = zip(self.batches, self.counts, strict=True)
            texts = tuple(self._evaluated(number, *each) for each in every)
        found = _mean(texts) if len(texts) > 1 else texts[0]
        trace.end_evaluation(*found[:5], [each[1:4] for each in found.texts])
        return found

    def _evaluated(self, number: int, batches: Any, count: int) -> Evaluation:
        start = self.trainer.clock()
        loss, right, tokens = self.totals(batches, count)
        seconds = self.trainer.clock() - start
        mean, share = (total / tokens if tokens else nan for total in (loss, right))
        return Evaluation(number, mean, tokens, share, seconds)

    def totals(self, batches: Any, count: int) -> tuple[float, float, int]:
        """Return the summed loss, the number of correct predictions and the number of tokens.

        Only tokens with a target are counted. The totals cover the `count` batches of a text and
        all ranks.
        """
        feed = self.feed(self.mesh, self.trainer.config, batches, self.program)
        sums, tokens = np.zeros(2), 0
        for number in range(count):
            log.info("evaluating batch %d of %d", number + 1, count)
            micros = feed.fetch(number)
            self.engine.run(self.groups(micros), micros, EVALUATION)
            found = self.engine.losses.pop(number, 0.0)
            sums += on_host(found) if has_values(found) else 0.0
            tokens += self.count_tokens(micros)
        loss, right = self.mesh.world.all_reduce(sums).wait().tolist()
        return loss, right, tokens


class FrozenModel:
    """Model on a mesh that is only evaluated, without gradients and optimizer states.

    `parameters` are the parameters of this rank; the caller must set their values. A
    `FrozenEvaluator` evaluates the model. `clock()` returns the time in seconds.
    """

    buckets: Any = None  # an evaluation reduces no gradients and updates no parameters
    update: Any = None

    def __init__(
        self, mesh: Mesh, config: Config, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.mesh, self.config, self.clock = mesh, config, clock
        parallel, placement = config.parallel, forward_program_of(config).placement
        self.parameters = Parameters(
            mesh, config.train.dtype, parallel.zero, offload=parallel.offload
        )
        spec = spec_of(config, config.model.vocabulary)
        self.stages = build(mesh, self.parameters, spec, *parts_of(mesh, config, placement))
        for item in self.parameters:
            item.frozen, item.std = True, 0.0
        self.parameters.allocate(config.seed)


class FrozenEvaluator(Evaluator):
    """Evaluator of a FrozenModel, which skips microbatches without targets.

    The padding of a short text therefore costs less than a microbatch.
    """

    def stages(self) -> Sequence[PipelineStage]:
        return self.trainer.stages

    def groups(self, micros: Mapping[int, Any]) -> Sequence[Group]:
        few = {number for number, micro in micros.items() if count_targets(micro.targets)}
        return self.program.with_few(self.mesh.coord("p"), few)


def comparable(config: Config, texts: Mapping[str, Any] | None = None) -> tuple[Any, ...]:
    """Return the settings that two runs must share for their evaluation losses to be comparable.

    `texts` describes the text files, if known. The settings include `checkpoint.keep_best`,
    because a run without this setting does not keep the checkpoint with its lowest loss.
    """
    text: Any = config.torch.validation or config.data.validation or None
    if not config.torch.validation and (separate := config.data.validation_texts()):
        validation = [each for key, each in (texts or {}).items() if key.startswith(VALIDATION)]
        known = [each["sha256"] for each in validation]
        text = sorted(known or map(os.path.abspath, separate))
    elif isinstance(text, float):  # held out at the end of each training text, in this order
        text = text, [each["sha256"] for each in (texts or {}).values()]
    train, sequence = config.train, config.model.sequence
    return text, train.eval_batches, train.batch, sequence, config.checkpoint.keep_best


def restored(
    header: Mapping[str, Any],
    before: Config,
    now: Config,
    texts: Mapping[str, Any] | None = None,
) -> Best | None:
    """Return the best evaluation recorded in a checkpoint manifest, if it is comparable.

    `before` is the configuration of the run that wrote the checkpoint. `now` and `texts` are the
    configuration and the text files of the current run. Returns `None` if the evaluation losses of
    the two runs are not comparable.
    """
    known, earlier = header.get("best"), header.get("texts")
    texts = texts if earlier else None
    if not isinstance(known, dict) or comparable(before, earlier) != comparable(now, texts):
        return None
    return Best(known["step"], known["loss"])
