"""A training step on a machine that need not be there: the program itself, on its clock.

A stage of the pipeline is a thread, on which one rank runs the trainer on arrays without data
(hpc3d.predict.clock): any number of ranks takes as long as there are stages and layers.
"""

from dataclasses import replace
from typing import NamedTuple

import numpy as np

import hpc3d.training.shapes  # noqa: F401
from hpc3d.cluster import threads
from hpc3d.predict.clock import Clock, representative
from hpc3d.predict.ledger import Ledger
from hpc3d.predict.rank import Blanks
from hpc3d.predict.replay import Replay, Studio, to_run
from hpc3d.training.loop import Trainer
from hpc3d.training.program import program_of

SECOND = 1  # the step that is looked at: the first one begins with empty clocks and caches


class StageRun(NamedTuple):
    """A step of the first rank of a stage.

    `rows` are those of /events and `axes` the mesh axis of each group in them; times in ns from
    the start of the run.  `peak` and `live` are bytes of arrays by kind, "all" for their sum.
    """

    rank: int
    rows: np.ndarray
    axes: list
    start: int
    end: int
    peak: dict
    live: dict


def simulate(config, vocabulary, machine):
    """The StageRun of each stage, for a settled `config` on a `machine`.

    Dropout is left out: it moves nothing and holds nothing.  ValueError where a block has an owner
    (scheme 3d-broadcast): its owner does not do what the others do.
    """
    config = replace(config, model=replace(config.model, dropout=0.0))
    program = program_of(config)
    return threads.run(
        {"p": config.mesh.p}, lambda mesh: run(mesh.comm("p"), config, vocabulary, machine, program)
    )


def run(peers, config, vocabulary, machine, program):
    """The StageRun of the stage whose number is that of this member of `peers`."""
    sizes = config.mesh.sizes()
    clock = Clock(machine, crowding(machine, int(np.prod([*sizes.values()]))))
    bare = representative(sizes, clock, peers)
    ledger = Ledger(bare.rank, clock.nanoseconds)
    mesh = bare.traced(ledger)
    trainer = Trainer(mesh, config, vocabulary, None, program, lambda: clock.now, Blanks)
    if not program.asynchronous:
        play(trainer, mesh, ledger, clock, program)
    for number in range(SECOND + 1):
        ledger.count = 0
        trainer.step(number)
    _, _, start, end, *_ = ledger.steps[-1]
    axes = [group["axis"] for group in ledger.header["groups"]]
    pool = mesh.pool
    return StageRun(mesh.rank, ledger.rows(), axes, start, end, dict(pool.peak), dict(pool.live))


def play(trainer, mesh, ledger, clock, program):
    """Let the engine of a trainer run few of its passes and play the others."""
    studio, train = Studio(mesh, ledger, clock), trainer.config.train
    count = trainer.config.parallel.microbatches
    sizes = [train.batch * (i + 1) // count - train.batch * i // count for i in range(count)]
    chosen = to_run(program.stages[mesh.coord("p")], sizes)
    trainer.engine.stages = [
        Replay(stage, studio, chunk, chosen[chunk])
        for chunk, stage in enumerate(trainer.engine.stages)
    ]


def crowding(machine, ranks):
    """How many ranks of a node share each of its processors; 1 where each has its own device."""
    here = min(ranks, machine.ranks_per_node)
    return max(1.0, here / machine.cores) if machine.cores else 1.0
