"""A training step on a machine that need not be there: the program itself, on its clock.

A stage of the pipeline is a thread, on which one rank runs the trainer on arrays without data
(hpc3d.predict.clock): any number of ranks takes as long as there are stages and layers.
"""

import logging
from dataclasses import replace
from math import prod
from typing import NamedTuple

import numpy as np

from hpc3d.cluster import threads
from hpc3d.inputs import load
from hpc3d.predict.clock import clock_of, representative
from hpc3d.predict.device import pool_of, unrecorded
from hpc3d.predict.ledger import Ledger
from hpc3d.predict.rank import Blanks
from hpc3d.predict.replay import Replay, Studio, to_run
from hpc3d.rules import refuse, settle, unknown_values
from hpc3d.training.loop import Trainer
from hpc3d.training.program import program_of

log = logging.getLogger(__name__)
SECOND = 1  # the step that is looked at, neither the first nor, where steps overlap, the last


class StageRun(NamedTuple):
    """A step of the first rank of a stage.

    `rows` are those of /events, which index `names` and the mesh axes `axes`; times in ns from the
    start of the run.  `step` is the row of /steps and `memory` those of /memory; `peak` the bytes
    of arrays by kind, "all" for the peak of their sum; among them are those of a copy of the
    token table, `tables`, and of the logits of a microbatch, `logits`.  `busy` are the ns in which
    the rank did something itself.
    """

    rank: int
    rows: np.ndarray
    names: list
    axes: list
    step: tuple
    memory: list
    peak: dict
    tables: int
    logits: int
    busy: int

    @property
    def seconds(self):
        _, _, start, end, *_ = self.step
        return (end - start) / 1e9


BYTES = 256  # tokens of the byte tokenizer


def settled(path, overrides, ranks=None):
    """The Config of an input file for as many ranks, with its vocabulary; ValueError if it breaks
    a rule."""
    config = load(path, overrides)
    refuse([*unknown_values(config)])
    mesh = config.mesh
    if ranks is None and {mesh.x, mesh.y, mesh.z} == {None}:
        raise ValueError(f"{path} leaves mesh.x, y and z open: say how many ranks with --ranks N")
    config = settle(config, ranks or prod(mesh.sizes().values()))
    vocabulary = config.model.vocabulary or BYTES
    return replace(config, model=replace(config.model, vocabulary=vocabulary))


def simulate(config, vocabulary, machine):
    """The StageRun of each stage, for a settled `config` on a `machine`.

    ValueError where a block has an owner (scheme 3d-broadcast): its owner does not do what the
    others do.
    """
    if config.split().own:
        raise ValueError(
            f"{config.parallel.way}: where blocks have owners, ranks differ, and one cannot stand "
            "for all; simulate scheme 3d"
        )
    ranks = prod(config.mesh.sizes().values())
    machine = replace(machine, ranks_per_node=min(ranks, machine.ranks_per_node))
    steady = replace(config.train, steps=SECOND + 2)
    config = unrecorded(replace(config, train=steady))
    program = program_of(config)

    def runs(share):
        def stage(mesh):
            return run(mesh.comm("p"), config, vocabulary, program, clock_of(machine, share))

        return threads.run({"p": config.mesh.p}, stage)

    crowd, free = crowding(machine, prod(config.mesh.sizes().values())), runs(1.0)
    return runs(stretching(crowd, free)) if crowd > 1 else free


def run(peers, config, vocabulary, program, clock):
    """The StageRun of the stage whose number is that of this member of `peers`."""
    sizes = config.mesh.sizes()
    bare = representative(sizes, pool_of(config, clock), peers)
    ledger = Ledger(bare.rank, lambda: clock.now)
    mesh = bare.traced(ledger)
    trainer = Trainer(mesh, config, vocabulary, None, program, lambda: clock.now / 1e9, Blanks)
    logits = bytes_of_logits(trainer)
    if not program.asynchronous:
        play(trainer, mesh, ledger, clock, program)
    for number in range(SECOND + 1):
        log.info("stage %d of %d: step %d", peers.rank + 1, config.mesh.p, number)
        ledger.count, busy = 0, clock.busy
        trainer.step(number)
    axes = [group["axis"] for group in ledger.header["groups"]]
    memory = [row for row in ledger.memory if row[1] == SECOND]
    rows, names, peak = ledger.rows(), [*ledger.strings], dict(mesh.pool.peak)
    last = bytes_of_tables(trainer.parameters), logits, clock.busy - busy
    return StageRun(mesh.rank, rows, names, axes, ledger.steps[-1], memory, peak, *last)


def bytes_of_tables(parameters):
    """Bytes of the values of token tables: the first stage has one, and the last its copy."""
    places = [parameters.places[item].value for item in parameters if item.rows]
    return sum(place.stop - place.start for place in places) * parameters.dtype.itemsize


def bytes_of_logits(trainer):
    """Bytes of this rank's logits of the largest microbatch; 0 on stages without the head."""
    train, count = trainer.config.train, trainer.config.parallel.microbatches
    rows = -(-train.batch // count) * trainer.config.model.sequence
    shapes = [
        stage.head.layout.block((rows, stage.head.table.shape[0]), trainer.mesh)
        for stage in trainer.engine.stages
        if stage.head
    ]
    return sum(map(prod, shapes)) * trainer.parameters.dtype.itemsize


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


def stretching(crowd, runs):
    """How much longer a step takes where a `crowd` of ranks shares a processor; `runs` have one
    each.

    A rank that waits leaves its processor to others.  So a step ends as if all had their own, or
    when the processors have done the work of all, whichever is later.
    """
    first, last = min(run.step[2] for run in runs), max(run.step[3] for run in runs)
    return max(1.0, crowd * sum(run.busy for run in runs) / len(runs) / (last - first))
