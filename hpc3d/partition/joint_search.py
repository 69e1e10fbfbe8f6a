"""Search for candidate pipeline arrangements of a module.

The search jointly chooses the stage boundaries, the replicas and recomputation of every stage, the
number of stages and the number of microbatches. A step with m microbatches takes about

    (m - 1) T + sum_s w_s

where w_s is the forward and backward time of a microbatch on stage s, including its messages and
1/m of the gradient all-reduce and the update, and T = max_s w_s. For an upper limit on T, dynamic
programming finds the exact minimum of the sum, from the last stage to the first. The state is the
index i of the first atom of the stage, the number s of stages from this stage to the last one
(under 1F1B, also the number of microbatches in flight), and the number d of ranks for these
stages. The stage ends at j and has r replicas:

    G[s, i, d] = min over j, r of w(i, j, r) + G[s-1, j, d-r]
                 if w(i, j, r) <= T and the stage fits in memory

The limit is lowered until no arrangement satisfies it. To limit the work, only a few cuts of the
chain of atoms are candidates; hpc3d.partition.improvement refines the result.

If each stage has one rank, `fastest` performs an exact branch-and-bound search over chains of
downsets, from the first stage to the last, and simulates the steps. Let M be the number of
microbatches, f_s and b_s the forward and backward times of stage s, and n_s the number of
microbatches in flight on stage s. Lower bounds on the step time are

    sum_{i<s} (f_i + b_i) + M (f_s + b_s)               earlier stages once, and all passes of s
    sum_i f_i + sum_{i!=s} b_i + M b_s + (M - n_s) f_s  work left after the first gradient of s
    sum_{i<s} (f_i + b_i) + M T                         T: load of the heaviest remaining stage

`lightest` minimizes the load of the heaviest stage ("max-load" in Tarnawski et al. 2020,
arXiv:2006.16423). If the atoms outside a downset I are partitioned into r stages, the minimum is

    T[I, r] = min over J > I of max(T[J, r - 1], load(J - I))

Both searches are exact if they cover all downsets. Searching only a chain of sorted atoms is
faster, but not exact.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from math import inf
from typing import NamedTuple

import numpy as np

from hpc3d.partition.coarse_chain import Ranges, border_of, positions_of, sums_of
from hpc3d.partition.downsets import Chain, Downsets
from hpc3d.partition.evaluation import (
    Limits,
    ModelCosts,
    PipelineChoice,
    StageChoice,
    bytes_held,
)
from hpc3d.pipeline.schedule import DEFAULT, ONE_STAGE, find
from hpc3d.pipeline.step_model import StepModel, reduced
from hpc3d.pipeline.timeline import Cost

SEARCH_BUDGET = 1_000_000  # maximum number of passes simulated by a call of `fastest`
_LOOK = 32  # cost of expanding one branch, in units of one simulated pass
_BLOCKS = 48  # number of segments into which the candidate cuts divide the chain of atoms
_MOST_UNITS = 63  # maximum number of units into which the ranks are grouped
_STEPS = (0.8, 0.97)  # ratios of successive load limits in the coarse and in the fine search
_NEAR_BEST = 2.0  # candidates with estimates within this factor of the best are simulated
# Maximum number of partitions to keep for each limit on the stage load, with at most one partition
# for each number of stages.
_FEW = 6


class Allowed(NamedTuple):
    """Search space of arrangements.

    `ranks` is the number of ranks, and `memory` the usable memory per rank in bytes.
    `microbatches`, `schedules` and `recompute` list the allowed values; stages must recompute if
    `recompute` contains only True. `replicas` is `None` if any number is allowed; otherwise, it
    has one number for all stages, or one number per stage. If `zero` is 1, replicas shard the
    optimizer moments.
    """

    ranks: int
    memory: float
    microbatches: tuple[int, ...]
    schedules: tuple[str, ...]
    replicas: tuple[int, ...] | None = None
    recompute: tuple[bool, ...] = (False, True)
    zero: int = 0

    @property
    def stages(self) -> int:
        """Maximum number of stages."""
        if self.replicas is None:
            return self.ranks // self.unit
        return len(self.replicas) if self.replicas[1:] else self.ranks // self.replicas[0]

    @property
    def unit(self) -> int:
        """Number of ranks per unit; all tried replica counts are multiples of this number."""
        return max(1, 2 ** (self.ranks.bit_length() - _MOST_UNITS.bit_length()))

    def units(self, replicas: int) -> int:
        """Return the number of units used by a stage with `replicas` replicas.

        A unit is a group of `unit` ranks or, if the field `replicas` is not `None`, an entire
        stage.
        """
        return 1 if self.replicas else replicas // self.unit

    def replicas_of(self, left: int) -> tuple[int, ...]:
        """Return the allowed replica counts of a stage followed by `left` - 1 further stages."""
        if self.replicas is None:
            return tuple(range(self.unit, self.ranks + 1, self.unit))
        return self.replicas[-left:][:1] if self.replicas[1:] else self.replicas


class Estimated(NamedTuple):
    """Arrangement and its estimated step time in seconds."""

    seconds: float
    choice: PipelineChoice


class _StageKind(NamedTuple):
    """Costs of all stages with `replicas` replicas, as arrays indexed [first cut, last cut].

    `load` is the stage load, on which the search sets an upper limit. `weight` is the stage's term
    w_s in the sum over the stages that the search minimizes. Both are in seconds without
    recomputation; `again` is the recomputation time. Sizes are in bytes: `always` is resident,
    `received` and `saved` are stored for each microbatch in flight, and `made` is the additional
    memory for recomputation.
    """

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
        """Return three arrays: the load and the weight of each stage, and whether it recomputes.

        `flight` is the number of microbatches in flight. If `sending` is True, memory use includes
        a gradient that is being sent. The weight of a stage that does not fit in memory is inf.
        """
        least = self.always + (flight + sending) * self.received + self.saved
        keeps = least + (flight - 1) * self.saved <= allowed.memory
        again = least + self.made <= allowed.memory
        keeps &= False in allowed.recompute
        again &= True in allowed.recompute
        weight = np.where(keeps, self.weight, np.where(again, self.weight + self.again, inf))
        return self.load + np.where(keeps, 0.0, self.again), weight, ~keeps


class JointSearch:
    """Search for arrangements of a model whose stages end at candidate cuts of a chain of atoms.

    The candidate cuts are `positions` (None: the cuts selected by `positions_of`).
    """

    def __init__(
        self, costs: ModelCosts, allowed: Allowed, positions: np.ndarray | None = None
    ) -> None:
        self.costs, self.allowed = costs, allowed
        blocks = max(_BLOCKS, len(allowed.replicas or ()))
        self.positions = (
            positions_of(costs, allowed.ranks, blocks) if positions is None else positions
        )
        self.border = border_of(costs, allowed.ranks)
        self.ranges = cache(lambda rows: Ranges(costs, rows, self.positions))
        self.balance: dict[int, dict[int, _StageKind]] = {}
        self.best = inf

    def found(self) -> list[PipelineChoice]:
        """Return the best arrangements that fit in memory, sorted by estimated step time.

        The estimate of each arrangement is within a factor _NEAR_BEST of the best estimate.
        """
        found = [each for way in self._ways() for each in self._of_way(*way)]
        near = [each for each in found if each.seconds <= _NEAR_BEST * self.best]
        near.sort(key=lambda each: each.seconds)
        return self._that_fit(each.choice for each in near)

    def fits(self) -> bool:
        """Return True if any arrangement fits in memory."""
        for way in self._ways():
            found = _OfWay(self, *way).under(inf).found
            if self._that_fit(each.choice for each in found):
                return True
        return False

    def _ways(self):
        """Yield (schedule, number of microbatches, number of microbatches in flight per stage).

        Under 1F1B, the last item is `None`, because the number in flight differs between stages.
        Schedules with several chunks are derived from arrangements with the default schedule.
        """
        names = [name if find(name).chunks else DEFAULT for name in self.allowed.schedules]
        for micros in self.allowed.microbatches:
            if DEFAULT not in names:
                yield DEFAULT, micros, 1  # for a single stage, which needs no schedule
            for name in dict.fromkeys(names):
                for flight in _flight_choices(find(name), micros, self.allowed.stages):
                    yield name, micros, flight

    def _that_fit(self, choices):
        wanted = self.allowed.schedules
        found = [*dict.fromkeys(choices)]
        for name in wanted:
            if not find(name).chunks:
                found += dict.fromkeys(self._with_model_chunks(name, found))
        return [
            each
            for each in found
            if (each.schedule in wanted or len(each.stages) == 1)
            and max(bytes_held(self.costs, each)) <= self.allowed.memory
        ]

    def _of_way(self, name, micros, flight) -> Iterator[Estimated]:
        """Yield the best arrangements for decreasing load limits, then for a fine grid of limits.

        The fine grid is around the largest stage load of the arrangement with the shortest
        estimated step.
        """
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

    def _with_model_chunks(self, name, choices) -> Iterator[PipelineChoice]:
        """Yield arrangements with two model chunks per stage.

        The replica counts of the stages are taken from `choices`. In addition, each allowed count
        is tried for all stages together.
        """
        ways = {(each.replicas, each.microbatches): None for each in choices}
        for micros in self.allowed.microbatches:
            for r in self.allowed.replicas_of(1):
                ways[(r,) * min(self.allowed.stages, self.allowed.ranks // r), micros] = None
        for replicas, micros in ways:
            parts = 2 * len(replicas)
            if not 2 < parts <= min(2 * micros, len(self.positions) - 1):
                continue
            if micros not in self.balance:
                self.balance[micros] = _OfWay(self, DEFAULT, micros, None).kinds
            if {*replicas} <= self.balance[micros].keys():
                yield from self._chunked(name, replicas, micros)

    def _chunked(self, name, replicas, micros) -> Iterator[PipelineChoice]:
        """Yield the interleaved arrangement that minimizes the load of the heaviest chunk.

        Chunks recompute their activations if the stage would not fit in memory otherwise. If other
        schedules are allowed and the heaviest stage is too slow for a near-optimal step time, no
        arrangement is yielded.
        """
        heavy = [np.triu(self.balance[micros][r].load, 1) for r in replicas * 2]
        ends, again = _balanced(heavy), self.allowed.recompute[0]
        loads = np.array([load[cut] for load, cut in zip(heavy, pairwise((0, *ends)))])
        alone = self.allowed.schedules == (name,)
        if not alone and micros * loads.reshape(2, -1).sum(0).max() > _NEAR_BEST * self.best:
            return
        stages = [
            StageChoice(int(self.positions[end]), r, again) for end, r in zip(ends, replicas * 2)
        ]
        choice = PipelineChoice(tuple(stages), micros, name, 2, self.allowed.zero)
        yield self._with_room(choice) if True in self.allowed.recompute else choice

    def _with_room(self, choice):
        """Enable recomputation chunk by chunk until every stage fits in memory."""
        for part in range(len(choice.stages)):
            if bytes_held(self.costs, choice)[part % choice.width] > self.allowed.memory:
                choice = choice.changed(part, recompute=True)
        return choice


def _balanced(loads):
    """Return the ends of the model chunks that minimize the largest chunk load.

    `loads` contains one array per chunk, indexed [first cut, last cut].
    """
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
    """Return the candidate numbers of microbatches in flight.

    Under GPipe, all microbatches are in flight. Under 1F1B, the only candidate is `None`, because
    the number decreases from stage to stage. Under schedules that defer weight gradients, all
    stages have the same number, which depends on the number of stages. Candidates are
    returned for `stages` stages and for all smaller powers of two.
    """
    if schedule.keeps_all:
        return [micros]
    if not schedule.late_weights:
        return [None]
    some = {min(stages, 2**power) for power in range(1, stages.bit_length() + 1)}
    return sorted(schedule.late_weights * (width - 1) + 1 for width in some)


class _Under(NamedTuple):
    """Result of a search with an upper limit on the stage load.

    `seconds` is the shortest estimated step time, `load` the largest stage load of the arrangement
    with this step time, and `weight` the minimum of the sum of stage weights over all numbers of
    stages. `found` contains the best arrangements.
    """

    seconds: float
    weight: float
    load: float
    found: list[Estimated]


class _OfWay:
    """Search with a fixed schedule, microbatch count, and number of microbatches in flight."""

    def __init__(self, search, name, micros, flight):
        self.search, self.allowed = search, search.allowed
        self.name, self.micros, self.flight = name, micros, flight
        self.schedule = find(name)
        self.width = min(self.allowed.stages, len(search.positions) - 1)
        if flight and self.schedule.late_weights:
            self.width = min(self.width, (flight - 1) // self.schedule.late_weights + 1)
        elif flight and not self.schedule.keeps_all:
            self.width = min(self.width, flight)
        self.kinds = {r: self._stages(r) for r in self._replicas()}
        self.costs = {}
        each = [kind.replicas * np.diag(kind.load, 1) for kind in self.kinds.values()]
        self.least = np.min(each, 0).sum() / self.allowed.ranks if each else inf

    def _replicas(self):
        """Yield the replica counts to try.

        Unless the user fixes the replica counts, a count is skipped if a smaller one gives the
        same maximum number of samples per rank.
        """
        rows = self.search.costs.rows(self.micros, 1)
        wanted = {r for left in range(1, self.width + 1) for r in self.allowed.replicas_of(left)}
        for r in sorted(each for each in wanted if each <= rows):
            fewer = r - self.allowed.unit
            if self.allowed.replicas or not fewer or -(-rows // r) < -(-rows // fewer):
                yield r

    def _stages(self, replicas):
        costs, micros = self.search.costs, self.micros
        rows = costs.rows(micros, replicas)
        part = self.search.ranges(rows)
        border = self.search.border.seconds(part.crossing)
        sums = sums_of(costs, replicas).seconds(part.trained)
        sums += costs.run.update * part.trained / (replicas if self.allowed.zero else 1)
        work = part.forward + part.backward + sums / micros
        messages = border[:, None] + border[None]
        load = work + (0.0 if self.schedule.keeps_all else messages)
        # Pass W (weight gradients) runs after the input gradient has been sent. Stages run
        # deferred W passes while they wait.
        late = 1 + self.schedule.late_weights if self.schedule.splits_backward else 0
        weight = work + messages - late * part.weight
        always = part.fixed + micros * rows * part.fed + part.working
        if self.allowed.zero:
            always = always - costs.states * part.trained * (1 - 1 / replicas)
        received = np.broadcast_to(part.crossing[:, None], always.shape)
        sent = np.broadcast_to(part.crossing[None], always.shape)
        return _StageKind(replicas, load, weight, part.forward, always, received, part.saved, sent)

    def _table(self, left, replicas):
        """Return the costs of a stage followed by `left` - 1 further stages.

        The costs are arrays indexed [first cut, last cut].
        """
        flight = min(self.micros, self.flight or left)
        key = flight, replicas
        if key not in self.costs:
            sending = flight < self.micros
            load, weight, again = self.kinds[replicas].costs(flight, sending, self.allowed)
            weight[np.tril_indices(len(weight))] = inf
            self.costs[key] = load, weight, again
        return self.costs[key]

    def under(self, limit: float) -> _Under:
        """Return the best arrangements in which no stage has a load above `limit`."""
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
        """Return the minima G of the dynamic program, which the module docstring defines.

        The list has one array for each number of stages, indexed [first cut, number of units].
        """
        shape = len(self.search.positions), self._units() + 1
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
        """Return the arrangement with the shortest estimated time, and its largest stage load."""
        index, units, chosen, loads = 0, self._units(), [], []
        for left in range(stages, 0, -1):
            ways = {
                r: self._limited(left, r, limit)[index]
                + sums[left - 1][:, units - self.allowed.units(r)]
                for r in self._of(left)
                if self.allowed.units(r) <= units
            }
            r = min(ways, key=lambda each: ways[each].min())
            end = int(ways[r].argmin())
            load, _, again = self._table(left, r)
            loads.append(load[index, end])
            chosen.append(StageChoice(int(self.search.positions[end]), r, bool(again[index, end])))
            index, units = end, units - self.allowed.units(r)
        name = self.name if stages > 1 else DEFAULT
        choice = PipelineChoice(tuple(chosen), self.micros, name, 1, self.allowed.zero)
        return choice, max(loads)


class Timed(NamedTuple):
    """Partition with its simulated step time.

    `seconds` is the step time, `ends` the index of the downset at the end of each stage, and
    `in_flight` the number of microbatches in flight on each stage. `proven` is True if the search
    has shown that no partition has a shorter step.
    """

    seconds: float
    schedule: str
    ends: tuple[int, ...]
    in_flight: tuple[int, ...]
    proven: bool = False


def timed(cuts: Downsets | Chain, limits: Limits, schedule: str, ends: list[int]) -> Timed | None:
    """Simulate the step of a partition; return `None` if a stage does not fit in memory."""
    search = _DownsetSearch(cuts, limits, schedule if ends[1:] else ONE_STAGE, len(ends))
    return search.step(tuple(ends)) if search.fits(ends) else None


def fastest(
    cuts: Downsets | Chain, limits: Limits, schedules: tuple[str, ...], passes: int | None = None
) -> Timed | None:
    """Return the partition with the shortest step over all numbers of stages and schedules.

    Returns `None` if no partition fits in memory. The search simulates at most about `passes`
    passes (None: SEARCH_BUDGET).
    """
    most = range(min(limits.ranks, cuts.count - 1), 0, -1)  # more stages are usually faster
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
    """Branch-and-bound search for one schedule and one number of stages."""

    def __init__(self, cuts, limits, name, stages):
        self.cuts, self.limits, self.name, self.stages = cuts, limits, name, stages
        self.micros = limits.microbatches
        self.model = StepModel(name, stages, self.micros, 1)
        self.in_flight = self.model.most_in_flight
        self.room = inf if limits.memory is None else limits.memory
        self.rest, self.left, self.best = None, 0, None

    def run(self, following, rest, passes):
        """Search for the fastest partition, starting with the one that has the smallest load."""
        self.rest, self.left = rest, passes
        if np.isfinite(rest[0, self.stages]):
            self._try_out(tuple(path(following, self.stages)))
            self.extend((), 0)

    def extend(self, ends, before):
        """Search all partitions whose first stages end at the downsets `ends`."""
        here, behind = len(ends), self.stages - len(ends) - 1
        if behind == 0:
            self._try_out((*ends, self.cuts.count - 1))
            return
        self.left -= _LOOK
        after = self.cuts.after(before)[:-1]
        bound = self.least(before, after, here, behind)
        for index in np.argsort(bound, kind="stable"):
            if self.left <= 0 or (self.best and bound[index] >= self.best.seconds):
                return
            if np.isfinite(bound[index]):
                self.extend((*ends, int(after[index])), int(after[index]))

    def least(self, before, after, here, behind):
        """Return a lower bound on the step time for each candidate end of the next stage.

        `after` lists the indices of the downsets at which the stage may end. A bound is inf if the
        stage does not fit in memory or leaves too few atoms for the remaining stages.
        """
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

    def held(self, before, after, stage):
        """Return the memory in bytes of the stage between two downsets."""
        saved = self.cuts.saved[after] - self.cuts.saved[before]
        if self.limits.keeps_received:
            saved = saved + self.cuts.crossing[before]
        return self.cuts.fixed(before, after) + self.in_flight[stage] * saved

    def fits(self, ends):
        cuts = enumerate(zip((0, *ends[:-1]), ends, strict=True))
        return all(self.held(*cut, stage) <= self.room for stage, cut in cuts)

    def _try_out(self, ends):
        if not self.fits(ends):
            return
        self.left -= 2 * self.stages * self.micros
        found = self.step(ends)
        if not self.best or found.seconds < self.best.seconds:
            self.best = found

    def step(self, ends):
        """Simulate the step of a partition.

        The message to the next stage also contains values that are read only by later stages.
        """
        cuts, costs = self.cuts, []
        for before, after in zip((0, *ends[:-1]), ends):
            forward = cuts.forward[after] - cuts.forward[before]
            backward = cuts.backward[after] - cuts.backward[before]
            costs.append(Cost(forward, backward, 0.0, self.limits.seconds(cuts.crossing[after])))
        done = self.model.ends(costs)
        if self.limits.sums:
            parameters = map(cuts.trained, (0, *ends[:-1]), ends)
            done = reduced(done, [*map(self.limits.sums.seconds, parameters)])
        return Timed(float(max(done)), self.name, ends, tuple(self.in_flight))


def lightest(cuts: Downsets | Chain, limits: Limits) -> list[int] | None:
    """Return the partition that minimizes the load of the heaviest stage.

    The partition is represented by the index of the downset at the end of each stage. It has at
    most `limits.ranks` stages; of equally good partitions, the one with the fewest stages is
    returned. The result is `None` if no partition fits in memory.
    """
    following, load = table(cuts, limits)
    least = load[0].min()
    return None if np.isinf(least) else path(following, int((load[0] <= least).argmax()))


def path(following: np.ndarray, stages: int) -> list[int]:
    """Return the downset index at the end of each stage of the optimal partition."""
    at, ends = 0, []
    for left in range(stages, 0, -1):
        at = int(following[at, left])
        ends.append(at)
    return ends


def table(cuts: Downsets | Chain, limits: Limits) -> tuple[np.ndarray, np.ndarray]:
    """Return the dynamic-programming table as two arrays [downset, number of remaining stages].

    The first array contains the index of the next downset of the optimal partition. The second
    array contains T, the smallest load of the heaviest stage that any partition achieves.
    """
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
