"""Estimate the step of a layout from the costs of its passes and a model of its schedule.

Estimates are fast enough for all layouts of a search: a CostTable measures one layer, the
embedding and the head, and hpc3d.pipeline.step_model combines these costs into a step. The
reference is hpc3d.predict.simulation.simulator, which runs the full step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from statistics import fmean
from typing import TYPE_CHECKING, NamedTuple

from hpc3d.comm.mesh import COPIES, EXPERTS
from hpc3d.pipeline.schedule import find
from hpc3d.pipeline.step_model import StageTimes, reduced
from hpc3d.pipeline.timeline import Cost
from hpc3d.predict.planning.cost_table import CostTable
from hpc3d.predict.planning.pass_costs import NOTHING, replicas_of
from hpc3d.predict.planning.peak import (
    StageWork,
    buckets,
    contents,
    contents_in_order,
    even,
    fullest,
    model_of,
    stage_content,
    work_of,
)
from hpc3d.predict.simulation.simulator import core_sharing

if TYPE_CHECKING:
    from hpc3d.config.input_file import Config
    from hpc3d.predict.machine.machine import Machine
    from hpc3d.predict.planning.pass_costs import PartCosts, Pass, StageContent


class Estimate(NamedTuple):
    """Estimated step time and memory of a layout.

    The step time `seconds` is the sum of `compute`, `bubble` and the communication times in
    `waits`, which maps each mesh axis to seconds. All of these times refer to the stage with the
    most work. `stage` is the stage with the highest peak memory, and `kinds` maps each kind of
    memory to its size in bytes on a rank of this stage.
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
        """Peak memory, in bytes, of the rank that uses the most memory."""
        return sum(self.kinds.values())

    @property
    def held(self) -> int:
        """Size in bytes of the parameters, gradients and optimizer state on a rank of `stage`."""
        return sum(self.kinds.get(kind, 0) for kind in ("parameter", "gradient", "optimizer"))


class Estimator:
    """Estimator of step time and memory for layouts of a model on a machine.

    The vocabulary of the model has `vocabulary` tokens.
    """

    def __init__(self, vocabulary: int, machine: Machine) -> None:
        self.vocabulary, self.machine = vocabulary, machine
        self.costs = CostTable(vocabulary, machine)

    def estimate(self, config: Config) -> Estimate:
        """Estimate the step of a resolved `config`, whose schedule must be synchronous."""
        costs, parts, chunks = self.costs, self.costs.parts(config), contents(config)
        stages = [stage_content(each) for each in chunks]
        works = self.works(config, parts, stages)

        # `after` is the work that remains when the passes of stage `late` have ended.
        late, sums, rest = self._last_work(config, parts, stages)
        after = sums + rest + costs.world(config) + costs.tied_exchange(config, stages)

        # `totals` is the work of each stage in a step. The bubble is the idle time of the stage
        # with the most work.
        known = {id(work): work for work in works}
        micros = config.parallel.microbatches
        known = {key: sum(work, NOTHING) * micros for key, work in known.items()}
        totals = [known[id(work)] for work in works]
        if config.parallel.sync == "stale":  # overlaps with all steps
            seconds = max(each.seconds for each in totals) + after.seconds - after.idle[COPIES]
            after = _without(after, Counter({COPIES: min(seconds, after.idle[COPIES])}))
        step = max(totals, key=lambda each: each.seconds) + after

        # If ranks share cores, the work takes `slowdown` times as long.
        def passes(slowdown):
            return self.pass_seconds(config, parts, works, late, slowdown)

        alone, idle = passes(1.0) + after.seconds, step.idle.total()
        busy = fmean(each.busy for each in totals) + after.busy
        slowdown = self.slowdown(config, passes, after, alone, busy, idle)
        total, bubble = slowdown * (alone - idle) + idle, slowdown * (alone - step.seconds)
        waits = Counter(
            {a: slowdown * s + (1 - slowdown) * step.idle[a] for a, s in step.waits.items()}
        )
        compute = total - bubble - waits.total()
        stage, kinds = fullest(costs, config, parts, chunks, sums, rest)
        return Estimate(config, total, compute, bubble, +waits, stage, kinds)

    def _last_work(self, config, parts, stages):
        """Return the stage whose gradient reductions end last, its exposed reductions, and the
        exposed rest of the update on the stage with the most gradients."""
        costs = self.costs
        if even(config):
            late, largest = 0, stages[0]
        else:
            late = self._last_to_reduce(config, parts, stages)
            largest = max({*stages}, key=lambda stage: costs.held(config, stage)["gradient"])
        update = costs.update(config, stages[late])
        sums = self._shown_sums(config, parts, stages[late], update[0])
        if largest != stages[late]:
            update = costs.update(config, largest)
        return late, sums, self._shown_rest(config, parts, largest, update)

    def works(
        self, config: Config, parts: PartCosts, stages: Sequence[StageContent]
    ) -> list[StageWork]:
        """Return a list with the StageWork (costs per microbatch) of each stage.

        Stages with the same content and the same number of messages may share one object.
        """
        model = model_of(config)
        messages = (
            sum(model.messages[part] for part in model.placement.parts_of(stage))
            for stage in range(model.stages)
        )
        return self._with_messages(config, parts, stages, messages)

    def part_costs(self, config: Config, parts: PartCosts, slowdown: float = 1.0) -> list[Cost]:
        """Return the Cost of one microbatch on each model chunk.

        All CPU times are multiplied by `slowdown`.
        """
        messages, message = model_of(config).messages, self.costs.message(config, parts.block)
        works = self._with_messages(config, parts, contents_in_order(config), messages)
        return [Cost(*(_slowed(each, slowdown) for each in work), message) for work in works]

    def _with_messages(self, config, parts, contents, messages):
        """Return the StageWork of each StageContent, including the CPU time for messages."""
        split = find(config.parallel.schedule).splits_backward
        works = [work_of(parts, content, split) for content in contents]
        if config.parallel.overlap_experts:
            works = [StageWork(*(self._paired(config, each) for each in work)) for work in works]
        if not self.machine.cores:
            return works
        handled, found = self.costs.handled(config, parts.block), []
        for work, count in zip(works, messages, strict=True):
            calls = handled * count
            found.append(StageWork(calls + work.forward, calls + work.backward, work.weight))
        return found

    def _paired(self, config: Config, work: Pass) -> Pass:
        """Return the cost of a pass whose all-to-alls of experts overlap with another pass.

        The cost is the mean over all passes, some of which are not in pairs.
        """
        stages, micros = config.mesh.p, config.parallel.microbatches
        waits = work.waits[EXPERTS]
        share = max(0.0, 1 - (2.5 * stages - 0.5) / (2 * micros)) / self.machine.contention
        hidden = share * min(waits, work.seconds - waits)
        return _without(work, Counter({EXPERTS: hidden}))

    def _ends(self, config, parts, slowdown=1.0):
        """Simulate the schedule; return the end time of each stage's last pass in seconds."""
        return model_of(config).steady_ends(self.part_costs(config, parts, slowdown))

    def _last_to_reduce(self, config, parts, stages):
        shown = {each: self.shown_sums(config, parts, each).seconds for each in {*stages}}
        ends = reduced(self._ends(config, parts), [shown[stage] for stage in stages])
        return ends.index(max(ends))

    def pass_seconds(
        self,
        config: Config,
        parts: PartCosts,
        works: Sequence[StageWork],
        late: int,
        slowdown: float,
    ) -> float:
        """Return the time in seconds from the start of a step to the end of stage `late`'s last
        pass."""
        if not even(config):
            return self._ends(config, parts, slowdown)[late]
        seconds = [[_slowed(each, slowdown) for each in work] for work in works]
        times = StageTimes(*zip(*seconds), self.costs.message(config, parts.block))
        return model_of(config).seconds(times)

    def shown_sums(self, config: Config, parts: PartCosts, stage: StageContent) -> Pass:
        """Return the exposed cost of a stage's gradient reductions.

        Reductions can overlap with the last backward pass of the stage. A bucket is posted after
        each layer, so the last bucket is posted at the end of the pass and its reduction is
        exposed.
        """
        return self._shown_sums(config, parts, stage, self.costs.update(config, stage)[0])

    def _shown_sums(self, config, parts, stage, sums):
        overlap = config.parallel.overlap
        return self._exposed(config, stage, sums, parts.layer.whole) if overlap else sums

    def _shown_rest(self, config, parts, stage, update):
        """Return the exposed cost of a stage's optimizer update and all-gathers of new values.

        Gathers can overlap with the first forward pass of the stage, except for the first bucket.
        """
        _, rest, gathers = update
        if gathers is NOTHING:
            return rest
        return rest + self._exposed(config, stage, gathers, parts.layer.forward)

    def _exposed(self, config: Config, stage: StageContent, calls: Pass, layer: Pass) -> Pass:
        """Return the cost of `calls`, all buckets of which except one overlap with a pass.

        `layer` is the cost of the pass of a layer. While a collective of t seconds runs, the pass
        loses (1 - 1/f) t seconds, where f is the factor `contention` of the machine, so that only
        t/f seconds are saved.
        """
        held = self.costs.held(config, stage)["gradient"]
        posts = buckets(held, config.parallel.bucket_bytes)
        share, idle = 1 - 1 / max(1, min(posts, stage.layers)), replicas_of(config, calls.idle)
        share, room = share / self.machine.contention, stage.layers * layer.seconds
        if (early := share * idle.total()) > room:
            share *= room / early
        return _without(calls, Counter({axis: share * each for axis, each in idle.items()}))

    def slowdown(
        self,
        config: Config,
        passes: Callable[[float], float],
        after: Pass,
        alone: float,
        busy: float,
        idle: float,
    ) -> float:
        """Return the factor by which core sharing lengthens a step, excluding idle time.

        With a dedicated core per rank, the step takes `alone` seconds, during which the core is
        busy for `busy` seconds and idle for `idle` seconds. `passes(factor)` returns the time of
        the passes on cores that are slower by `factor`, and `after` is the work after the passes.
        """
        sharing, chain = core_sharing(config, self.machine), 0.0
        if sharing.ranks == 1:
            return 1.0
        if sharing.stage > 1:
            slow = passes(sharing.stage) + _slowed(after, sharing.stage)
            chain = (slow - alone) / (sharing.stage - 1)
        return (sharing.seconds(alone, chain, busy, idle) - idle) / (alone - idle)


def _slowed(done: Pass, slowdown: float) -> float:
    """Return the duration of a Pass in seconds if its CPU time is multiplied by `slowdown`."""
    if slowdown == 1:
        return done.seconds
    idle = done.idle.total()
    return slowdown * (done.seconds - idle) + idle


def _without(done: Pass, hidden: Counter) -> Pass:
    """Return a Pass without the `hidden` communication time, which is in seconds per axis."""
    if not hidden.total():
        return done
    seconds = done.seconds - hidden.total()
    waits = done.waits - hidden
    idle = waits if done.idle is done.waits else done.idle - hidden
    return done._replace(seconds=seconds, waits=waits, idle=idle)
