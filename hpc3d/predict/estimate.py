"""A training step put together from the costs of its passes: quick, for every layout of a search.

hpc3d.predict.simulate runs the whole step; here the passes of one layer and of the ends
(hpc3d.predict.cost) are added up by what is known of the schedules.
"""

from collections import Counter
from dataclasses import dataclass, replace
from functools import cache
from math import ceil, prod
from typing import NamedTuple

import numpy as np

from hpc3d.cluster.counted import line
from hpc3d.config import Config
from hpc3d.model.stage import FIRST, LAST, LAYER
from hpc3d.pipeline.instruction import Placement
from hpc3d.pipeline.schedule import find
from hpc3d.predict.cost import NOTHING, Pass, Passes, Sample
from hpc3d.predict.makespan import flights, makespan

SPLIT = ("zb-h1", "zb-v")  # schedules whose backward pass has two halves
TOKEN = 4  # bytes


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
    def peak(self):
        return sum(self.kinds.values())

    @property
    def held(self):
        """The bytes that are there between steps, too."""
        return sum(self.kinds.get(kind, 0) for kind in ("parameter", "gradient", "optimizer"))


@dataclass(frozen=True, eq=False)
class Measured:
    """The Passes of the parts of a model, and the bytes of a block between them."""

    layer: Passes
    first: Passes
    last: Passes
    block: int


class Work(NamedTuple):
    """The passes of a stage on a microbatch."""

    forward: Pass
    backward: Pass
    weight: Pass


class Content(NamedTuple):
    """What a stage holds: so many layers, and which of the ends."""

    layers: int
    first: bool
    last: bool

    def ends(self):
        return tuple(part for part, here in ((FIRST, self.first), (LAST, self.last)) if here)


def contents(config):
    """The Content of every stage."""
    parallel, layers = config.parallel, config.layers()
    chunks = range(parallel.chunks)
    place = Placement(config.mesh.p, parallel.chunks, find(parallel.schedule).turn)
    for stage in range(config.mesh.p):
        parts = [place.part(stage, chunk) for chunk in chunks]
        count = sum(len(layers[part]) for part in parts)
        yield Content(count, 0 in parts, place.parts - 1 in parts)


class Estimator:
    """Estimates steps of a model with `vocabulary` tokens; every cost is measured once."""

    def __init__(self, vocabulary, machine):
        self.vocabulary, self.machine, self.found = vocabulary, machine, {}

    def estimate(self, config):
        """The Estimate of a settled `config` whose schedule is synchronous."""
        parallel, parts, stages = config.parallel, self.parts(config), [*contents(config)]
        micros, split = parallel.microbatches, parallel.schedule in SPLIT
        works = {stage: work_of(parts, stage, split) for stage in set(stages)}
        seconds = [[each.seconds for each in works[stage]] for stage in stages]
        message = self.message(config, parts.block)
        passes = makespan(parallel.schedule, micros, parallel.chunks, *zip(*seconds), message)
        busy = max((sum(work, NOTHING) for work in works.values()), key=lambda each: each.seconds)
        busy *= micros
        sums, rest = self.update(config, stages[0])
        waits = busy.waits + sums.waits + rest.waits
        hidden = self.hidden(config, parts, stages[0], sums)
        waits["d"] -= hidden
        waits["world"] += self.world(config)
        waits["p"] += self.twin(config, stages)
        total = passes + sums.seconds - hidden + rest.seconds
        total += waits["world"] + waits["p"]
        bubble = passes - busy.seconds
        compute = total - bubble - waits.total()
        fullest = self.fullest(config, parts, stages, works, max(sums.peak, rest.peak))
        return Estimate(config, total, compute, bubble, +waits, *fullest)

    def once(self, name, make, config, *others):
        """What `make` finds, which depends on backend, type, scheme, tensor axes, their place and
        `others`."""
        train = config.train
        kind = train.backend, train.dtype, train.fused_gelu, config.parallel.scheme
        key = name, *kind, *(place for place in strides(config.mesh) if place[0] in "xyz"), *others
        if key not in self.found:
            self.found[key] = make()
        return self.found[key]

    def sample(self, config, zero, keep=True, recompute="none"):
        """The Sample of a layout with other values."""
        mesh, parallel = config.mesh, config.parallel
        together = mesh.p == 1 or parallel.schedule == "zb-v"
        ends = ((FIRST, LAST),) if together else ((FIRST,), (LAST,))

        def make():
            changed = replace(parallel, zero=zero, keep_gathered=keep, recompute=recompute)
            layout = replace(config, parallel=changed)
            return Sample(layout, self.vocabulary, self.machine, ends)

        how = zero, keep, recompute, together
        return self.once("sample", make, config, *how, data_place(config))

    def parts(self, config):
        """The Measured costs of a microbatch."""
        parallel, mesh = config.parallel, config.mesh
        sequences, halves = config.train.batch // parallel.microbatches, parallel.schedule in SPLIT

        # ZeRO 2 and 3 have a part in the passes, 0 and 1 have none.
        zero = parallel.zero if parallel.zero > 1 and mesh.d > 1 else 0
        how = parallel.keep_gathered, parallel.recompute

        def measure():
            sample = self.sample(config, zero, *how)
            found = [sample.passes(part, sequences, halves) for part in (LAYER, FIRST, LAST)]
            rows, columns = sample.stages[LAYER].block_of(sequences)
            return Measured(*found, rows * columns * np.dtype(config.train.dtype).itemsize)

        deep = (zero, data_place(config)) if zero else ()
        return self.once("parts", measure, config, sequences // mesh.d, *how, halves, deep)

    def held(self, config, stage):
        """Bytes of the parameters, gradients and states of a stage, by kind."""
        held = self.sample(config, config.parallel.zero).held
        total = Counter({kind: stage.layers * size for kind, size in held[(LAYER,)].items()})
        return total + held[()] + (held[stage.ends()] if stage.ends() else Counter())

    def update(self, config, stage):
        """The Pass of the sums and that of the update, of as many layers as hold what a stage
        does."""
        sample = self.sample(config, config.parallel.zero)
        layer = sample.held[(LAYER,)]["gradient"]
        times = self.held(config, stage)["gradient"] / layer

        def measure():
            return sample.update(times)

        return self.once(
            "update", measure, config, times, config.parallel.zero, data_place(config)
        )

    def hidden(self, config, parts, stage, sums):
        """Seconds of the sums along d that the last backward pass of a stage hides.

        A bucket is posted when a layer is through; the last bucket is full, and the last layer
        through, only when the pass is over.
        """
        parallel = config.parallel
        if not parallel.overlap:
            return 0.0
        size = max(1.0, parallel.bucket_mb * 1e6)  # 0 is a bucket for each tensor
        buckets = ceil(self.held(config, stage)["gradient"] / size)
        early = sums.waits["d"] * (1 - 1 / max(1, min(buckets, stage.layers)))
        return min(early, stage.layers * parts.layer.whole.seconds)

    def message(self, config, nbytes):
        """Seconds of a message to the next stage."""
        if config.mesh.p == 1:
            return 0.0
        sizes = config.mesh.sizes()
        here, there, *_ = line(sizes, dict.fromkeys(sizes, 0), "p")
        return self.machine.call("send", nbytes, (here, there))

    def twin(self, config, stages):
        """Seconds in which the two copies of a tied table exchange their gradients."""
        if not config.model.tied or config.mesh.p == 1 or stages[0].last:
            return 0.0
        sizes = config.mesh.sizes()
        ends = line(sizes, dict.fromkeys(sizes, 0), "p")
        nbytes = self.sample(config, config.parallel.zero).held[(FIRST,)]["gradient"]
        return self.machine.call("send", nbytes, (ends[0], ends[-1]))

    def world(self, config):
        """Seconds of what all ranks do together in a step: the batch, and three sums of a word."""
        ranks = range(prod(config.mesh.sizes().values()))
        if len(ranks) == 1:
            return 0.0
        batch = 2 * config.train.batch * config.model.sequence * TOKEN
        word = self.machine.call("all_reduce", 8, ranks)
        return self.machine.call("broadcast", batch, ranks) + 3 * word

    def fullest(self, config, parts, stages, works, update):
        """The stage whose rank holds most, and what it holds, by kind."""
        numbers = 0, min(1, len(stages) - 1), len(stages) - 1
        candidates = {number: stages[number] for number in numbers}
        found = {
            number: self.held(config, stage)
            + Counter(self.moving(config, parts, stage, works[stage], number, update))
            for number, stage in candidates.items()
        }
        stage = max(found, key=lambda number: found[number].total())
        return stage, dict(found[stage])

    def moving(self, config, parts, stage, one, number, update):
        """What a rank of a stage holds at the worst moment beside its parameters: activations
        that wait for backward, and those of the pass that runs, or of the update of a layer.
        `one` is the stage's Work on a microbatch."""
        parallel = config.parallel
        sizes = config.mesh.p, parallel.microbatches, parallel.chunks
        forward = one.forward.left / parallel.chunks
        kept = forward + one.backward.left / parallel.chunks  # by a backward pass, for its W
        pairs = flights(parallel.schedule, *sizes, number)
        waiting = max(live * forward + inputs * kept for live, inputs in pairs)
        layer, blocks = parts.layer, parts.block * (4 if config.mesh.p > 1 else 1)
        running = [
            layer.forward.peak - layer.forward.left + blocks,
            max(layer.whole.peak, layer.backward.peak) + blocks,
        ]
        if stage.last:
            running.append(parts.last.whole.peak)
            running.append(parts.last.forward.peak - parts.last.forward.left + blocks)
            running[1] -= parts.last.forward.left
        moving = max(waiting + max(running), update * stage.layers)
        held = min(waiting, moving)
        return {"activations in flight": int(held), "the running pass": int(moving - held)}


@cache
def work_of(parts, stage, split):
    """The Work of a stage on a microbatch, its backward pass in halves where it is `split`."""
    ends = [part for part, here in ((parts.first, stage.first), (parts.last, stage.last)) if here]
    total = sum(ends, parts.layer * stage.layers)
    if split:
        return Work(total.forward, total.backward, total.weight)
    return Work(total.forward, total.whole, NOTHING)


@cache
def strides(mesh):
    """(axis, size, distance between neighbours on it) of each axis; 0 where it has none."""
    sizes, found = mesh.sizes(), []
    stride = prod(sizes.values())
    for axis, size in sizes.items():
        stride //= size
        found.append((axis, size, stride if size > 1 else 0))
    return tuple(found)


def data_place(config):
    return next(place for place in strides(config.mesh) if place[0] == "d")
