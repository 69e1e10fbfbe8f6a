"""The search for the layout with the shortest step, among those that fit the memory.

All sizes have a lower bound (hpc3d.predict.layouts); in its order they are timed by estimates
(hpc3d.predict.estimate), with the schedule, microbatches, ZeRO and recomputation that suit them,
until no bound is below the best ones that were found.
"""

import logging
from dataclasses import replace
from math import inf
from typing import NamedTuple

from hpc3d.predict import layouts
from hpc3d.predict.estimate import SPLIT, Estimate, Estimator

log = logging.getLogger(__name__)
WHOLE = ("none", "1f1b", "gpipe", "interleaved")  # schedules that do not split backward


class Timed(NamedTuple):
    """The best that a place gives: of what fits the memory, else of what comes closest."""

    place: layouts.Place
    best: Estimate
    fits: bool


class Found(NamedTuple):
    """What a search found: `timed` places, quickest first and those that do not fit last; places
    that were `cut`, since others with the same p and d move less or since the least they take is
    too long, and `left` since enough was measured; and how many layouts there are."""

    timed: list
    cut: list
    left: list
    considered: int

    def widen(self, places, time):
        """Add what `time` makes of those places that are not timed yet."""
        new = [place for place in places if all(place is not each.place for each in self.timed)]
        self.timed.extend(map(time, new))
        self.sort()
        for others in (self.cut, self.left):
            others[:] = [place for place in others if all(place is not each for each in new)]

    def sort(self):
        self.timed.sort(key=lambda each: (not each.fits, each.best.seconds))


class Search:
    """Layouts of `config` on so many ranks of a machine, with `memory` bytes each."""

    def __init__(self, config, ranks, vocabulary, machine, memory):
        self.base, self.ranks, self.memory = layouts.bare(config), ranks, memory
        self.estimator = Estimator(vocabulary, machine)
        self.bounds = layouts.Bounds(self.base, ranks, vocabulary, machine)
        self.estimates = 0

    def run(self, top, most):
        """The Found of all layouts; no more than `most` costs are measured for it.

        The place with the shortest words of each p and d is timed, then others where it was quick.
        Raises ValueError, with one line that says what to change, if the rules allow no layout.
        """
        places = []
        for place in self.places():
            places.append(place)
            p, last = place.config.mesh.p, min(self.ranks, self.base.model.layers)
            log.info("%d sizes of a mesh, so far with p = %d of %d", len(places), p, last)
        if not places:
            raise ValueError(self.refusal())
        self.calibrate(places)
        groups, cut = layouts.shortlists(places)
        groups.sort(key=lambda group: self.bounds.least(group[0]))
        found = Found([], cut, [], sum(map(self.variants, places)))
        times = [self.consider(group[0], found, top, most) for group in groups]
        rest = [(time, place) for time, group in zip(times, groups) for place in group[1:]]
        for _, place in sorted(rest, key=lambda each: (each[0], self.bounds.least(each[1]))):
            self.consider(place, found, top, most)
        found.sort()
        return found

    def consider(self, place, found, top, most):
        """Time a place, if it may be among the best; the seconds of its step, if it fits."""
        if self.bounds.least(place) > self.limit(found.timed, top):
            found.cut.append(place)
        elif len(self.estimator.found) >= most and found.timed:
            found.left.append(place)
        else:
            log.info("%d sizes of a mesh timed, %d cut", len(found.timed), len(found.cut))
            found.timed.append(self.timed(place))
            return found.timed[-1].best.seconds if found.timed[-1].fits else inf
        return inf

    def calibrate(self, places):
        """Tell the bounds what a layout computes that computes least beside its words."""
        config = min(places, key=lambda place: sum(place.moves.values())).config
        fixed = self.estimator.world(config)
        self.bounds.calibrate(config, self.estimator.parts(config), fixed)

    def limit(self, timed, top):
        """Seconds that a place must stay below to be among the best."""
        seconds = sorted(each.best.seconds for each in timed if each.fits)
        return seconds[top - 1] if len(seconds) >= top else inf

    def places(self):
        """The layouts that the rules allow, with their bounds."""
        model, train = self.base.model, self.base.train
        for mesh in layouts.meshes(self.ranks, model.layers, train.batch):
            config = layouts.with_mesh(self.base, *mesh)
            if not layouts.problems(config, self.ranks):
                yield self.bounds.place(config)

    def refusal(self):
        """Why there is no layout: what is wrong with the first one."""
        model, train = self.base.model, self.base.train
        mesh = next(layouts.meshes(self.ranks, model.layers, train.batch))
        problem, *_ = layouts.problems(layouts.with_mesh(self.base, *mesh), self.ranks)
        return f"no layout of {self.ranks} ranks divides this model; the first one: {problem}"

    def variants(self, place):
        """How many layouts have the sizes of a place."""
        mesh, layers = place.config.mesh, self.base.model.layers
        counts = layouts.microbatches(place.config, self.ranks)
        ways = sum(len(layouts.schedules(mesh.p, micros, layers)) for micros in counts)
        orders = layouts.orders(place.config) if self.bounds.placed else 1
        return ways * len(savers(mesh)) * sum(map(len, zeros(mesh))) * orders

    def timed(self, place):
        """The best estimate of a place: what keeps more is quicker, so that backward does no more
        again than it must, and ZeRO 2 and 3 are for where it would do whole layers again."""
        mesh, found = place.config.mesh, []
        counts = layouts.microbatches(place.config, self.ranks)
        counts = [micros for micros in counts if micros >= mesh.p] or counts[-1:]
        ways = savers(mesh)
        for group in zeros(mesh):
            way = self.first_that_fits(place.config, counts[-1], group, ways, found)
            if way is not None:
                found += self.tries(place.config, counts, group, way)
                ways = ways[: ways.index(way)]
            if not ways or (way and way[1] != "full"):
                break
        fitting = [each for each in found if self.fits(each)]
        if not fitting:
            last = zeros(mesh)[-1], savers(mesh)[-1]
            found += self.options(place.config, counts[-1], *last)
            return Timed(place, min(found, key=lambda each: each.peak), False)
        best = min(fitting, key=lambda each: each.seconds)
        fewer = filter(self.fits, [*self.fewer(place.config, counts, best)])
        best = min([best, *fewer], key=lambda each: each.seconds)
        best = min([best, *filter(self.fits, self.split(best))], key=lambda each: each.seconds)
        return Timed(place, best, True)

    def first_that_fits(self, config, micros, group, ways, found):
        """The first of `ways` to save memory that fits with so many microbatches, or None; they
        save more and more.  Adds the estimates that it needs to `found`."""
        low, high = 0, len(ways)
        while low < high:
            middle = (low + high) // 2 if low else 0
            options = [*self.options(config, micros, group[-1:], ways[middle])]
            found += options
            low, high = (low, middle) if any(map(self.fits, options)) else (middle + 1, high)
            if min(each.held for each in options) > self.memory:
                return None
        return ways[low] if low < len(ways) else None

    def tries(self, config, counts, group, way):
        """Estimates with more and more microbatches, until they fit and are no longer quicker."""
        best = inf
        for micros in counts:
            options = [*self.options(config, micros, group, way)]
            yield from options
            seconds = min((each.seconds for each in options if self.fits(each)), default=inf)
            if seconds > best or (seconds < inf and config.mesh.p == 1):
                return
            best = seconds

    def fewer(self, config, counts, best):
        """Estimates with fewer microbatches than the best, which fit where more is done again."""
        mesh, found = config.mesh, []
        for micros in counts:
            if micros < best.config.parallel.microbatches:
                for group in zeros(mesh):
                    way = self.first_that_fits(config, micros, group, savers(mesh), found)
                    if way is not None:
                        found += self.options(config, micros, group, way)
        return found

    def split(self, best):
        """Estimates of the schedules that split the backward pass, in place of that of `best`."""
        config, parallel = best.config, best.config.parallel
        way = parallel.keep_gathered, parallel.recompute
        yield from self.options(config, parallel.microbatches, (parallel.zero,), way, SPLIT)

    def options(self, config, micros, group, way, names=WHOLE):
        """Estimates for the schedules of these `names` and the values of ZeRO in `group`."""
        keep, recompute = way
        for name, chunks in layouts.schedules(config.mesh.p, micros, self.base.model.layers):
            for zero in group if name in names else ():
                self.estimates += 1
                changes = {"microbatches": micros, "chunks": chunks, "zero": zero}
                changes |= {"keep_gathered": keep, "recompute": recompute, "schedule": name}
                parallel = replace(config.parallel, **changes)
                yield self.estimator.estimate(replace(config, parallel=parallel))

    def fits(self, estimate):
        return estimate.peak <= self.memory


def savers(mesh):
    """What backward may do again; without tensor axes there is nothing to gather again."""
    gathers = mesh.x * mesh.y * mesh.z > 1
    return [saver for saver in layouts.SAVERS if saver[0] or gathers]


def zeros(mesh):
    """The values of ZeRO that make a difference, those together that have the same passes."""
    return layouts.ZEROS if mesh.d > 1 else ((0,),)
