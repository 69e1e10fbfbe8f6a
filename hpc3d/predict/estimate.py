"""A training step put together from the costs of its passes: quick, for every layout of a search.

hpc3d.predict.simulate runs the whole step; here the passes of one layer and of the ends
(hpc3d.predict.cost) are added up by what is known of the schedules.
"""

from collections import Counter
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from math import prod
from statistics import mean
from typing import NamedTuple

import numpy as np

from hpc3d.cluster.counted import line
from hpc3d.config import Config
from hpc3d.model.stage import FIRST, LAST, LAYER
from hpc3d.predict.cost import NOTHING, Passes, Sample
from hpc3d.predict.makespan import makespan
from hpc3d.predict.peak import SPLIT, buckets, contents, moving, together, work_of

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


class Estimator:
    """Estimates steps of a model with `vocabulary` tokens; every cost is measured once."""

    def __init__(self, vocabulary, machine):
        self.vocabulary, self.machine, self.found = vocabulary, machine, {}
        self.costs = 0  # how many of them the program was run for

    def estimate(self, config):
        """The Estimate of a settled `config` whose schedule is synchronous."""
        parallel, parts, chunks = config.parallel, self.parts(config), contents(config)
        stages = [together(each) for each in chunks]
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
        fullest = self.fullest(config, parts, chunks, sums.peak, rest.peak)
        return Estimate(config, total, compute, bubble, +waits, *fullest)

    def once(self, name, make, config, *others):
        """What `make` finds, which depends on backend, type, scheme, tensor axes, their place and
        `others`."""
        train = config.train
        kind = train.backend, train.dtype, train.fused_gelu, config.parallel.scheme
        key = name, *kind, *(place for place in strides(config.mesh) if place[0] in "xyz"), *others
        if key not in self.found:
            self.found[key] = make()
            self.costs += name != "message"
        return self.found[key]

    def sample(self, config, zero, keep=True, recompute="none"):
        """The Sample of a layout with other values."""
        mesh, parallel = config.mesh, config.parallel
        together = mesh.p == 1 or parallel.schedule == "zb-v"
        ends = ((FIRST, LAST),) if together else ((FIRST,), (LAST,))
        ends = ends if recompute == "none" else ()  # which do nothing again

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
        keep, recompute = parallel.keep_gathered, parallel.recompute

        def ends():
            sample = self.sample(config, zero, keep)
            return [sample.passes(part, sequences, halves) for part in (FIRST, LAST)]

        def measure():
            sample = self.sample(config, zero, keep, recompute)
            rows, columns = sample.stages[LAYER].block_of(sequences)
            block = rows * columns * np.dtype(config.train.dtype).itemsize
            layer = sample.passes(LAYER, sequences, halves)
            return Measured(layer, *self.once("ends", ends, config, *how), block)

        deep = (zero, data_place(config)) if zero else ()
        how = sequences // mesh.d, keep, halves, deep
        return self.once("parts", measure, config, recompute, *how)

    def held(self, config, stage):
        """Bytes of the parameters, gradients and states of a stage, by kind."""
        held = self.sample(config, config.parallel.zero).held
        total = Counter({kind: stage.layers * size for kind, size in held[(LAYER,)].items()})
        return total + held[()] + (held[ends_of(stage)] if ends_of(stage) else Counter())

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
        posts = buckets(self.held(config, stage)["gradient"], parallel.bucket_mb)
        early = sums.waits["d"] * (1 - 1 / max(1, min(posts, stage.layers)))
        return min(early, stage.layers * parts.layer.whole.seconds)

    def message(self, config, nbytes):
        """Seconds of a message to the next stage, in the mean of the stages."""
        if config.mesh.p == 1:
            return 0.0
        sizes = config.mesh.sizes()

        def measure():
            column = line(sizes, dict.fromkeys(sizes, 0), "p")
            return mean(self.machine.call("send", nbytes, pair) for pair in pairwise(column))

        place = next(each for each in strides(config.mesh) if each[0] == "p")
        return self.once("message", measure, config, nbytes, place)

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

    def fullest(self, config, parts, chunks, sums, rest):
        """The stage whose rank holds most, and what it holds, by kind; `sums` and `rest` are the
        bytes of the sums and of the update of a layer."""
        layer = self.sample(config, config.parallel.zero).held[(LAYER,)]["gradient"]
        ahead = max(1.0, 2e6 * config.parallel.bucket_mb / layer)  # two buckets of values
        last, found = len(chunks) - 1, {}
        for number in {0, min(1, last), max(0, last - 1), last}:
            held = self.held(config, together(chunks[number]))
            times = held["gradient"] / layer
            sizes = held["gradient"], times * sums, min(times, ahead) * rest
            found[number] = held + Counter(moving(config, parts, chunks[number], number, *sizes))
        stage = max(found, key=lambda number: found[number].total())
        return stage, dict(found[stage])


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


def ends_of(content):
    """The ends of a model that a stage holds."""
    return tuple(part for part, here in zip((FIRST, LAST), content[1:]) if here)
