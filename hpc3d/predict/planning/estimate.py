"""A training step put together from the costs of its passes: quick, for every layout of a search.

simulation/simulator.py runs the whole step; here the passes of one layer and of the ends
(hpc3d.predict.planning.pass_costs) are added up by what is known of the schedules.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import pairwise
from statistics import fmean, mean
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from hpc3d.comm.mesh import CONTEXT, DATA
from hpc3d.config.input_file import Config
from hpc3d.model.stage import FIRST, LAST
from hpc3d.pipeline.instruction import Placement
from hpc3d.pipeline.schedule import find
from hpc3d.pipeline.step_model import StageTimes, reduced
from hpc3d.pipeline.timeline import Cost
from hpc3d.predict.machine.between_hosts import legs
from hpc3d.predict.planning.pass_costs import NOTHING, LayerSample, PartCosts, replicas_of
from hpc3d.predict.planning.peak import (
    StageWork,
    buckets,
    contents,
    contents_in_order,
    even,
    model_of,
    stage_content,
    work_of,
    working_bytes,
)
from hpc3d.predict.simulation.simulator import core_sharing
from hpc3d.trace.schema import MESSAGES

if TYPE_CHECKING:
    from hpc3d.config.input_file import MeshConfig
    from hpc3d.model.stage import LayerRange
    from hpc3d.predict.machine.machine import Machine
    from hpc3d.predict.planning.pass_costs import Pass
    from hpc3d.predict.planning.peak import StageContent

_TOKEN = 4  # bytes
_MESSAGE_COSTS = ("message", "handled")  # costs for which the program is not run


class Estimate(NamedTuple):
    """A layout and the step that it gives, in seconds.

    `seconds` is the sum of what the stage with most to do computes, what it waits for, by axis,
    and the `bubble` in which it idles.  `kinds` are the bytes of the fullest rank, on `stage`.
    """

    config: Config
    seconds: float
    compute: float
    bubble: float
    waits: Counter
    stage: int
    kinds: dict

    @property
    def peak(self) -> int:
        return sum(self.kinds.values())

    @property
    def held(self) -> int:
        """The bytes that are there between steps, too."""
        return sum(self.kinds.get(kind, 0) for kind in ("parameter", "gradient", "optimizer"))


class CostKey(NamedTuple):
    """What a `cost` depends on, so that it is found once: always on backend, type and scheme, on
    the positions of the tensor axes, of e and of c, on how attention is done and how gradients are
    compressed; on the others where they are given.

    `context` are the position of c and the keys of [parallel] about sequences and attention,
    `keep` is parallel.keep_gathered, `halves` whether backward is split in two, `stage_content`
    whether one stage has both ends, and `times` how many layers an update is of; `data` and
    `pipeline` are the positions of d and p.
    """

    cost: str
    backend: str
    dtype: str
    fused_gelu: bool
    scheme: str
    tensor: tuple
    context: tuple
    compression: tuple
    zero: int | None = None
    keep: bool | None = None
    recompute: str | None = None
    sequences: int | None = None
    halves: bool | None = None
    together: bool | None = None
    times: float | None = None
    nbytes: float | None = None
    data: tuple | None = None
    pipeline: tuple | None = None


def _key_of(cost: str, config: Config, **values: Any) -> CostKey:
    """The CostKey of a cost of a layout."""
    train, parallel, positions = config.train, config.parallel, _positions_of(config.mesh)
    return CostKey(
        cost,
        train.backend,
        train.dtype,
        train.fused_gelu,
        parallel.scheme,
        tensor=tuple([each for axis, each in positions.items() if axis in "exyz"]),
        context=(positions[CONTEXT], parallel.context, parallel.ulysses, parallel.attention),
        compression=(
            parallel.compression,
            parallel.compression_rank,
            parallel.compression_share,
        ),
        **values,
    )


class Estimator:
    """Estimates steps of a model with `vocabulary` tokens; every cost is measured once."""

    def __init__(self, vocabulary: int, machine: Machine) -> None:
        self.vocabulary, self.machine, self.found = vocabulary, machine, {}
        self.costs = 0  # how many of them the program was run for
        self._held_on = cache(_held_on)

    def estimate(self, config: Config) -> Estimate:
        """The Estimate of a settled `config` whose schedule is synchronous."""
        parallel, parts, chunks = config.parallel, self.parts(config), contents(config)
        stages, micros = [stage_content(each) for each in chunks], parallel.microbatches
        works = self.works(config, parts, stages)
        totals = _totals_of(works, micros)
        late = self.latest(config, parts, stages)
        sums, rest = self.update(config, stages[late])[0], self.longest_update(config, stages)
        hidden = self.hidden(config, parts, stages[late], sums)
        after = (
            _without_hidden(sums, hidden)
            + rest
            + self.world(config)
            + self.tied_exchange(config, stages)
        )
        step = max(totals, key=lambda each: each.seconds) + after
        busy, idle = fmean(each.busy for each in totals) + after.busy, step.idle.total()
        passes = partial(self.passes, config, parts, works, late)
        alone = passes() + after.seconds
        slowdown = self.slowdown(config, passes, after, alone, busy, idle)
        total, bubble = slowdown * (alone - idle) + idle, slowdown * (alone - step.seconds)
        waits = Counter(
            {a: slowdown * s + (1 - slowdown) * step.idle[a] for a, s in step.waits.items()}
        )
        compute = total - bubble - waits.total()
        fullest = self._fullest(config, parts, chunks, sums.peak, rest.peak)
        return Estimate(config, total, compute, bubble, +waits, *fullest)

    def passes(
        self,
        config: Config,
        parts: PartCosts,
        works: Sequence[StageWork],
        late: int,
        slowdown: float = 1.0,
    ) -> float:
        """Seconds of the passes of a step, with uneven layers those of the stage `late`, where
        cores take so many times as long."""
        if not even(config):
            return self.ends(config, parts, slowdown)[late]
        seconds = [[_slowed(each, slowdown) for each in work] for work in works]
        times = StageTimes(*zip(*seconds), self.message(config, parts.block))
        return model_of(config).seconds(times)

    def ends(self, config: Config, parts: PartCosts, slowdown: float = 1.0) -> list[float]:
        """When each stage has done its passes, in seconds, on the clock of the schedule."""
        return model_of(config).steady_ends(self.part_costs(config, parts, slowdown))

    def part_costs(self, config: Config, parts: PartCosts, slowdown: float = 1.0) -> list[Cost]:
        """The Cost of a microbatch in every part of the model, where cores take so many times as
        long."""
        schedule, found = find(config.parallel.schedule), []
        message = self.message(config, parts.block)
        handled = self.handled(config, parts.block) if self.machine.cores else NOTHING
        for number, content in enumerate(contents_in_order(config)):
            work = work_of(parts, content, schedule.splits_backward)
            calls = handled * _neighbours_of(config, number)
            passes = (calls + work.forward, calls + work.backward, work.weight)
            found.append(Cost(*(_slowed(each, slowdown) for each in passes), message))
        return found

    def latest(self, config: Config, parts: PartCosts, stages: Sequence[StageContent]) -> int:
        """The stage whose sums are the last to end: the first one, which goes backward last, but
        where layers are uneven."""
        if even(config):
            return 0
        shown = {each: self.shown_sums(config, parts, each) for each in {*stages}}
        ends = reduced(self.ends(config, parts), [shown[stage] for stage in stages])
        return ends.index(max(ends))

    def shown_sums(self, config: Config, parts: PartCosts, stage: StageContent) -> float:
        """Seconds of the sums of a stage that no backward pass hides."""
        sums, _ = self.update(config, stage)
        return sums.seconds - self.hidden(config, parts, stage, sums).total()

    def longest_update(self, config: Config, stages: Sequence[StageContent]) -> Pass:
        """The Pass of the update of the stage that has most to update, or of the first one, where
        layers are even."""
        if even(config):
            return self.update(config, stages[0])[1]
        most = max({*stages}, key=lambda stage: self.held(config, stage)["gradient"])
        return self.update(config, most)[1]

    def slowdown(
        self,
        config: Config,
        passes: Callable[[float], float],
        after: Pass,
        alone: float,
        busy: float,
        idle: float,
    ) -> float:
        """How much longer than `alone` everything takes but for what is `idle`; `passes` gives the
        seconds of the passes where cores take so many times as long."""
        sharing, chain = core_sharing(config, self.machine), 0.0
        if sharing.ranks == 1:
            return 1.0
        if sharing.stage > 1:
            slow = passes(sharing.stage) + _slowed(after, sharing.stage)
            chain = (slow - alone) / (sharing.stage - 1)
        return (sharing.seconds(alone, chain, busy, idle) - idle) / (alone - idle)

    def works(self, config: Config, parts: PartCosts, stages: Any) -> list[StageWork]:
        """The StageWork of each stage on a microbatch, with what cores do for its
        messages."""
        split = find(config.parallel.schedule).splits_backward
        works = {stage: work_of(parts, stage, split) for stage in set(stages)}
        if not self.machine.cores or len(stages) == 1:
            return [works[stage] for stage in stages]
        handled, found = self.handled(config, parts.block), []
        for number, stage in enumerate(stages):
            work, messages = works[stage], handled * _messages_of(config, number)
            found.append(StageWork(messages + work.forward, messages + work.backward, work.weight))
        return found

    def _once(self, key: CostKey, make: Callable[[], Any]) -> Any:
        """The cost of a CostKey, which `make()` finds."""
        if key not in self.found:
            self.found[key] = make()
            self.costs += key.cost not in _MESSAGE_COSTS
        return self.found[key]

    def sample(
        self, config: Config, zero: int, keep: bool = True, recompute: str = "none"
    ) -> LayerSample:
        """The Sample of a layout with other values."""
        mesh, parallel = config.mesh, config.parallel
        both = mesh.p == 1 or find(parallel.schedule).v_shaped
        ends = ((FIRST, LAST),) if both else ((FIRST,), (LAST,))
        ends = ends if recompute == "none" else ()  # which do nothing again

        def make():
            changed = replace(parallel, zero=zero, keep_gathered=keep, recompute=recompute)
            layout = replace(config, parallel=changed)
            return LayerSample(layout, self.vocabulary, self.machine, ends)

        key = _key_of(
            "sample",
            config,
            zero=zero,
            keep=keep,
            recompute=recompute,
            together=both,
            data=_position_of(DATA, config),
        )
        return self._once(key, make)

    def parts(self, config: Config) -> PartCosts:
        """The PartCosts costs of a microbatch."""
        parallel, mesh = config.parallel, config.mesh
        sequences = config.train.batch // parallel.microbatches
        halves = find(parallel.schedule).splits_backward

        # ZeRO 2 and 3 have a part in the passes, 0 and 1 have none.
        zero = parallel.zero if parallel.zero > 1 and mesh.replicas() > 1 else 0
        keep, recompute = parallel.keep_gathered, parallel.recompute

        def ends():
            sample = self.sample(config, zero, keep)
            return [sample.passes(part, sequences, halves) for part in (FIRST, LAST)]

        def measure():
            sample = self.sample(config, zero, keep, recompute)
            stage = sample.stages[sample.layers]
            rows, columns = stage.block_of(sequences * config.model.sequence)
            block = rows * columns * np.dtype(config.train.dtype).itemsize
            layer = sample.layer_passes(sequences, halves)
            first, last = self._once(key._replace(cost="ends", recompute=None), ends)
            kinds = tuple(sample.passes(kind, sequences, halves) for kind in sample.kinds)
            return PartCosts(layer, first, last, block, kinds)

        key = _key_of(
            "parts",
            config,
            zero=zero,
            keep=keep,
            recompute=recompute,
            sequences=sequences // mesh.d,
            halves=halves,
            data=_position_of(DATA, config) if zero else None,
        )
        return self._once(key, measure)

    def held(self, config: Config, stage: Any) -> Counter:
        """Bytes of the parameters, gradients and states of a stage, by kind."""
        return self._held_on(self.sample(config, config.parallel.zero), stage)

    def update(self, config: Config, stage: Any) -> tuple[Pass, Pass]:
        """The Pass of the sums and that of the update, of as many layers as hold what a stage
        does."""
        sample = self.sample(config, config.parallel.zero)
        layer = sample.held[(sample.layers,)]["gradient"]
        times = self.held(config, stage)["gradient"] / layer

        most = max(1.0, 1e6 * config.parallel.bucket_mb)

        def measure():
            return sample.update(times, most, stage.layers)

        values = {"zero": config.parallel.zero, "data": _position_of(DATA, config)}
        key = _key_of("update", config, times=times, nbytes=most, **values)
        return self._once(key, measure)

    def hidden(self, config: Config, parts: PartCosts, stage: Any, sums: Pass) -> Counter:
        """Seconds of the sums over replicas, by axis, that the last backward pass of a stage
        hides.

        A bucket is posted when a layer is through; the last bucket is full, and the last layer
        through, only when the pass is over.
        """
        parallel = config.parallel
        if not parallel.overlap:
            return Counter()
        posts = buckets(self.held(config, stage)["gradient"], parallel.bucket_mb)
        share, idle = 1 - 1 / max(1, min(posts, stage.layers)), replicas_of(config, sums.idle)
        room = stage.layers * parts.layer.whole.seconds
        if (early := share * idle.total()) > room:
            share *= room / early
        return Counter({axis: share * seconds for axis, seconds in idle.items()})

    def message(self, config: Config, nbytes: float) -> float:
        """Seconds of a message in flight to the next stage, in the mean of the stages."""
        return self.between(config, "message", nbytes, self._on_its_way)

    def handled(self, config: Config, nbytes: float) -> Pass:
        """The Pass of a core that sends a message or takes one, in the mean of both."""
        seconds = self.between(config, "handled", nbytes, self._in_hand)
        return NOTHING._replace(seconds=seconds, waits=Counter(p=seconds), busy=seconds)

    def between(
        self,
        config: Config,
        name: str,
        nbytes: float,
        cost: Callable[[float, tuple[int, int]], float],
    ) -> float:
        """The mean of a cost(nbytes, pair) over the pairs of stages that follow each other."""
        if config.mesh.p == 1:
            return 0.0

        def measure():
            column = config.mesh.grid().ranks_along("p", {})
            return mean(cost(nbytes, pair) for pair in pairwise(column))

        key = _key_of(name, config, nbytes=nbytes, pipeline=_position_of("p", config))
        return self._once(key, measure)

    def _on_its_way(self, nbytes: float, pair: tuple[int, int]) -> float:
        if not self.machine.cores:
            return self.machine.call("send", nbytes, pair)
        return legs(self.machine, "send", nbytes, pair).wired + self.machine.wakeup_s

    def _in_hand(self, nbytes: float, pair: tuple[int, int]) -> float:
        return mean(legs(self.machine, op, nbytes, pair).work for op in MESSAGES)

    def call(self, axis: str, op: str, nbytes: float, members: Sequence[int]) -> Pass:
        """The Pass of a call."""
        if not self.machine.cores:
            seconds = self.machine.call(op, nbytes, members)
            waits = Counter({axis: seconds})
            return NOTHING._replace(seconds=seconds, waits=waits, idle=waits)
        work, wired = legs(self.machine, op, nbytes, members)
        seconds, idle = work + wired + self.machine.wakeup_s, Counter({axis: wired})
        return NOTHING._replace(
            seconds=seconds, waits=Counter({axis: seconds}), busy=work, idle=idle
        )

    def tied_exchange(self, config: Config, stages: Any) -> Pass:
        """The Pass in which the two copies of a tied table exchange their gradients."""
        if not config.model.tied or config.mesh.p == 1 or stages[0].last:
            return NOTHING
        ends = config.mesh.grid().ranks_along("p", {})
        nbytes = self.sample(config, config.parallel.zero).held[(FIRST,)]["gradient"]
        return self.call("p", "send", nbytes, (ends[0], ends[-1]))

    def world(self, config: Config) -> Pass:
        """The Pass of what all ranks do together in a step: the batch, three sums of a word."""
        ranks = range(config.mesh.grid().size)
        if len(ranks) == 1:
            return NOTHING
        batch = 2 * config.train.batch * config.model.sequence * _TOKEN
        word = self.call("world", "all_reduce", 8, ranks)
        return self.call("world", "broadcast", batch, ranks) + word * 3

    def _fullest(
        self, config: Config, parts: PartCosts, chunks: Any, sums: int, rest: int
    ) -> tuple[int, dict[str, int]]:
        """The stage whose rank holds most, and what it holds, by kind; `sums` and `rest` are the
        bytes of the sums and of the update of a layer."""
        last = len(chunks) - 1
        numbers = {0, min(1, last), max(0, last - 1), last} if even(config) else range(last + 1)
        found = {
            number: self.stage_bytes(config, parts, chunks[number], number, sums, rest)
            for number in numbers
        }
        stage = max(found, key=lambda number: found[number].total())
        return stage, dict(found[stage])

    def stage_bytes(
        self,
        config: Config,
        parts: PartCosts,
        chunks: Sequence[StageContent],
        number: int,
        sums: int,
        rest: int,
    ) -> Counter:
        """What the rank of stage `number`, of these `chunks`, holds at most, by kind; `sums` and
        `rest` as for all stages."""
        sample = self.sample(config, config.parallel.zero)
        layer = sample.held[(sample.layers,)]["gradient"]
        ahead = max(1.0, 2e6 * config.parallel.bucket_mb / layer)  # two buckets of values
        held = self.held(config, stage_content(chunks))
        times = held["gradient"] / layer
        working = working_bytes(
            config,
            parts,
            chunks,
            number,
            gradient=held["gradient"],
            sums=times * sums,
            rest=min(times, ahead) * rest,
        )
        return held + Counter(working)


def _held_on(sample: LayerSample, stage: StageContent) -> Counter:
    held, ends = sample.held, _ends_of(stage)
    parts, counts = (sample.layers,), (stage.layers,)
    if sample.kinds:
        parts, counts = sample.kinds, (stage.layers - stage.mixtures, stage.mixtures)
    total = held[()] + (held[ends] if ends else Counter())
    for part, count in zip(parts, counts):
        total += Counter({kind: int(count * size) for kind, size in held[(part,)].items()})
    return total


def _messages_of(config: Config, number: int) -> int:
    """How many messages a stage sends and takes in a pass of all its chunks; those of a V turn
    around at the last stage and end at the first."""
    ends = (number == 0) + (number == config.mesh.p - 1)
    return 2 * config.parallel.chunks - ends * (
        2 if find(config.parallel.schedule).v_shaped else 1
    )


def _neighbours_of(config: Config, part: int) -> int:
    """How many messages a part of the model sends and takes in a pass; none where the next part is
    on the same stage."""
    parallel, stages = config.parallel, config.mesh.p
    placement = Placement(stages, parallel.chunks, find(parallel.schedule).v_shaped)
    here = placement.location(part)[0]
    near = [other for other in (part - 1, part + 1) if 0 <= other < placement.parts]
    return sum(placement.location(other)[0] != here for other in near)


def _slowed(done: Pass, slowdown: float) -> float:
    """Seconds of a Pass where its core takes so many times as long."""
    if slowdown == 1:
        return done.seconds
    idle = done.idle.total()
    return slowdown * (done.seconds - idle) + idle


def _totals_of(works: Sequence[StageWork], micros: int) -> list[Pass]:
    """The Pass of each stage on so many microbatches; stages of the same content share a
    StageWork."""
    known = {id(work): work for work in works}
    known = {key: sum(work, NOTHING) * micros for key, work in known.items()}
    return [known[id(work)] for work in works]


def _without_hidden(done: Pass, hidden: Counter) -> Pass:
    """A Pass of which some seconds of calls, by axis, are hidden."""
    if not hidden.total():
        return done
    seconds = done.seconds - hidden.total()
    waits = done.waits - hidden
    idle = waits if done.idle is done.waits else done.idle - hidden
    return done._replace(seconds=seconds, waits=waits, idle=idle)


@cache
def _positions_of(mesh: MeshConfig) -> dict[str, tuple[str, int, int]]:
    """axis -> (axis, size, distance between neighbours on it, 0 where it has none)."""
    grid = mesh.grid()
    return {
        axis: (axis, size, grid.stride(axis) if size > 1 else 0)
        for axis, size in grid.sizes.items()
    }


def _position_of(axis: str, config: Config) -> tuple[str, int, int]:
    return _positions_of(config.mesh)[axis]


def _ends_of(content: StageContent) -> tuple[LayerRange, ...]:
    """The ends of a model that a stage holds."""
    return tuple(part for part, here in zip((FIRST, LAST), content[1:]) if here)
