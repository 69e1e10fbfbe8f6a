"""Simulate the evaluation of a batch on a machine."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from hpc3d.pipeline.program import forward_program_of, program_of
from hpc3d.predict.simulation.abstract_gpu import unrecorded
from hpc3d.predict.simulation.count import ZeroBatches
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


def seconds_of_batch(config: Config, vocabulary: int, machine: Machine) -> float:
    """Return the predicted time in seconds for the evaluation of `train.batch` sequences.

    `config` must be resolved. If several ranks of a stage share a core, all CPU times are
    multiplied by the number of these ranks.
    """
    config = unrecorded(replace(config, train=replace(config.train, steps=1)))
    machine = machine.with_ranks(config.grid().size)
    training, program = program_of(config), forward_program_of(config)
    slowdown = core_sharing(config, machine).stage

    def stage(peers):
        clock = clock_of(machine, slowdown)
        trainer = simulated_trainer(peers, config, vocabulary, training, clock)
        evaluator = Evaluator(trainer, None, program, ZeroBatches)
        evaluator.count = 1
        replay_passes(evaluator.engine, config, program)
        return evaluator.evaluate(0).seconds

    return max(StageTurns(config.mesh.p).run(stage))
