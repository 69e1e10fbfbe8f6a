"""Simulate a training step on a machine by running the program with a simulated clock.

The trainer runs on abstract arrays, for one rank of each pipeline stage (simulated_clock.py), or
for one rank of each class of ranks if blocks have owner ranks (owner_classes.py). The stages take
turns (stage_turns.py). The run time depends on the numbers of stages and layers, but
not on the number of ranks.
"""

from __future__ import annotations

import gc
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import chain
from math import prod
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from hpc3d.config.limits import INT32
from hpc3d.config.load import load
from hpc3d.config.resolve import resolve, violated
from hpc3d.model.families import least_vocabulary
from hpc3d.pipeline.program import program_of
from hpc3d.pipeline.schedule import find
from hpc3d.predict.bucket_size import with_bucket_size
from hpc3d.predict.simulation.abstract_gpu import pool_of
from hpc3d.predict.simulation.count import ZeroBatches
from hpc3d.predict.simulation.memory_recorder import MemoryRecorder
from hpc3d.predict.simulation.owner_classes import OwnerPeers, owner_classes
from hpc3d.predict.simulation.replay import (
    GATHERING,
    PassRecorder,
    ReplayedPairs,
    ReplayedStage,
    microbatches_to_run,
    replayed_blocks,
)
from hpc3d.predict.simulation.simulated_clock import (
    clock_of,
    representative,
    with_most_scores,
)
from hpc3d.predict.simulation.stage_turns import StageTurns
from hpc3d.training.trainer import Trainer

if TYPE_CHECKING:
    from hpc3d.comm.grid import Grid
    from hpc3d.config.input_file import Config, ModelConfig
    from hpc3d.model.parameters import Parameters
    from hpc3d.pipeline.engine import Engine
    from hpc3d.pipeline.program import Program
    from hpc3d.predict.machine.machine import Machine
    from hpc3d.predict.simulation.memory_recorder import TraceRows
    from hpc3d.predict.simulation.replay import RecordedPass
    from hpc3d.predict.simulation.simulated_clock import Clock
    from hpc3d.predict.simulation.stage_turns import StagePeers

log = logging.getLogger(__name__)
_NEAR, _ROUNDS = 1e-3, 4  # tolerance and maximum number of iterations of `with_shared_cores`
_SECOND = 1  # index of the recorded step, which overlaps with others in asynchronous schedules


class StageRun(NamedTuple):
    """Simulated step of the first rank of a stage.

    `events`, `step` and `memory` are the rank's rows in the trace tables /events, /steps and
    /memory. Times are in ns from the start of the run. `names` and `axes` list the strings and
    mesh axes that `events` refers to by index. `peak` maps each kind of array memory to its peak
    in bytes; the key "all" is the peak of the sum. The peaks include the token tables (`tables`
    bytes) and the logits of a microbatch (`logits` bytes). `busy` is the compute time of the rank
    in ns, and `wired` is the time in ns that it waits for the NIC. `account` divides the step
    (MemoryRecorder), and `saved` the bytes that the forward pass of a microbatch leaves
    allocated. The rank represents `ranks` ranks of its stage. If blocks have owner ranks, `others`
    contains one StageRun for each other class of ranks; the first rank of the stage has the
    longest compute time and the highest peaks. With local updates, the step has no agreement,
    unless the workers agree after every step; `agreement` is then a step with an agreement.
    """

    rank: int
    events: TraceRows
    names: list
    axes: list
    step: tuple
    memory: list
    peak: dict
    tables: int
    logits: int
    busy: int
    wired: int
    ranks: int
    account: dict
    saved: dict
    others: tuple[StageRun, ...] = ()
    agreement: StageRun | None = None

    @property
    def rows(self) -> np.ndarray:
        """All rows of /events, which are created when they are first used."""
        return self.events.all

    @property
    def classes(self) -> tuple[StageRun, ...]:
        """One StageRun per class of ranks of the stage."""
        return self, *self.others

    def sum_of(self, quantity: str) -> int:
        """Return the sum of a quantity of `account`, such as "flop", over the step."""
        return sum(value for (*_, name), value in self.account.items() if name == quantity)

    @property
    def top_receiver(self) -> StageRun:
        """The class of ranks that receives the most bytes in the step."""
        return max(self.classes, key=lambda each: each.sum_of("bytes"))

    @property
    def mean_busy(self) -> float:
        """Mean compute time of the ranks of the stage, in ns."""
        count = sum(each.ranks for each in self.classes)
        return sum(each.ranks * each.busy for each in self.classes) / count


class Overlap(NamedTuple):
    """Local steps that overlap with a stale agreement, and precede the step in which it ends.

    The agreement has `steps` steps, including the last one. The others take `length` ns in total,
    in which a rank computes for `busy` ns.
    """

    steps: int
    length: int
    busy: int


BYTE_VOCABULARY = 256  # vocabulary size of the byte tokenizer


def load_resolved(
    path: Path | str | None,
    overrides: Sequence[str],
    ranks: int | None = None,
    of_run: bool = False,
) -> Config:
    """Load an input file and resolve its Config, including the vocabulary, for `ranks` ranks.

    Set `of_run` if the file is the stored configuration of a run. Raises ValueError if the input
    is invalid.
    """
    config = load(path, overrides, of_run, rules=partial(violated, ranks=ranks))
    mesh = config.mesh
    if ranks is None and {mesh.x, mesh.y, mesh.z} == {None}:
        raise ValueError(f"{path} does not set mesh.x, mesh.y and mesh.z; add --ranks N")
    config = resolve(config, ranks)
    vocabulary = vocabulary_of(config.model)
    return replace(config, model=replace(config.model, vocabulary=vocabulary))


def vocabulary_of(model: ModelConfig) -> int:
    """Return the vocabulary size of a model; the default is the smallest for byte tokens."""
    return model.vocabulary or least_vocabulary(model, BYTE_VOCABULARY)


def simulate(config: Config, vocabulary: int, machine: Machine) -> list[StageRun]:
    """Simulate a training step on a machine; return the StageRun of each pipeline stage.

    `config` must be resolved. With local updates, steps with and without an agreement are
    simulated. The step with a stale agreement contains all of its work, and its communication that
    does not overlap with the local steps.
    """
    machine = machine.with_ranks(config.grid().size)
    config = with_bucket_size(config, machine)
    every, stale = config.parallel.local_steps, config.parallel.sync == "stale"
    steady = replace(config.train, steps=_SECOND + (4 if stale else 2))
    config = replace(config, train=steady)
    if every < 2:
        return _simulated_step(config, vocabulary, machine)
    local = _simulated_step(_with_local_steps(config, INT32), vocabulary, machine)
    busy = round(fmean(run.mean_busy for run in local))
    overlap = Overlap(every, (every - 1) * step_length(local), (every - 1) * busy)
    agreeing = _simulated_step(
        _with_local_steps(config, 1), vocabulary, machine, overlap if stale else None
    )
    return [_with_agreement(*pair) for pair in zip(local, agreeing, strict=True)]


def _with_agreement(run: StageRun, other: StageRun) -> StageRun:
    """Return a step without an agreement, with the peaks of a step with an agreement."""
    pairs = zip(run.others, other.others, strict=True)
    others = tuple(_with_agreement(*pair) for pair in pairs)
    return run._replace(peak=other.peak, agreement=other, others=others)


def _simulated_step(
    config: Config, vocabulary: int, machine: Machine, overlap: Overlap | None = None
) -> list[StageRun]:
    classes = owner_classes(config)
    count = len(classes.first) if classes else 1

    def runs(slowdown):
        def stage(peers):
            owners = OwnerPeers(peers, classes) if classes else None
            clock = clock_of(machine, slowdown)
            return run(owners or peers, config, vocabulary, program, clock, owners, overlap)

        found = StageTurns(config.mesh.p * count).run(stage)
        firsts = range(0, len(found), count)
        return [found[i]._replace(others=tuple(found[i + 1 : i + count])) for i in firsts]

    with uncollected():
        program = program_of(config)
        return with_shared_cores(core_sharing(config, machine), runs)


def _with_local_steps(config: Config, steps: int) -> Config:
    """Return `config` with another number of local steps."""
    return replace(config, parallel=replace(config.parallel, local_steps=steps))


@contextmanager
def uncollected() -> Iterator[None]:
    """Suspend the garbage collector, which would visit all instructions and costs repeatedly.

    Objects without cyclic references are still freed immediately.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def run(
    peers: StagePeers | OwnerPeers,
    config: Config,
    vocabulary: int,
    program: Program,
    clock: Clock,
    owners: OwnerPeers | None = None,
    overlap: Overlap | None = None,
) -> StageRun:
    """Simulate the pipeline stage of this thread.

    `peers` exchanges times with the other stages. If blocks have owner ranks, `owners` is the
    class of ranks of this thread. `overlap` lists the steps that overlap with a stale agreement.
    """
    trainer = simulated_trainer(peers, config, vocabulary, program, clock, owners)
    mesh, ledger, logits = trainer.mesh, trainer.mesh.trace, _bytes_of_logits(trainer)
    engine = trainer.engine
    passes = {} if program.asynchronous else replay_passes(engine, config, program, owners)
    for number in range(_SECOND + 1):
        of = peers.rank + 1, config.mesh.p, number + 1, _SECOND + 1
        log.info("simulating stage %d of %d, step %d of %d", *of)
        lost, busy, wired = _simulate_step(trainer, number, clock, overlap)
    memory = [row for row in ledger.memory if row[1] == _SECOND]
    rank, step, begin, *others = ledger.steps[-1]
    done = StageRun(
        rank=mesh.rank,
        events=ledger.trace_rows(),
        names=[*ledger.strings],
        axes=[group["axis"] for group in ledger.header["groups"]],
        step=(rank, step, begin - lost, *others),
        memory=memory,
        peak=dict(mesh.pool.peak),
        tables=_bytes_of_tables(trainer.parameters),
        logits=logits,
        busy=busy,
        wired=wired,
        ranks=owners.count if owners else mesh.ranks // config.mesh.p,
        account=dict(ledger.account),
        saved=_saved_by(passes),
    )
    return done._replace(peak=_peak_during(trainer, overlap.steps)) if overlap else done


def _simulate_step(
    trainer: Trainer, number: int, clock: Clock, overlap: Overlap | None
) -> tuple[int, int, int]:
    """Simulate step `number`.

    Returns the time that an earlier stale agreement delays it, and how long the device and the
    links are busy.
    """
    trainer.mesh.trace.clear()
    lost = clock.elapse(overlap.length, overlap.busy) if overlap and number else 0
    busy, wired = clock.busy, clock.wired
    trainer.step(number)
    return lost, clock.busy - busy, clock.wired - wired


def _peak_during(trainer: Trainer, steps: int) -> dict[str, int]:
    """Return the peak memory of a step during a stale agreement of `steps` steps.

    In this step, the largest part of the agreement is in flight.
    """
    trainer.outer.keep_largest(steps)
    for number in (_SECOND + 1, _SECOND + 2):
        trainer.step(number)
    return dict(trainer.mesh.pool.peak)


def simulated_trainer(
    peers: StagePeers | OwnerPeers,
    config: Config,
    vocabulary: int,
    program: Program,
    clock: Clock,
    owners: OwnerPeers | None = None,
) -> Trainer:
    """Return the trainer of the pipeline stage of this thread, on abstract arrays.

    The recorder of its mesh is a MemoryRecorder. `peers` and `owners` are as in
    `representative`. The first step of the trainer runs only the first microbatch of each size,
    unless other passes affect the time at which the next step of a stage begins: in asynchronous
    schedules, on CPUs, and with offloading.
    """
    pool, context = pool_of(config, clock), config.context()
    bare = representative(config.grid(), pool, peers, context, owners)
    mesh = bare.traced(MemoryRecorder(bare.rank, lambda: clock.now, pool))

    def seconds():
        return clock.now / 1e9

    trainer = Trainer(mesh, config, vocabulary, None, program, seconds, ZeroBatches)
    with_most_scores(trainer.engine.stages)
    if _begins_idle(config, program, clock):
        sizes = _microbatch_sizes(config)
        few = program.with_few(trainer.engine.stage, {*map(sizes.index, {*sizes})})
        trainer.groups = chain([few], trainer.groups)
    return trainer


def _begins_idle(config: Config, program: Program, clock: Clock) -> bool:
    """Return True if no pass, message or copy is in flight when a stage begins a step."""
    return not (program.asynchronous or clock.machine.cores or config.parallel.offload)


def _bytes_of_tables(parameters: Parameters) -> int:
    """Return the size in bytes of the token embedding tables on this rank.

    The tables are on the first stage; the last stage may have a copy.
    """
    tables = [item for item in parameters if item.rows and len(item.shape) == 2]
    slices = [parameters.slices[item].value for item in tables]
    return sum(part.stop - part.start for part in slices) * parameters.dtype.itemsize


def _bytes_of_logits(trainer: Trainer) -> int:
    """Return the size in bytes of this rank's logits for the largest microbatch.

    The size is 0 if the rank's stage does not include the head.
    """
    train, count = trainer.config.train, trainer.config.parallel.microbatches
    rows = -(-train.batch // count) * trainer.config.model.sequence
    shapes = [
        stage.head.layout.block((rows, stage.head.table.shape[0]), trainer.mesh)
        for stage in trainer.engine.stages
        if stage.head
    ]
    return sum(map(prod, shapes)) * trainer.parameters.dtype.itemsize


def replay_passes(
    engine: Engine, config: Config, program: Program, owners: OwnerPeers | None = None
) -> Mapping[tuple, RecordedPass]:
    """Modify `engine` so that it runs only a few passes of its program and replays the others.

    Returns a mapping of recorded passes. It is empty at first, and filled while the engine runs.
    """
    recorder = PassRecorder(engine.mesh, owners)
    gathers = program.training and engine.buckets.gathers_later and bool(engine.buckets.gathers)
    groups = program.stages[engine.stage]
    chosen = microbatches_to_run(groups, _microbatch_sizes(config), gathers)
    clock = engine.mesh.pool.meter
    if not _begins_idle(config, program, clock):  # its first passes may wait
        for run in chosen.values():
            run.always.update(run.once)
    if config.parallel.overlap_experts:
        engine.run_pair = ReplayedPairs(engine, recorder, _microbatch_sizes(config))
    if program.training and not clock.machine.cores and _blocks_are_alike(config):
        for chunk, stage in enumerate(engine.stages):
            stage.blocks = replayed_blocks(stage.blocks, recorder, chunk)
    engine.stages = [
        ReplayedStage(stage, recorder, chunk, chosen[chunk])
        for chunk, stage in enumerate(engine.stages)
    ]
    return recorder.passes


def _microbatch_sizes(config: Config) -> list[int]:
    """Return the number of sequences of each microbatch."""
    batch, count = config.train.batch, config.parallel.microbatches
    return [batch * (i + 1) // count - batch * i // count for i in range(count)]


def _saved_by(passes: Mapping[tuple, RecordedPass]) -> dict[str, int]:
    """Return the bytes that the forward pass of a microbatch leaves allocated, by part.

    The bytes include saved activations, gathered weights and the output of the pass. If
    microbatches have different sizes, the largest microbatch is used.
    """
    stages = {kind: each for kind, each in passes.items() if len(kind) == 4}  # without blocks
    largest = max((sequences for _, _, sequences, _ in stages), default=0)
    chunks: dict[int, RecordedPass] = {}
    for (name, chunk, sequences, refilled), recorded in stages.items():
        if name in ("F", GATHERING) and (sequences, refilled) == (largest, False):
            chunks[chunk] = recorded
    found: Counter[str] = Counter()
    for recorded in chunks.values():
        found.update(recorded.saved)
    return dict(found)


def _blocks_are_alike(config: Config) -> bool:
    """Return True if a block can replay the passes of another block of its model chunk.

    This requires GPUs, because CPU ranks share gathered blocks and a NIC. It also requires that
    the saved data of a block do not change between its passes, that a block draws no random
    numbers, and that the queue of its communication calls contains no other calls.
    """
    model, parallel = config.model, config.parallel
    return (
        config.train.backend == "cupy"
        and not (model.experts or model.dropout)
        and not (parallel.offload or parallel.keep_dtype)
        and not find(parallel.schedule).splits_backward
        and not (parallel.zero > 1 and config.mesh.replicas() > 1)
    )


def ranks_per_core(machine: Machine, ranks: int) -> float:
    """Return the number of ranks that share a core, which is 1 if ranks have GPUs."""
    here = min(ranks, machine.ranks_per_node)
    return max(1.0, here / machine.cores) if machine.cores else 1.0


class CoreSharing(NamedTuple):
    """Numbers of ranks and of communication groups that share a core.

    `ranks` is the number of ranks per core, and `stage` the number of ranks per core that belong
    to the same pipeline stage. A lane is a group of ranks that communicate with other hosts, and
    `lanes` is the number of separate lanes among the ranks of one stage on the core.
    """

    ranks: float
    stage: float
    lanes: float

    def seconds(self, alone: float, chain: float, busy: float, wired: float) -> float:
        """Return the step time on shared cores.

        All times have the same unit. `alone` is the step time with a dedicated core per rank. The
        ranks of a stage synchronize in every layer, so their CPU time on the critical path,
        `chain`, is multiplied by `stage`; the wait for the network, `wired`, is not. The lanes
        (groups that communicate with other hosts) take turns on a core, and each lane sends its
        blocks when it has computed them. On average, a lane does so earlier than the last lane by
        a fraction (1 - 1 / lanes) / 2 of the work. Other stages use the remaining core time.
        `busy` is the CPU time of a rank. The step time is at least the total CPU time of all ranks
        on the core.
        """
        early = (1 - 1 / self.lanes) / 2 * min(self.stage * busy, wired)
        return max(alone + (self.stage - 1) * chain - early, self.ranks * busy)


def core_sharing(config: Config, machine: Machine) -> CoreSharing:
    """Return the CoreSharing of a layout on a machine."""
    if not machine.cores:
        return CoreSharing(1.0, 1.0, 1.0)
    grid = config.grid()
    here = range(min(grid.size, machine.ranks_per_node))
    together = max(Counter(grid.coord(rank, "p") for rank in here).values())
    stage = ranks_per_core(machine, together)
    lanes = min(stage, _lanes_of(grid, together, here))
    return CoreSharing(ranks_per_core(machine, grid.size), stage, lanes)


def _lanes_of(grid: Grid, together: int, here: range) -> int:
    """Return the number of separate groups in which a stage's ranks communicate with other hosts.

    Only ranks on one host are considered: `here` lists all ranks on this host, and `together` is
    the number of ranks in `here` that belong to the stage. The result is 1 if one axis connects
    all of the stage's ranks on this host, because they are then synchronized, or if no axis
    extends to another host.
    """
    lanes, crossing = together, False
    for axis in (axis for axis, size in grid.sizes.items() if axis != "p" and size > 1):
        members = grid.ranks_along(axis, {})
        local = len(range(0, min(members.stop, here.stop), members.step))
        if local == together:
            return 1
        if local < len(members):
            lanes, crossing = min(lanes, together // local), True
    return lanes if crossing else 1


def with_shared_cores(
    sharing: CoreSharing, runs: Callable[[float], list[StageRun]]
) -> list[StageRun]:
    """Simulate a step on cores that several ranks share; return the StageRun of each stage.

    `runs(slowdown)` simulates the stages with all CPU times multiplied by `slowdown`. The slowdown
    is adjusted iteratively until the simulated step time is close to `sharing.seconds(...)`.
    """
    found = runs(1.0)
    alone, busy = step_length(found), fmean(run.mean_busy for run in found)
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
    """Return the time in ns from the first start to the last end of a step on any stage."""
    return max(run.step[3] for run in runs) - min(run.step[2] for run in runs)


def agreement_of(runs: Sequence[StageRun]) -> list[StageRun]:
    """Return the StageRun of each stage for a step with an agreement of the workers."""
    return [run.agreement or run for run in runs]


def agreement_seconds(runs: Sequence[StageRun], every: int) -> float:
    """Return the mean time per step, in seconds, that agreements every `every` steps add."""
    return (step_length(agreement_of(runs)) - step_length(runs)) / 1e9 / max(1, every)
