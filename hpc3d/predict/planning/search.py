"""Search for the layout with the shortest step among those that fit in memory.

bounds.py computes a lower bound on the step time of every mesh, and expected.py an approximate
step time that also accounts for the memory limit. The meshes are processed in the order of these
approximate times: estimate.py estimates the step time of each mesh with suitable schedules,
microbatches, ZeRO stages and recomputation. The search stops when the bounds of the remaining
meshes exceed the best step times, or when the budget is spent. Finally, adaptation.py tries uneven
layers for the best few layouts.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import chain, zip_longest
from math import inf
from typing import TYPE_CHECKING, NamedTuple

from hpc3d.console.sanitize import counted
from hpc3d.predict.planning import layouts
from hpc3d.predict.planning.adaptation import uneven
from hpc3d.predict.planning.bounds import Bounds, Candidate, shortlists
from hpc3d.predict.planning.candidates import NEAR, SURE, Candidates, TimedCandidate, seconds_of
from hpc3d.predict.planning.contexts import with_context
from hpc3d.predict.planning.estimate import Estimator
from hpc3d.predict.planning.expected import ExpectedSteps
from hpc3d.tensor.split import SCHEMES

if TYPE_CHECKING:
    from hpc3d.config.input_file import Config, MeshConfig
    from hpc3d.predict.machine.machine import Machine
    from hpc3d.predict.planning.adaptation import Offer
    from hpc3d.predict.planning.estimate import Estimate

log = logging.getLogger(__name__)
_FEW = 16  # maximum number of ranks for which all kinds of context parallelism are searched
_REACH = 1.4  # maximum ratio of a refined candidate's step time to the shortest step time
_COARSE = 2 / 3  # fraction of the measurement budget for comparing meshes, before refinement


class Found(NamedTuple):
    """Result of a search.

    `timed` lists the candidates whose step time was estimated, fastest first, followed by those
    that do not fit in memory. `cut` lists the candidates that were pruned because of their lower
    bound, and `left` those that were not estimated within the budget. `considered` is the number
    of layouts in the search space.
    """

    timed: list
    cut: list
    left: list
    considered: int

    def widen(
        self,
        candidates: Sequence[Candidate],
        time: Callable[[Candidate], TimedCandidate],
    ) -> None:
        """Call `time` for the candidates that have not been timed, and move them to `timed`."""
        known = {id(each.candidate) for each in self.timed}
        new = [candidate for candidate in candidates if id(candidate) not in known]
        self.timed.extend(map(time, new))
        self.sort()
        moved = {*map(id, new)}
        for others in (self.cut, self.left):
            others[:] = [candidate for candidate in others if id(candidate) not in moved]

    def sort(self) -> None:
        self.timed.sort(key=lambda each: (not each.fits, each.best.seconds))


class Search:
    """Search for the best layouts of `config` on `ranks` ranks with `memory` bytes per rank."""

    def __init__(
        self, config: Config, ranks: int, vocabulary: int, machine: Machine, memory: float
    ) -> None:
        self.base, self.ranks, self.memory = layouts.bare(config), ranks, memory
        self.estimator = Estimator(vocabulary, machine)
        self.bounds = Bounds(self.base, ranks, vocabulary, machine)
        self.candidates = Candidates(self.estimator, ranks, memory, config.parallel.bucket_mb)
        self.workers = config.parallel.local_steps and config.workers  # 0 without local updates
        self.allowed = 0  # number of valid candidates
        self.schemes = SCHEMES
        self.way = config.parallel.way
        self.asked = {config.parallel.scheme: config.tensor_split}
        if config.parallel.split is not None:
            self.asked = {self.way: config.tensor_split}
            if config.tensor_split not in SCHEMES.values():
                self.schemes = SCHEMES | self.asked

    def run(self, top: int, most: int) -> Found:
        """Search for the `top` fastest layouts within a budget of about `most` cost measurements.

        Candidates are grouped by (p, d, c, e), and each group has a shortlist sorted by expected
        step time. First, the search estimates the first candidate of each shortlist, then the
        other candidates on the shortlists, fastest group first, and then the remaining candidates.
        Finally, the fastest candidates are refined.
        Raises ValueError if no layout is valid; the message is one line and includes a fix.
        """
        candidates = []
        for candidate in self.allowed_candidates():
            candidates.append(candidate)
            p, last = candidate.config.mesh.p, min(self.ranks, self.base.model.layers)
            log.info("listed %d mesh sizes so far (p = %d, at most %d)", len(candidates), p, last)
        if not candidates:
            raise ValueError(self._refusal())
        self.allowed = len(candidates)
        self.calibrate(candidates)
        expected = ExpectedSteps(self.base, self.ranks, self.memory, self.estimator.costs)
        groups, others = shortlists(sorted(candidates, key=expected.of))
        found = Found([], [], [], sum(map(self.variants, candidates)))
        times = [self._consider(group[0], found, top, _COARSE * most) for group in groups]
        rest = [(time, candidate) for time, group in zip(times, groups) for candidate in group[1:]]
        rest.sort(key=lambda each: (each[0], self.bounds.least(each[1])))
        others.sort(key=self.bounds.least)
        for candidate in [*(candidate for _, candidate in rest), *others]:
            self._consider(candidate, found, top, _COARSE * most)
        found.sort()
        self._refine(found, most)
        self._add(found, [*uneven(self.candidates, found.timed)])
        return found

    def _add(self, found: Found, offers: Sequence[Offer]) -> None:
        for number, estimate in offers:
            candidate, known, *_ = found.timed[number]
            found.timed[number] = self._offered(candidate, [*known, estimate])
        found.sort()

    def _refine(self, found: Found, most: int) -> None:
        """Estimate more layouts of the best candidates, round-robin, until the budget is spent."""

        def limit():
            return _REACH * self.limit(found.timed, 1)

        near = [each.best for each in found.timed if each.fits and each.best.seconds < limit()]
        rounds = zip_longest(*(self.candidates.every(best, limit) for best in near))
        for count, offered in enumerate(rounds, 1):
            log.info("refining the best %d mesh sizes, round %d", len(near), count)
            for number, more in enumerate(offered):
                candidate, offers, *_ = found.timed[number]
                found.timed[number] = self._offered(candidate, [*offers, *(more or ())])
            if self._spent(most):
                break
        found.sort()

    def _spent(self, most: int) -> bool:
        return self.estimator.costs.measured >= most

    def _consider(self, candidate: Candidate, found: Found, top: int, most: float) -> float:
        """Time a candidate if it may be among the best `top`.

        Returns its step time in seconds, or inf if it was not timed or does not fit in memory.
        """
        if self.bounds.least(candidate) > self.limit(found.timed, top):
            found.cut.append(candidate)
        elif self._spent(most) and found.timed:
            found.left.append(candidate)
        else:
            counts = len(found.timed), len(found.cut), self.allowed
            log.info("estimated %d and excluded %d of %d combinations", *counts)
            found.timed.append(self.timed(candidate))
            return found.timed[-1].best.seconds if found.timed[-1].fits else inf
        return inf

    def calibrate(self, candidates: Sequence[Candidate]) -> None:
        """Calibrate the bounds with the costs of the candidate with the least communication."""
        config = min(candidates, key=lambda candidate: sum(candidate.moves.values())).config
        fixed = self.estimator.costs.world(config).seconds
        self.bounds.calibrate(config, self.estimator.costs.parts(config), fixed)

    def limit(self, timed: Sequence[TimedCandidate], top: int) -> float:
        """Return the step time, in seconds, that a candidate must not exceed to be among the best
        `top`."""
        seconds = sorted(each.sure for each in timed)
        return seconds[top - 1] if len(seconds) >= top else inf

    def allowed_candidates(self) -> Iterator[Candidate]:
        """Yield all valid candidates.

        With many ranks, only the kind of context parallelism with the least exposed communication
        is considered for each mesh. With local updates, all candidates have the number of workers
        of the input, because another number changes the results.
        """
        for configs in layouts.every_mesh(self.base, self.ranks, self.memory, self.schemes):
            if self.workers and configs and configs[0].mesh.d != self.workers:
                continue
            found = sorted(map(self.bounds.candidate, configs), key=self.bounds.shown_context)
            yield from found if self.ranks <= _FEW else found[:1]

    @cached_property
    def unsearched(self) -> str:
        """Message that the scheme or split of the input was not searched, or "" if it was.

        A scheme is not searched if it is invalid on every mesh with tensor parallelism.
        """
        usual = self.asked == {self.base.parallel.scheme: self.base.tensor_split}
        found = layouts.every_mesh(self.base, self.ranks, self.memory, self.asked)
        if usual or any(config.mesh.tensor_ranks() > 1 for config in chain.from_iterable(found)):
            return ""
        ranks = counted(self.ranks, "rank")
        return f"{self.way} was not searched: no mesh of {ranks} is valid for it"

    def refusal(self, is_it: Callable[[Config], bool], mesh: MeshConfig | None = None) -> str:
        """Return an error message for a layout for which the predicate `is_it(config)` is true.

        It explains why none of these layouts is valid. If `mesh` is given, the layout has its
        values of p, d, c and e.
        """
        c, e = (mesh.c, mesh.e) if mesh else (1, 1)
        base = with_context(self.base, c, "ring", 1)
        base = replace(base, mesh=replace(base.mesh, e=e))
        ranks, layers = self.ranks // (c * e), base.model.layers
        for each in layouts.meshes(ranks, layers, base.train.batch, self.schemes):
            if mesh and each[:2] != (mesh.p, mesh.d):
                continue
            config = layouts.with_mesh(base, each, self.schemes)
            if is_it(config) and (problems := layouts.problems(config, self.ranks)):
                return f"for example, {problems[0]}"
        return f"no searched mesh of {counted(self.ranks, 'rank')} has this shape"

    def _refusal(self) -> str:
        model, train = self.base.model, self.base.train
        mesh, ranks = (
            next(layouts.meshes(self.ranks, model.layers, train.batch)),
            counted(self.ranks, "rank"),
        )
        if self.workers > 1:
            workers = f"mesh.d = {self.workers} workers (parallel.local_steps)"
            return f"no layout on {ranks} is valid with {workers}; change mesh.d or --ranks"
        problem, *_ = layouts.problems(layouts.with_mesh(self.base, mesh), self.ranks)
        return f"no layout on {ranks} is valid for this model; for example, {problem}"

    def variants(self, candidate: Candidate) -> int:
        """Return the number of layouts that have the mesh sizes of a candidate."""
        config, layers = candidate.config, self.base.model.layers
        counts = layouts.microbatches(config, self.ranks)
        ways = sum(len(layouts.schedules(config.mesh.p, micros, layers)) for micros in counts)
        orders = layouts.orders(config) if self.bounds.placed else 1
        zeros = sum(map(len, layouts.zeros(config, self.ranks)))
        return ways * len(self.candidates.ways(config)) * zeros * orders

    def timed(self, candidate: Candidate) -> TimedCandidate:
        """Estimate layouts of a candidate, for a comparison with other candidates."""
        return self._offered(candidate, self.candidates.promising(candidate.config))

    def _offered(self, candidate: Candidate, found: Sequence[Estimate]) -> TimedCandidate:
        """Return a TimedCandidate with the estimates in `found` that may fit, fastest first."""
        near = {each.config: each for each in found if self.candidates.fits(each, 1 + NEAR)}
        if not near:
            return TimedCandidate(candidate, [min(found, key=lambda each: each.peak)], False, inf)
        offers = sorted(near.values(), key=seconds_of)
        sure = (each.seconds for each in offers if self.candidates.fits(each, SURE))
        return TimedCandidate(candidate, offers, True, next(sure, inf))
