"""Arrangements of a module that may be the best: replicas and recomputation of every stage, the
borders, the number of stages and the microbatches chosen together.

A step of stages with m microbatches takes about

    (m - 1) T + sum_s w_s,    T = max_s w_s

where w_s is what stage s needs for a microbatch forward and backward, its messages, and an m-th of
its sums of gradients and of its update.  For a limit of T the least sum is found exactly, from the
last stage to the first, by where the stage begins, how many stages there are from it on (so many
microbatches are in flight under 1F1B), and how many ranks are left for them:

    G[s, i, d] = min over j, r of w(i, j, r) + G[s-1, j, d-r]    where w(i, j, r) <= T fits

Lower limits follow until there is nothing.  The chain is cut at some places only, which are
refined later (hpc3d.partition.improvement).

If each stage has one rank, the downsets of a graph are searched exactly, and steps are simulated.
Their search goes through chains of downsets, from the first stage to the last, and leaves a branch
if no step of it can be shorter than the best one known.  With M microbatches, f_s and b_s seconds
of stage s forward and backward and n_s microbatches in flight there, a step lasts at least

    sum_{i<s} (f_i + b_i) + M (f_s + b_s)               to and from stage s, and its own passes
    sum_i f_i + sum_{i!=s} b_i + M b_s + (M - n_s) f_s  what is left after its first gradient
    sum_{i<s} (f_i + b_i) + M T                         T: the heaviest stage of the rest

`lightest` minimizes the load of the heaviest stage ("max-load" in Tarnawski et al. 2020,
arXiv:2006.16423).  If r stages share what a downset I leaves,

    T[I, r] = min over J > I of max(T[J, r - 1], load(J - I))

Over all downsets both are exact; a chain of sorted atoms is the fast path.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from math import inf
from typing import NamedTuple

import numpy as np

from hpc3d.partition.coarse_chain import Ranges, border_of, places_of, sums_of
from hpc3d.partition.downsets import Chain, Downsets
from hpc3d.partition.evaluation import (
    MOMENTS,
    Limits,
    ModelCosts,
    PipelineChoice,
    StageChoice,
    bytes_held,
)
from hpc3d.pipeline.schedule import DEFAULT, ONE_STAGE, find
from hpc3d.pipeline.step_model import StepModel
from hpc3d.pipeline.timeline import Cost

SEARCH_BUDGET = 1_000_000  # simulated passes of all searches of downsets together
_LOOK = 32  # passes that one look at how to continue counts for
_BLOCKS = 48  # between the places where the chain is cut
_MOST_UNITS = 63  # that ranks are given in
_STEPS = (0.8, 0.97)  # from limit to limit: first far, then around the best
_NEAR_BEST = 2.0  # what is looked at again on the clock
_FEW = 6  # numbers of stages that are followed under a limit


class Allowed(NamedTuple):
    """What a search may choose from: `ranks` and bytes of each, numbers of `microbatches`,
    `schedules`, `replicas` (None: any; one number: of all stages; several: of each), whether
    stages may `recompute`, and whether replicas share moments (`zero`)."""

    ranks: int
    memory: float
    microbatches: tuple[int, ...]
    schedules: tuple[str, ...]
    replicas: tuple[int, ...] | None = None
    recompute: tuple[bool, ...] = (False, True)
    zero: int = 0

    @property
    def stages(self) -> int:
        """The most that there can be."""
        if self.replicas is None:
            return self.ranks // self.unit
        return len(self.replicas) if self.replicas[1:] else self.ranks // self.replicas[0]

    @property
    def unit(self) -> int:
        """Of many ranks so many are given together where replicas are searched."""
        return max(1, 2 ** (self.ranks.bit_length() - _MOST_UNITS.bit_length()))

    def units(self, replicas: int) -> int:
        """What a stage takes of what there is: where replicas are known one of the stages."""
        return 1 if self.replicas else replicas // self.unit

    def replicas_of(self, left: int) -> tuple[int, ...]:
        """What a stage may have that has `left` stages from itself on."""
        if self.replicas is None:
            return tuple(range(self.unit, self.ranks + 1, self.unit))
        return self.replicas[-left:][:1] if self.replicas[1:] else self.replicas


class Estimated(NamedTuple):
    """An arrangement and about the seconds of its step."""

    seconds: float
    choice: PipelineChoice


class _StageKind(NamedTuple):
    """By two places, for stages of so many `replicas`: what counts for the limit and in the sum,
    without recomputation; what this adds; and the bytes that are held always, for a microbatch
    in flight, that are saved, and that recomputation makes beside these."""

    replicas: int
    load: np.ndarray
    weight: np.ndarray
    again: np.ndarray
    always: np.ndarray
    received: np.ndarray
    saved: np.ndarray
    made: np.ndarray

    def costs(
        self, flight: int, sending: bool, allowed: Allowed
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Limit, sum (inf where nothing fits), and whether a stage is run again; with so many
        microbatches in flight, and the gradient of another one where it is `sending`."""
        least = self.always + (flight + sending) * self.received + self.saved
        keeps = least + (flight - 1) * self.saved <= allowed.memory
        again = least + self.made <= allowed.memory
        keeps &= False in allowed.recompute
        again &= True in allowed.recompute
        weight = np.where(keeps, self.weight, np.where(again, self.weight + self.again, inf))
        return self.load + np.where(keeps, 0.0, self.again), weight, ~keeps


class JointSearch:
    """The search of arrangements of a model over some `places` of its chain (None: those between
    blocks of it)."""

    def __init__(
        self, costs: ModelCosts, allowed: Allowed, places: np.ndarray | None = None
    ) -> None:
        self.costs, self.allowed = costs, allowed
        blocks = max(_BLOCKS, len(allowed.replicas or ()))
        self.places = places_of(costs, allowed.ranks, blocks) if places is None else places
        self.border = border_of(costs, allowed.ranks)
        self.ranges: dict[int, Ranges] = {}
        self.balance: dict[int, dict[int, _StageKind]] = {}
        self.best = inf

    def found(self) -> list[PipelineChoice]:
        """The arrangements that fit and come near the best, about the shortest step first."""
        found = [each for way in self._ways() for each in self._of_way(*way)]
        near = [each for each in found if each.seconds <= _NEAR_BEST * self.best]
        near.sort(key=lambda each: each.seconds)
        return self._that_fit(each.choice for each in near)

    def fits(self) -> bool:
        """Whether anything does."""
        for way in self._ways():
            found = _OfWay(self, *way).under(inf).found
            if self._that_fit(each.choice for each in found):
                return True
        return False

    def _ways(self):
        """Schedules, numbers of microbatches, and so many in flight on every stage (None: as many
        as there are stages from there on).  Schedules of several chunks are made of the default
        one's arrangements."""
        names = [name if find(name).chunks else DEFAULT for name in self.allowed.schedules]
        for micros in self.allowed.microbatches:
            if DEFAULT not in names:
                yield DEFAULT, micros, 1  # one stage has no schedule
            for name in dict.fromkeys(names):
                for flight in _flight_choices(find(name), micros, self.allowed.stages):
                    yield name, micros, flight

    def _that_fit(self, choices):
        wanted = self.allowed.schedules
        found = [*dict.fromkeys(choices)]
        for name in wanted:
            if not find(name).chunks:
                found += dict.fromkeys(self._all_interleaved(name, found))
        return [
            each
            for each in found
            if (each.schedule in wanted or len(each.stages) == 1)
            and max(bytes_held(self.costs, each)) <= self.allowed.memory
        ]

    def _of_way(self, name, micros, flight) -> Iterator[Estimated]:
        """Under lower and lower limits, at last around the best."""
        search = _OfWay(self, name, micros, flight)
        first = search.under(inf)
        if (micros - 1) * search.least + first.weight > _NEAR_BEST * self.best:
            return
        seen, limit, best = [], inf, inf
        while np.isfinite((at := search.under(limit)).weight):
            seen.append(at)
            best = min(best, at.seconds)
            limit = _STEPS[0] * at.load
        if not seen:
            return
        near = min(seen, key=lambda each: each.seconds).load
        limit = near / _STEPS[0]
        while limit > _STEPS[0] * near and np.isfinite((at := search.under(limit)).weight):
            seen.append(at)
            limit = _STEPS[1] * min(limit, at.load)
        self.best = min(self.best, *(each.seconds for each in seen))
        for each in seen:
            yield from each.found

    def _all_interleaved(self, name, choices) -> Iterator[PipelineChoice]:
        """With two parts of every stage, on as many replicas as stages of others have or on
        equally many."""
        ways = {(each.replicas, each.microbatches): None for each in choices}
        for micros in self.allowed.microbatches:
            for r in self.allowed.replicas_of(1):
                ways[(r,) * min(self.allowed.stages, self.allowed.ranks // r), micros] = None
        for replicas, micros in ways:
            parts = 2 * len(replicas)
            if not 2 < parts <= min(2 * micros, len(self.places) - 1):
                continue
            if micros not in self.balance:
                self.balance[micros] = _OfWay(self, DEFAULT, micros, None).kinds
            if {*replicas} <= self.balance[micros].keys():
                yield from self._interleaved(name, replicas, micros)

    def _interleaved(self, name, replicas, micros) -> Iterator[PipelineChoice]:
        """The heaviest part is as light as can be; what has no room is run again.  Nothing, if
        the heaviest stage alone takes longer than what comes near the best."""
        heavy = [np.triu(self.balance[micros][r].load, 1) for r in replicas * 2]
        ends, again = _balanced(heavy), self.allowed.recompute[0]
        loads = np.array([load[cut] for load, cut in zip(heavy, pairwise((0, *ends)))])
        alone = self.allowed.schedules == (name,)
        if not alone and micros * loads.reshape(2, -1).sum(0).max() > _NEAR_BEST * self.best:
            return
        stages = [
            StageChoice(int(self.places[end]), r, again) for end, r in zip(ends, replicas * 2)
        ]
        choice = PipelineChoice(tuple(stages), micros, name, 2, self.allowed.zero)
        yield self._with_room(choice) if True in self.allowed.recompute else choice

    def _with_room(self, choice):
        """Parts of stages that are too full are run again, one after the other."""
        for part, stage in enumerate(choice.stages):
            if bytes_held(self.costs, choice)[part % choice.width] > self.allowed.memory:
                stages = [*choice.stages]
                stages[part] = stage._replace(recompute=True)
                choice = choice._replace(stages=tuple(stages))
        return choice

    def of(self, rows: int) -> Ranges:
        if rows not in self.ranges:
            self.ranges[rows] = Ranges(self.costs, rows, self.places)
        return self.ranges[rows]


def _balanced(loads):
    """The places behind parts whose loads are these by two places, the heaviest least."""
    heaviest, following = np.full(len(loads[0]), inf), []
    heaviest[-1] = 0.0
    for load in reversed(loads):
        ways = np.maximum(np.where(load > 0, load, inf), heaviest[None])
        following.append(ways.argmin(1))
        heaviest = ways.min(1)
    ends = [0]
    for after in reversed(following):
        ends.append(after[ends[-1]])
    return ends[1:]


def _flight_choices(schedule, micros, stages):
    """Of 1F1B by stage; all of GPipe; of a split backward pass equally many on every stage, by the
    number of stages, of which some are tried."""
    if schedule.keeps_all:
        return [micros]
    if not schedule.late_weights:
        return [None]
    some = {min(stages, 2**power) for power in range(1, stages.bit_length() + 1)}
    return sorted(schedule.late_weights * (width - 1) + 1 for width in some)


class _Under(NamedTuple):
    """What there is under a limit: the least seconds, their sum and heaviest stage, and those
    arrangements that come next."""

    seconds: float
    weight: float
    load: float
    found: list[Estimated]


class _OfWay:
    """The search for a schedule, a number of microbatches and of those in flight."""

    def __init__(self, search, name, micros, flight):
        self.search, self.allowed = search, search.allowed
        self.name, self.micros, self.flight = name, micros, flight
        self.schedule = find(name)
        self.width = min(self.allowed.stages, len(search.places) - 1)
        if flight and self.schedule.late_weights:
            self.width = min(self.width, (flight - 1) // self.schedule.late_weights + 1)
        elif flight and not self.schedule.keeps_all:
            self.width = min(self.width, flight)
        self.kinds = {r: self._stages(r) for r in self._replicas()}
        self.costs = {}
        each = [kind.replicas * np.diag(kind.load, 1) for kind in self.kinds.values()]
        self.least = np.min(each, 0).sum() / self.allowed.ranks if each else inf

    def _replicas(self):
        """Without those that leave as many rows to the fullest rank as fewer would."""
        rows = self.search.costs.rows(self.micros, 1)
        wanted = {r for left in range(1, self.width + 1) for r in self.allowed.replicas_of(left)}
        for r in sorted(each for each in wanted if each <= rows):
            fewer = r - self.allowed.unit
            if self.allowed.replicas or not fewer or -(-rows // r) < -(-rows // fewer):
                yield r

    def _stages(self, replicas):
        costs, micros = self.search.costs, self.micros
        rows = costs.rows(micros, replicas)
        part = self.search.of(rows)
        border = np.array([self.search.border.seconds(nbytes) for nbytes in part.crossing])
        sums = sums_of(costs, replicas)
        sums = (part.trained > 0) * sums.latency + part.trained / sums.bandwidth
        sums += costs.run.update * part.trained / (replicas if self.allowed.zero else 1)
        work = part.forward + part.backward + sums / micros
        messages = border[:, None] + border[None]
        load = work + (0.0 if self.schedule.keeps_all else messages)
        # A W comes after the gradient that others wait for, and those of others fill the wait.
        late = 1 + self.schedule.late_weights if self.schedule.splits_backward else 0
        weight = work + messages - late * part.weight
        always = part.fixed + micros * rows * part.fed + part.working
        if self.allowed.zero:
            always = always - MOMENTS * part.trained * (1 - 1 / replicas)
        received = np.broadcast_to(part.crossing[:, None], always.shape)
        sent = np.broadcast_to(part.crossing[None], always.shape)
        return _StageKind(replicas, load, weight, part.forward, always, received, part.saved, sent)

    def _table(self, left, replicas):
        """The costs of a stage that has `left` from itself on."""
        flight = min(self.micros, self.flight or left)
        key = flight, replicas
        if key not in self.costs:
            sending = flight < self.micros
            load, weight, again = self.kinds[replicas].costs(flight, sending, self.allowed)
            weight[np.tril_indices(len(weight))] = inf
            self.costs[key] = load, weight, again
        return self.costs[key]

    def under(self, limit: float) -> _Under:
        """The arrangements whose stages take no longer."""
        sums = self._sums(limit)
        start = [each[0, -1] for each in sums]
        fewest = 2 if self.name != DEFAULT else 1
        if len(self.allowed.replicas or ()) > 1:
            fewest = self.allowed.stages
        lefts = [left for left in range(fewest, self.width + 1) if np.isfinite(start[left])]
        if not lefts:
            return _Under(inf, inf, inf, [])
        found = []
        for left in sorted(lefts, key=lambda left: (start[left], left))[:_FEW]:
            choice, load = self._traced(sums, limit, left)
            found.append((Estimated((self.micros - 1) * load + start[left], choice), load))
        best, load = min(found, key=lambda each: each[0].seconds)
        return _Under(best.seconds, min(start), load, [each for each, _ in found])

    def _sums(self, limit):
        """G by the number of stages: [places, units of ranks left]."""
        shape = len(self.search.places), self._units() + 1
        sums = [np.full(shape, inf)]
        sums[0][-1] = 0.0
        for left in range(1, self.width + 1):
            here = np.full(shape, inf)
            for r in self._of(left):
                weight = self._limited(left, r, limit)
                units = self.allowed.units(r)
                rest = sums[-1][:, : shape[1] - units]
                best = (weight[:, :, None] + rest[None]).min(1)
                np.minimum(here[:, units:], best, out=here[:, units:])
            sums.append(here)
        return sums

    def _units(self):
        return self.width if self.allowed.replicas else self.allowed.units(self.allowed.ranks)

    def _of(self, left):
        return [r for r in self.allowed.replicas_of(left) if r in self.kinds]

    def _limited(self, left, replicas, limit):
        load, weight, _ = self._table(left, replicas)
        return np.where(load <= limit, weight, inf)

    def _traced(self, sums, limit, stages):
        """The arrangement behind a sum, and the load of its heaviest stage."""
        place, units, chosen, loads = 0, self._units(), [], []
        for left in range(stages, 0, -1):
            ways = {
                r: self._limited(left, r, limit)[place]
                + sums[left - 1][:, units - self.allowed.units(r)]
                for r in self._of(left)
                if self.allowed.units(r) <= units
            }
            r = min(ways, key=lambda each: ways[each].min())
            end = int(ways[r].argmin())
            load, _, again = self._table(left, r)
            loads.append(load[place, end])
            chosen.append(StageChoice(int(self.search.places[end]), r, bool(again[place, end])))
            place, units = end, units - self.allowed.units(r)
        name = self.name if stages > 1 else DEFAULT
        choice = PipelineChoice(tuple(chosen), self.micros, name, 1, self.allowed.zero)
        return choice, max(loads)


class Timed(NamedTuple):
    """A step: its seconds, the schedule, the downsets behind the stages, the microbatches in
    flight of each, and whether it is `proven` that no step is shorter."""

    seconds: float
    schedule: str
    ends: tuple[int, ...]
    in_flight: tuple[int, ...]
    proven: bool = False


def timed(cuts: Downsets | Chain, limits: Limits, schedule: str, ends: list[int]) -> Timed | None:
    """The step of a partition; None if a stage does not fit."""
    search = _DownsetSearch(cuts, limits, schedule if ends[1:] else ONE_STAGE, len(ends))
    return search.step(tuple(ends)) if search.fits(ends) else None


def quickest(
    cuts: Downsets | Chain, limits: Limits, schedules: tuple[str, ...], passes: int | None = None
) -> Timed | None:
    """The shortest step of all numbers of stages and `schedules`, as far as so many `passes` go
    (None: SEARCH_BUDGET); None if nothing fits."""
    most = range(min(limits.ranks, cuts.count - 1), 0, -1)  # more are mostly faster
    kinds = [(name if stages > 1 else ONE_STAGE, stages) for stages in most for name in schedules]
    kinds = [*dict.fromkeys(kinds)]
    tables = {
        flights: table(cuts, limits._replace(bandwidth=None, latency=0.0, all_in_flight=flights))
        for flights in {find(name).keeps_all for name, _ in kinds}
    }
    best, left, proven = None, passes or SEARCH_BUDGET, cuts.exact
    for number, (name, stages) in enumerate(kinds):
        if best and left <= 0:
            return best
        search = _DownsetSearch(cuts, limits, name, stages)
        share = left // (len(kinds) - number)
        search.run(*tables[find(name).keeps_all], share)
        left -= share - search.left
        proven &= search.left > 0
        found = [each for each in (best, search.best) if each]
        best = min(found, key=lambda each: (each.seconds, len(each.ends)), default=None)
    return best and best._replace(proven=proven)


class _DownsetSearch:
    """The search for a schedule and a number of stages."""

    def __init__(self, cuts, limits, name, stages):
        self.cuts, self.limits, self.name, self.stages = cuts, limits, name, stages
        self.micros = limits.microbatches
        self.model = StepModel(name, stages, self.micros, 1)
        self.in_flight = self.model.most_in_flight
        self.rest, self.left, self.best = None, 0, None

    def run(self, following, rest, passes):
        """Find the best, with a `table`."""
        self.rest, self.left = rest, passes
        if np.isfinite(rest[0, self.stages]):
            self._try_out(tuple(path(following, self.stages)))
            self.extend((), 0)

    def extend(self, ends, before):
        """Go through all ways to go on behind the stages that end at `ends`."""
        here, behind = len(ends), self.stages - len(ends) - 1
        if behind == 0:
            self._try_out((*ends, self.cuts.count - 1))
            return
        self.left -= _LOOK
        after = self.cuts.after(before)[:-1]
        bound = self.least(before, after, here, behind)
        for place in np.argsort(bound, kind="stable"):
            if self.left <= 0 or (self.best and bound[place] >= self.best.seconds):
                return
            if np.isfinite(bound[place]):
                self.extend((*ends, int(after[place])), int(after[place]))

    def least(self, before, after, here, behind):
        """The seconds of a step at least if the next stage ends at one of `after`; inf where it
        does not fit, or leaves too little for the others."""
        cuts, micros = self.cuts, self.micros
        forward = cuts.forward[after] - cuts.forward[before]
        backward = cuts.backward[after] - cuts.backward[before]
        reached = cuts.forward[before] + cuts.backward[before]
        works = reached + micros * (forward + backward)
        whole = cuts.forward[-1] + cuts.backward[-1]
        after_first = whole + (micros - 1) * backward + (micros - self.in_flight[here]) * forward
        others = reached + forward + backward + micros * self.rest[after, behind]
        bound = np.maximum(np.maximum(works, after_first), others)
        bound[self.held(before, after, here) > self.room] = np.inf
        return bound

    @property
    def room(self):
        return np.inf if self.limits.memory is None else self.limits.memory

    def held(self, before, after, stage):
        """Bytes of the stage between two downsets."""
        saved = self.cuts.saved[after] - self.cuts.saved[before]
        if self.limits.keeps_received:
            saved = saved + self.cuts.crossing[before]
        return self.cuts.fixed(before, after) + self.in_flight[stage] * saved

    def fits(self, ends):
        """Whether every stage does."""
        cuts = enumerate(zip((0, *ends[:-1]), ends, strict=True))
        return all(self.held(*cut, stage) <= self.room for stage, cut in cuts)

    def _try_out(self, ends):
        """Run the step of a partition that fits, and keep it if it is the shortest."""
        if not self.fits(ends):
            return
        self.left -= 2 * self.stages * self.micros
        found = self.step(ends)
        if not self.best or found.seconds < self.best.seconds:
            self.best = found

    def step(self, ends):
        """The Timed of a partition."""
        done = self.model.ends(_stage_costs(self.cuts, ends, self.limits))
        if self.limits.sums:
            parameters = map(self.cuts.trained, (0, *ends[:-1]), ends)
            sums = map(self.limits.sums.seconds, parameters)
            done = [end + each for end, each in zip(done, sums, strict=True)]
        return Timed(float(max(done)), self.name, ends, tuple(self.in_flight))


def _stage_costs(cuts: Downsets | Chain, ends: tuple[int, ...], limits: Limits) -> list[Cost]:
    """The stages on the clock: what they compute, and messages of all values that are needed
    behind a border, those for a later stage too, for they are handed on."""
    found = []
    for before, after in zip((0, *ends[:-1]), ends):
        forward = cuts.forward[after] - cuts.forward[before]
        backward = cuts.backward[after] - cuts.backward[before]
        found.append(Cost(forward, backward, 0.0, limits.seconds(cuts.crossing[after])))
    return found


def lightest(cuts: Downsets | Chain, limits: Limits) -> list[int] | None:
    """The downsets behind the stages of the partition into at most `limits.ranks` with the least
    load of the heaviest stage, and of those one with few; None if none fits the memory."""
    following, load = table(cuts, limits)
    least = load[0].min()
    return None if np.isinf(least) else path(following, int((load[0] <= least).argmax()))


def path(following: np.ndarray, stages: int) -> list[int]:
    """The downsets behind so many stages, from the first on, by a `table`."""
    at, ends = 0, []
    for left in range(stages, 0, -1):
        at = int(following[at, left])
        ends.append(at)
    return ends


def table(cuts: Downsets | Chain, limits: Limits) -> tuple[np.ndarray, np.ndarray]:
    """By downset and number of stages behind it: the next downset of the optimum, and T."""
    width = min(limits.ranks, cuts.count - 1) + 1
    load = np.full((cuts.count, width), np.inf)
    following = np.full((cuts.count, width), -1, np.int32)
    load[-1, 0] = 0.0
    seconds = cuts.forward + cuts.backward
    in_flight = np.minimum(np.arange(1, width), limits.microbatches)
    if limits.all_in_flight:
        in_flight = np.full(width - 1, limits.microbatches)
    for before in range(cuts.count - 2, -1, -1):
        after = cuts.after(before)
        stage = seconds[after] - seconds[before] + limits.seconds(cuts.moved(before, after))
        candidates = np.maximum(load[after, :-1], stage[:, None])
        if limits.memory is not None:
            received = cuts.crossing[before] if limits.keeps_received else 0.0
            saved = (cuts.saved[after] - cuts.saved[before] + received)[:, None] * in_flight
            fixed = cuts.fixed(before, after)[:, None]
            candidates[fixed + saved > limits.memory] = np.inf
        chosen = candidates.argmin(0)
        load[before, 1:] = candidates[chosen, np.arange(width - 1)]
        following[before, 1:] = after[chosen]
    return following, load
