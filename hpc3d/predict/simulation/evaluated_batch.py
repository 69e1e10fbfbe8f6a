"""Simulate the evaluation of a batch on a machine."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from hpc3d.pipeline.program import forward_program_of, program_of
from hpc3d.predict.simulation.count import ZeroBatches
from hpc3d.predict.simulation.owner_classes import OwnerPeers, owner_classes
from hpc3d.predict.simulation.simulated_clock import clock_of
from hpc3d.predict.simulation.simulator import (
    core_sharing,
    replay_passes,
    simulated_trainer,
)
from hpc3d.predict.simulation.stage_turns import StageTurns
from hpc3d.training.evaluator import Evaluator

if TYPE_CHECKING:
    from hpc3d.config.input_file import Config
    from hpc3d.predict.machine.machine import Machine


class EvaluatedBatch(NamedTuple):
    """Predicted evaluation of `train.batch` sequences.

    `seconds` is its duration. `peak` maps each kind of memory to its peak in bytes on the rank
    that uses the most memory; the key "all" is the peak of the sum. The token indices of the last
    training step, which remain on a GPU, are not included.
    """

    seconds: float
    peak: dict[str, int]


def evaluated(config: Config, vocabulary: int, machine: Machine) -> EvaluatedBatch:
    """Predict the evaluation of a batch.

    `config` must be resolved. If several ranks of a stage share a core, all CPU times are
    multiplied by the number of these ranks.
    """
    config = replace(config, train=replace(config.train, steps=1))
    machine = machine.with_ranks(config.grid().size)
    training, program = program_of(config), forward_program_of(config)
    slowdown = core_sharing(config, machine).stage
    classes = owner_classes(config)

    def stage(peers):
        owners = OwnerPeers(peers, classes) if classes else None
        clock = clock_of(machine, slowdown)
        peers = owners or peers
        trainer = simulated_trainer(peers, config, vocabulary, training, clock, owners)
        evaluator = Evaluator(trainer, None, program, ZeroBatches)
        evaluator.counts = [1]
        replay_passes(evaluator.engine, config, program, owners)
        trainer.mesh.pool.reset_peak()
        return evaluator.evaluate(0).seconds, dict(trainer.mesh.pool.peak)

    found = StageTurns(config.mesh.p * (len(classes.first) if classes else 1)).run(stage)
    seconds, peaks = zip(*found, strict=True)
    return EvaluatedBatch(max(seconds), max(peaks, key=lambda peak: peak["all"]))
