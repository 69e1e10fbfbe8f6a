"""The search for the layout with the shortest step, among those that fit the memory.

All sizes have a lower bound (bounds.py); in its order they are timed by estimates
(estimate.py), with the schedule, microbatches, ZeRO and recomputation that suit them,
until no bound is below the best ones that were found.  The best few then may have uneven layers
(adaptation.py).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from itertools import zip_longest
from math import inf
from typing import TYPE_CHECKING, NamedTuple

from hpc3d.plain import counted
from hpc3d.predict.planning import layouts
from hpc3d.predict.planning.adaptation import uneven
from hpc3d.predict.planning.bounds import Bounds, Candidate, shortlists
from hpc3d.predict.planning.candidates import (
    NEAR,
    SURE,
    Candidates,
    TimedCandidate,
    seconds_of,
)
from hpc3d.predict.planning.estimate import Estimator

if TYPE_CHECKING:
    from hpc3d.config.input_file import Config
    from hpc3d.predict.machine.machine import Machine
    from hpc3d.predict.planning.adaptation import Offer
    from hpc3d.predict.planning.estimate import Estimate

log = logging.getLogger(__name__)
_FEW = 16  # ranks whose layouts are all looked at
_REACH = 1.4  # times the fastest candidate: what others may gain by being looked into
_COARSE = 2 / 3  # of what is measured tells how good sizes are, the rest what they do best


class Found(NamedTuple):
    """What a search found: `timed` candidates, fastest first and those that do not fit last;
    candidates that were `cut`, since the least they take is too long, and `left` since enough was
    measured; and how many layouts there are."""

    timed: list
    cut: list
    left: list
    considered: int

    def widen(
        self,
        candidates: Sequence[Candidate],
        time: Callable[[Candidate], TimedCandidate],
    ) -> None:
        """Add what `time` makes of those candidates that are not timed yet."""
        new = [
            candidate
            for candidate in candidates
            if all(candidate is not each.candidate for each in self.timed)
        ]
        self.timed.extend(map(time, new))
        self.sort()
        for others in (self.cut, self.left):
            others[:] = [
                candidate for candidate in others if all(candidate is not each for each in new)
            ]

    def sort(self) -> None:
        self.timed.sort(key=lambda each: (not each.fits, each.best.seconds))


class Search:
    """Layouts of `config` on so many ranks of a machine, with `memory` bytes each."""

    def __init__(
        self, config: Config, ranks: int, vocabulary: int, machine: Machine, memory: float
    ) -> None:
        self.base, self.ranks, self.memory = layouts.bare(config), ranks, memory
        self.estimator = Estimator(vocabulary, machine)
        self.bounds = Bounds(self.base, ranks, vocabulary, machine)
        self.candidates = Candidates(self.estimator, ranks, memory)
        self.allowed = 0  # how many candidates there are

    def run(self, top: int, most: int) -> Found:
        """The Found of all layouts; no more than `most` costs are measured for it.

        The candidate with the shortest words of each p, d and c is timed, then others where it was
        quick, then the rest; at last the best are looked into.
        Raises ValueError, with one line that says what to change, if the rules allow no layout.
        """
        candidates = []
        for candidate in self.allowed_candidates():
            candidates.append(candidate)
            p, last = candidate.config.mesh.p, min(self.ranks, self.base.model.layers)
            log.info("%d sizes of a mesh, so far with p = %d of %d", len(candidates), p, last)
        if not candidates:
            raise ValueError(self._refusal())
        self.allowed = len(candidates)
        self.calibrate(candidates)
        groups, others = shortlists(candidates)
        groups.sort(key=lambda group: self.bounds.least(group[0]))
        found = Found([], [], [], sum(map(self.variants, candidates)))
        times = [self._consider(group[0], found, top, _COARSE * most) for group in groups]
        rest = [(time, candidate) for time, group in zip(times, groups) for candidate in group[1:]]
        rest.sort(key=lambda each: (each[0], self.bounds.least(each[1])))
        for candidate in [
            *(candidate for _, candidate in rest),
            *sorted(others, key=self.bounds.least),
        ]:
            self._consider(candidate, found, top, _COARSE * most)
        found.sort()
        self._refine(found, most)
        self._add(found, [*uneven(self.candidates, found.timed)])
        return found

    def _add(self, found: Found, offers: Sequence[Offer]) -> None:
        """Add offers to the candidates that they are of."""
        for number, estimate in offers:
            candidate, known, *_ = found.timed[number]
            found.timed[number] = self._offered(candidate, [*known, estimate])
        found.sort()

    def _refine(self, found: Found, most: int) -> None:
        """Look for more in the candidates that may be among the best by it, in turn, as far as
        `most` costs go."""

        def limit():
            return _REACH * self.limit(found.timed, 1)

        near = [each.best for each in found.timed if each.fits and each.best.seconds < limit()]
        turns = zip_longest(*(self.candidates.every(best, limit) for best in near))
        for count, turn in enumerate(turns, 1):
            log.info("looking for more in the best %d sizes, turn %d", len(near), count)
            for number, more in enumerate(turn):
                candidate, offers, *_ = found.timed[number]
                found.timed[number] = self._offered(candidate, [*offers, *(more or ())])
            if self._spent(most):
                break
        found.sort()

    def _spent(self, most: int) -> bool:
        return self.estimator.costs >= most

    def _consider(self, candidate: Candidate, found: Found, top: int, most: float) -> float:
        """Time a candidate, if it may be among the best; the seconds of its step, if it fits."""
        if self.bounds.least(candidate) > self.limit(found.timed, top):
            found.cut.append(candidate)
        elif self._spent(most) and found.timed:
            found.left.append(candidate)
        else:
            counts = len(found.timed), len(found.cut), self.allowed
            log.info("%d sizes of a mesh timed, %d cut, of %d", *counts)
            found.timed.append(self.timed(candidate))
            return found.timed[-1].best.seconds if found.timed[-1].fits else inf
        return inf

    def calibrate(self, candidates: Sequence[Candidate]) -> None:
        """Tell the bounds what a layout computes that computes least beside its words."""
        config = min(candidates, key=lambda candidate: sum(candidate.moves.values())).config
        fixed = self.estimator.world(config).seconds
        self.bounds.calibrate(config, self.estimator.parts(config), fixed)

    def limit(self, timed: Sequence[TimedCandidate], top: int) -> float:
        """Seconds that a candidate must stay below to be among the best."""
        seconds = sorted(each.sure for each in timed)
        return seconds[top - 1] if len(seconds) >= top else inf

    def allowed_candidates(self) -> Iterator[Candidate]:
        """The layouts that the rules allow, with their bounds; of those that differ in how they
        cut sequences the one that waits least for it, unless there are few ranks."""
        for configs in layouts.every_mesh(self.base, self.ranks, self.memory):
            found = sorted(map(self.bounds.candidate, configs), key=self.bounds.shown_context)
            yield from found if self.ranks <= _FEW else found[:1]

    def _refusal(self) -> str:
        """Why there is no layout: what is wrong with the first one."""
        model, train = self.base.model, self.base.train
        mesh = next(layouts.meshes(self.ranks, model.layers, train.batch))
        problem, *_ = layouts.problems(layouts.with_mesh(self.base, *mesh), self.ranks)
        ranks = counted(self.ranks, "rank")
        return f"no layout of {ranks} divides this model; the first one: {problem}"

    def variants(self, candidate: Candidate) -> int:
        """How many layouts have the sizes of a candidate."""
        config, layers = candidate.config, self.base.model.layers
        counts = layouts.microbatches(config, self.ranks)
        ways = sum(len(layouts.schedules(config.mesh.p, micros, layers)) for micros in counts)
        orders = layouts.orders(config) if self.bounds.placed else 1
        zeros = sum(map(len, layouts.zeros(config, self.ranks)))
        return ways * len(self.candidates.ways(config)) * zeros * orders

    def timed(self, candidate: Candidate) -> TimedCandidate:
        """The TimedCandidate of a candidate, as far as it takes to compare it with others."""
        return self._offered(candidate, self.candidates.promising(candidate.config))

    def _offered(self, candidate: Candidate, found: Sequence[Estimate]) -> TimedCandidate:
        """The TimedCandidate of a candidate with these estimates."""
        near = {each.config: each for each in found if self.candidates.fits(each, 1 + NEAR)}
        if not near:
            return TimedCandidate(candidate, [min(found, key=lambda each: each.peak)], False, inf)
        offers = sorted(near.values(), key=seconds_of)
        sure = (each.seconds for each in offers if self.candidates.fits(each, SURE))
        return TimedCandidate(candidate, offers, True, next(sure, inf))
