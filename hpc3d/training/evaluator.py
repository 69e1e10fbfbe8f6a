"""Evaluation while a model trains: its loss on text that it is not trained on.

Forward passes alone, on the mesh of the run and through its pipeline, with nothing dropped and
nothing kept for backward.  Gradients, buckets, optimiser and the passes that an asynchronous
schedule has in flight are left alone: training goes on as if there had been no evaluation.  Every
stage takes its newest weights: those of the same number of updates, also where a schedule keeps
older ones.
"""

from __future__ import annotations

import os
from math import isfinite, nan
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from hpc3d.arrays.pool import on_host
from hpc3d.ops.cross_entropy import IGNORE
from hpc3d.pipeline.engine import EVALUATION, Engine
from hpc3d.pipeline.program import forward_program_of
from hpc3d.training.microbatch_loader import MicrobatchLoader

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from hpc3d.config.input_file import Config
    from hpc3d.data.validation import ValidationBatches
    from hpc3d.pipeline.program import Program
    from hpc3d.training.trainer import Trainer


class Evaluation(NamedTuple):
    """What an evaluation after training step `step` came to: the mean loss of its `tokens` that
    count, in nat, the share of them that is predicted right, and its seconds."""

    step: int
    loss: float
    tokens: int
    accuracy: float
    seconds: float

    @property
    def perplexity(self) -> float:
        """exp(loss), infinite where it is beyond the largest number."""
        with np.errstate(over="ignore"):
            return float(np.exp(self.loss))


class Best(NamedTuple):
    """The lowest loss of the evaluations of a run, and how many steps were done then."""

    step: int
    loss: float


class Evaluator:
    """Evaluates the model of a trainer after every `train.eval_every`-th step and the last one.

    Only rank 0 has `batches`; all ranks make it, and ask it, together.  `best` is the Best so far.
    """

    def __init__(
        self,
        trainer: Trainer,
        batches: ValidationBatches | None,
        program: Program | None = None,
        feed: Callable[..., Any] = MicrobatchLoader,
    ) -> None:
        self.trainer, self.mesh, self.batches, self.feed = trainer, trainer.mesh, batches, feed
        self.program = program or forward_program_of(trainer.config)
        count = np.array([batches.count if batches else 0])
        with self.mesh.trace.scope(phase="evaluation"):
            self.count = int(self.mesh.world.all_reduce(count, "max").wait()[0])
        weights = self.program.weights(trainer.parameters)
        self.engine = Engine(
            self.mesh,
            trainer.engine.stages,
            self.program.placement,
            trainer.buckets,
            weights,
            trainer.update,
            trainer.clock,
        )
        self.best: Best | None = None

    def after(self, number: int) -> Evaluation | None:
        """The Evaluation after step `number`, if it is time for one."""
        done, train = number + 1, self.trainer.config.train
        if done % train.eval_every and done != train.steps:
            return None
        found = self.evaluate(number)
        if isfinite(found.loss) and (self.best is None or found.loss < self.best.loss):
            self.best = Best(done, found.loss)
        return found

    def evaluate(self, number: int) -> Evaluation:
        """The Evaluation of the weights as they are, after step `number`."""
        trace, start = self.mesh.trace, self.trainer.clock()
        with trace.scope(phase="evaluation"):
            loss, right, tokens = self.totals()
        seconds = self.trainer.clock() - start
        mean, share = (total / tokens if tokens else nan for total in (loss, right))
        found = Evaluation(number, mean, tokens, share, seconds)
        trace.end_evaluation(*found)
        return found

    def totals(self) -> tuple[float, float, int]:
        """The summed loss of all tokens that count, how many are predicted right, and how many
        they are: of all batches, over all ranks."""
        feed = self.feed(self.mesh, self.trainer.config, self.batches, self.program)
        groups, sums, tokens = self.program.stages[self.mesh.coord("p")], np.zeros(2), 0
        for number in range(self.count):
            micros = feed.fetch(number)
            self.engine.run(groups, micros, EVALUATION)
            sums += on_host(self.engine.losses.pop(number, 0.0))
            tokens += sum(int((micro.targets != IGNORE).sum()) for micro in micros.values())
        loss, right = self.mesh.world.all_reduce(sums).wait().tolist()
        return loss, right, tokens


def comparable(config: Config, texts: Mapping[str, Any] | None = None) -> tuple[Any, ...]:
    """What of a configuration, and of `texts` if they are described, the losses of evaluations
    must have in common to be compared, and the best of them to be among the checkpoints."""
    text = config.data.validation or None
    if isinstance(text, str):
        described = (texts or {}).get("data.validation")
        text = described["sha256"] if described else os.path.abspath(text)
    train, sequence = config.train, config.model.sequence
    return text, train.eval_batches, train.batch, sequence, config.checkpoint.keep_best


def restored(
    header: Mapping[str, Any],
    before: Config,
    now: Config,
    texts: Mapping[str, Any] | None = None,
) -> Best | None:
    """The Best that a checkpoint's manifest knows, of a run with the configuration `before`; None
    where what is evaluated `now`, with these `texts`, is another thing."""
    known, earlier = header.get("best"), header.get("texts")
    texts = texts if earlier else None
    if not isinstance(known, dict) or comparable(before, earlier) != comparable(now, texts):
        return None
    return Best(known["step"], known["loss"])
