"""Simulate the evaluation of a batch on a machine."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from hpc3d.comm import threads
from hpc3d.pipeline.program import forward_program_of, program_of
from hpc3d.predict.simulation.abstract_gpu import pool_of, unrecorded
from hpc3d.predict.simulation.count import ZeroBatches
from hpc3d.predict.simulation.memory_recorder import MemoryRecorder
from hpc3d.predict.simulation.simulated_clock import clock_of, representative
from hpc3d.predict.simulation.simulator import core_sharing, replay_passes
from hpc3d.training.evaluator import Evaluator
from hpc3d.training.trainer import Trainer

if TYPE_CHECKING:
    from hpc3d.config.input_file import Config
    from hpc3d.predict.machine.machine import Machine


def seconds_of_batch(config: Config, vocabulary: int, machine: Machine) -> float:
    """Return the predicted time in seconds for the evaluation of `train.batch` sequences.

    `config` must be resolved. If several ranks of a stage share a core, all CPU times are
    multiplied by the number of these ranks.
    """
    config = unrecorded(replace(config, train=replace(config.train, steps=1)))
    grid = config.mesh.grid()
    machine = replace(machine, ranks_per_node=min(grid.size, machine.ranks_per_node))
    training, program = program_of(config), forward_program_of(config)
    slowdown = core_sharing(config, machine).stage

    def stage(peers):
        clock = clock_of(machine, slowdown)
        bare = representative(grid, pool_of(config, clock), peers.comm("p"))
        ledger = MemoryRecorder(bare.rank, lambda: clock.now)
        mesh = bare.traced(ledger)
        seconds = lambda: clock.now / 1e9  # noqa: E731
        trainer = Trainer(mesh, config, vocabulary, None, training, seconds, ZeroBatches)
        evaluator = Evaluator(trainer, None, program, ZeroBatches)
        evaluator.count = 1
        replay_passes(evaluator.engine, config, mesh, ledger, clock, program)
        return evaluator.evaluate(0).seconds

    return max(threads.run({"p": config.mesh.p}, stage))
