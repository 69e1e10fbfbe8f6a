"""A training step on a machine that need not be there: the program itself, on its clock.

A stage of the pipeline is a thread, on which one rank runs the trainer on arrays without data
(simulated_clock.py): any number of ranks takes as long as there are stages and layers.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from hpc3d.comm import threads
from hpc3d.config.load import load
from hpc3d.config.rules import refuse, resolve, unknown_values
from hpc3d.model.families import least_vocabulary
from hpc3d.pipeline.program import program_of
from hpc3d.predict.simulation.abstract_gpu import pool_of, unrecorded
from hpc3d.predict.simulation.count import ZeroBatches
from hpc3d.predict.simulation.memory_recorder import MemoryRecorder
from hpc3d.predict.simulation.replay import PassRecorder, ReplayedStage, microbatches_to_run
from hpc3d.predict.simulation.simulated_clock import clock_of, representative
from hpc3d.training.trainer import Trainer

if TYPE_CHECKING:
    from hpc3d.comm.grid import Grid
    from hpc3d.comm.mesh import Mesh
    from hpc3d.config.input_file import Config
    from hpc3d.model.parameters import Parameters
    from hpc3d.pipeline.engine import Engine
    from hpc3d.pipeline.program import Program
    from hpc3d.predict.machine.machine import Machine
    from hpc3d.predict.simulation.simulated_clock import Clock

log = logging.getLogger(__name__)
_NEAR, _ROUNDS = 1e-3, 4  # how near to the sum of the work a crowded step comes, and in how many
_SECOND = 1  # the step that is looked at, neither the first nor, where steps overlap, the last


class StageRun(NamedTuple):
    """A step of the first rank of a stage.

    `rows` are those of /events, which index `names` and the mesh axes `axes`; times in ns from the
    start of the run.  `step` is the row of /steps and `memory` those of /memory; `peak` the bytes
    of arrays by kind, "all" for the peak of their sum; among them are those of a copy of the
    token table, `tables`, and of the logits of a microbatch, `logits`.  `busy` are the ns in which
    the rank did something itself, `wired` those in which it waited for the card of its host.
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
    wired: int

    @property
    def seconds(self) -> float:
        _, _, start, end, *_ = self.step
        return (end - start) / 1e9


BYTE_VOCABULARY = 256  # tokens of the byte tokenizer


def load_resolved(
    path: Path | str | None,
    overrides: Sequence[str],
    ranks: int | None = None,
    of_run: bool = False,
) -> Config:
    """The Config of an input file for as many ranks, with its vocabulary; ValueError if it breaks
    a rule.  `of_run` is that of hpc3d.config.load."""
    config = load(path, overrides, of_run)
    refuse([*unknown_values(config)])
    mesh = config.mesh
    if ranks is None and {mesh.x, mesh.y, mesh.z} == {None}:
        raise ValueError(f"{path} leaves mesh.x, y and z open: say how many ranks with --ranks N")
    config = resolve(config, ranks or mesh.grid().size)
    least = least_vocabulary(config.model, BYTE_VOCABULARY)
    vocabulary = config.model.vocabulary or least
    return replace(config, model=replace(config.model, vocabulary=vocabulary))


def simulate(config: Config, vocabulary: int, machine: Machine) -> list[StageRun]:
    """The StageRun of each stage, for a settled `config` on a `machine`.

    ValueError where a block has an owner (scheme 3d-broadcast): its owner does not do what the
    others do.
    """
    if any(split.own for split in config.splits.values()):
        raise ValueError(
            f"{config.parallel.way}: where blocks have owners, ranks differ, and one cannot stand "
            "for all; simulate scheme 3d"
        )
    ranks = config.mesh.grid().size
    machine = replace(machine, ranks_per_node=min(ranks, machine.ranks_per_node))
    steady = replace(config.train, steps=_SECOND + 2)
    config = unrecorded(replace(config, train=steady))
    program = program_of(config)

    def runs(slowdown):
        def stage(mesh):
            return run(mesh.comm("p"), config, vocabulary, program, clock_of(machine, slowdown))

        return threads.run({"p": config.mesh.p}, stage)

    return with_shared_cores(core_sharing(config, machine), runs)


def run(peers: Any, config: Config, vocabulary: int, program: Program, clock: Clock) -> StageRun:
    """The StageRun of the stage whose number is that of this member of `peers`."""
    pool = pool_of(config, clock)
    bare = representative(config.mesh.grid(), pool, peers, config.context())
    ledger = MemoryRecorder(bare.rank, lambda: clock.now)
    mesh = bare.traced(ledger)
    trainer = Trainer(
        mesh, config, vocabulary, None, program, lambda: clock.now / 1e9, ZeroBatches
    )
    logits = _bytes_of_logits(trainer)
    if not program.asynchronous:
        replay_passes(trainer.engine, config, mesh, ledger, clock, program)
    for number in range(_SECOND + 1):
        of = peers.rank + 1, config.mesh.p, number + 1, _SECOND + 1
        log.info("simulating stage %d of %d, step %d of %d", *of)
        ledger.count, busy, wired = 0, clock.busy, clock.wired
        trainer.step(number)
    axes = [group["axis"] for group in ledger.header["groups"]]
    memory = [row for row in ledger.memory if row[1] == _SECOND]
    return StageRun(
        rank=mesh.rank,
        rows=ledger.rows(),
        names=[*ledger.strings],
        axes=axes,
        step=ledger.steps[-1],
        memory=memory,
        peak=dict(mesh.pool.peak),
        tables=_bytes_of_tables(trainer.parameters),
        logits=logits,
        busy=clock.busy - busy,
        wired=clock.wired - wired,
    )


def _bytes_of_tables(parameters: Parameters) -> int:
    """Bytes of the values of token tables: the first stage has one, and the last its copy."""
    tables = [item for item in parameters if item.rows and len(item.shape) == 2]
    places = [parameters.places[item].value for item in tables]
    return sum(place.stop - place.start for place in places) * parameters.dtype.itemsize


def _bytes_of_logits(trainer: Trainer) -> int:
    """Bytes of this rank's logits of the largest microbatch; 0 on stages without the head."""
    train, count = trainer.config.train, trainer.config.parallel.microbatches
    rows = -(-train.batch // count) * trainer.config.model.sequence
    shapes = [
        stage.head.layout.block((rows, stage.head.table.shape[0]), trainer.mesh)
        for stage in trainer.engine.stages
        if stage.head
    ]
    return sum(map(prod, shapes)) * trainer.parameters.dtype.itemsize


def replay_passes(
    engine: Engine,
    config: Config,
    mesh: Mesh,
    ledger: MemoryRecorder,
    clock: Clock,
    program: Program,
) -> None:
    """Let an engine run few of the passes of its program and play the others."""
    recorder, train = PassRecorder(mesh, ledger, clock), config.train
    count = config.parallel.microbatches
    sizes = [train.batch * (i + 1) // count - train.batch * i // count for i in range(count)]
    chosen = microbatches_to_run(program.stages[mesh.coord("p")], sizes)
    engine.stages = [
        ReplayedStage(stage, recorder, chunk, chosen[chunk])
        for chunk, stage in enumerate(engine.stages)
    ]


def ranks_per_core(machine: Machine, ranks: int) -> float:
    """How many ranks of a node share each of its cores; 1 where each has its own device."""
    here = min(ranks, machine.ranks_per_node)
    return max(1.0, here / machine.cores) if machine.cores else 1.0


class CoreSharing(NamedTuple):
    """How many ranks share a core of a node: `ranks` in all and `stage` of one stage, where
    this has all of them; of these so many are in different groups between hosts, `lanes`."""

    ranks: float
    stage: float
    lanes: float

    def seconds(self, alone: float, chain: float, busy: float, wired: float) -> float:
        """How long a step takes that takes `alone` where each rank has its own core.

        Ranks of a stage meet in every layer: what they do themselves, a `chain` of these seconds,
        takes `stage` times as long, and what they wait for the wire, `wired`, does not.  Where
        they take turns, the blocks of a lane leave when its rank has done its part, in the mean
        (1 - 1 / lanes) / 2 of the work earlier than those of the last.  Other stages work
        meanwhile, as far as the cores have time: they must do the work of all ranks, each
        `busy` so long.
        """
        early = (1 - 1 / self.lanes) / 2 * min(self.stage * busy, wired)
        return max(alone + (self.stage - 1) * chain - early, self.ranks * busy)


def core_sharing(config: Config, machine: Machine) -> CoreSharing:
    """The CoreSharing of a layout."""
    grid = config.mesh.grid()
    here = range(min(grid.size, machine.ranks_per_node))
    together = max(Counter(grid.coord(rank, "p") for rank in here).values())
    stage = max(1.0, together / machine.cores) if machine.cores else 1.0
    lanes = min(stage, _lanes_of(grid, together, here))
    return CoreSharing(ranks_per_core(machine, grid.size), stage, lanes)


def _lanes_of(grid: Grid, together: int, here: range) -> int:
    """How many groups between hosts the ranks of a stage on a host, `together`, are in; 1 where
    an axis joins all of them, so that they meet, and where none leads to another host."""
    lanes, crossing = together, False
    for axis in (axis for axis, size in grid.sizes.items() if axis != "p" and size > 1):
        members = grid.ranks_along(axis, {})
        local = len([rank for rank in members if rank in here])
        if local == together:
            return 1
        if local < len(members):
            lanes, crossing = min(lanes, together // local), True
    return lanes if crossing else 1


def with_shared_cores(
    sharing: CoreSharing, runs: Callable[[float], list[StageRun]]
) -> list[StageRun]:
    """The StageRuns where ranks share cores; `runs` makes those of ranks whose cores
    take so many times as long."""
    found = runs(1.0)
    alone, busy = step_length(found), fmean(run.busy for run in found)
    slowdown = sharing.stage if sharing.stage > 1 else max(1.0, sharing.ranks * busy / alone)
    if slowdown == 1:
        return found
    found = runs(slowdown)
    chain, wired = (step_length(found) - alone) / (slowdown - 1), fmean(run.wired for run in found)
    seconds = sharing.seconds(alone, chain, busy, wired)
    for _ in range(_ROUNDS):
        if abs(step_length(found) - seconds) < _NEAR * seconds:
            break
        slowdown += (seconds - step_length(found)) / chain
        found = runs(slowdown)
    return found


def step_length(runs: Sequence[StageRun]) -> int:
    """Nanoseconds of a step over all its stages."""
    return max(run.step[3] for run in runs) - min(run.step[2] for run in runs)
