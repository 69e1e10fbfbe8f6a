"""Ranking of the layouts of a search by step time, and the reasons why layouts are slower."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from itertools import chain, islice
from math import inf
from statistics import fmean
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from hpc3d.comm.mesh import COPIES
from hpc3d.config.input_file import BUCKET_MB, Config, MeshConfig, ParallelConfig
from hpc3d.predict.planning.adaptation import (
    gains,
    with_groups,
    with_other_buckets,
    with_overlap,
    with_prefetch,
)
from hpc3d.predict.planning.bounds import kind
from hpc3d.predict.planning.candidates import NEAR
from hpc3d.predict.planning.layouts import recomputation
from hpc3d.predict.simulation.simulator import agreement_seconds, simulate
from hpc3d.predict.simulation.summary import busiest_stage, summary, waits_of, waits_within
from hpc3d.tensor.split import LOOPS, PUBLISHED, STORAGE

if TYPE_CHECKING:
    from hpc3d.predict.machine.machine import Machine
    from hpc3d.predict.planning.bounds import Candidate
    from hpc3d.predict.planning.candidates import Candidates, TimedCandidate
    from hpc3d.predict.planning.estimate import Estimate
    from hpc3d.predict.planning.search import Found, Search
    from hpc3d.tensor.split import Split

_CUBOIDS = ("2d", "3d")  # 3-D, and its special case with z = 1
_NAMED = {
    "1-D": lambda config: kind(config) == "1-D",
    "2-D": lambda config: kind(config) == "2-D",
    "cube": lambda config: _is_cuboid(config) and _is_cube(config.mesh),
    "best cuboid": lambda config: _is_cuboid(config),  # noqa: PLW0108  (defined below)
}
_QUOTED = "order", *LOOPS, *STORAGE  # keys whose values may contain spaces
_EACH = 2  # number of candidates to time in each class of layouts in _NAMED
# Number of estimates with the lowest peak memory for which all memory options are estimated.
_LEAN = 8
_SHOWN = 0.25  # fraction of the simulation budget reserved for layouts slower than the fastest
# Number of layouts for which variants are tried, and number of variants of each layout.
_VARIED, _SIZES = 6, 6
_MORE = 0.25  # extra budget to try these variants, as a fraction of the simulation budget
# Factors that turn an estimated step time into a lower bound on the simulated one. _NEW is used if
# no layout with the same grouping key (`_family`) has been simulated. Otherwise, the estimate is
# multiplied by _KIN and by the group's smallest ratio of simulated to estimated time.
_NEW, _KIN = 0.9, 0.97
_Layout = TypeVar("_Layout", "Estimate", "RankedLayout")


class RankedLayout(NamedTuple):
    """Predicted step time and memory of a layout.

    `seconds` is the step time; `bubble` and `communication` (exposed communication) are fractions
    of this time. `waits` maps each axis to its communication time in seconds. `stage` is the
    pipeline stage with the highest peak memory, `peak` is this peak in bytes per rank, and `kinds`
    maps each kind of memory to bytes. `simulated` is False if the prediction is an estimate.
    """

    config: Config
    seconds: float
    bubble: float
    communication: float
    waits: dict
    peak: int
    stage: int
    kinds: dict
    simulated: bool

    @property
    def axis(self) -> str:
        """Axis with the longest communication time, or "none"."""
        axes = {axis: seconds for axis, seconds in self.waits.items() if axis != "world"}
        return max(axes, key=axes.get) if sum(axes.values()) else "none"


class Loser(NamedTuple):
    """Group of layouts that are slower than the best one for the same `reason`.

    `count` is the number of combinations of mesh sizes and scheme in the group. `nearest` is the
    fastest layout of the group that fits in memory.
    """

    reason: str
    count: int
    nearest: RankedLayout


def _is_cuboid(config: Config) -> bool:
    """Return True for a 3-D product on a mesh with at least two tensor axes longer than 1."""
    named = config.parallel.split is None and config.parallel.scheme in _CUBOIDS
    mesh = config.mesh
    return named and [mesh.x, mesh.y, mesh.z].count(1) < 2


def _is_cube(mesh: MeshConfig) -> bool:
    return mesh.x == mesh.y == mesh.z > 1


def estimated(estimate: Estimate) -> RankedLayout:
    """Convert an estimate to a RankedLayout."""
    seconds, waits = estimate.seconds, estimate.waits
    return RankedLayout(
        estimate.config,
        seconds,
        estimate.bubble / seconds,
        waits_within(waits, estimate.config.mesh.p).total() / seconds,
        dict(waits),
        int(estimate.peak),
        estimate.stage,
        {name: int(size) for name, size in estimate.kinds.items() if size},
        False,
    )


def _simulated(config: Config, vocabulary: int, machine: Machine) -> RankedLayout:
    """Simulate a layout; return a RankedLayout with the `waits` within the busiest stage."""
    runs = simulate(config, vocabulary, machine)
    found = summary(runs, config, machine)
    seconds, worst = found["step_time_s"], found["memory"]["worst"]
    waits = waits_within(waits_of(runs[busiest_stage(runs)]), len(runs))
    if agreement := agreement_seconds(runs, config.parallel.local_steps):
        waits[COPIES] += agreement
    kinds = {name: size for name, size in worst.items() if name not in ("stage", "all", "tables")}
    return RankedLayout(
        config,
        seconds,
        found["bubble"],
        found["communication"],
        dict(waits),
        worst["all"],
        worst["stage"],
        {name: size for name, size in kinds.items() if size},
        True,
    )


def _simulation_cost(config: Config) -> float:
    """Return the estimated run time of a layout's simulation, in ms."""
    stages, parallel = config.mesh.p, config.parallel
    passes = stages * parallel.microbatches * parallel.chunks
    return 8 * config.model.layers + 10 * stages + passes


class Ranking:
    """Ranking of the layouts found by a search.

    The most promising layouts are simulated, within a budget of `most` ms. The other layouts are
    ranked by their estimates, corrected for the mean error of the simulated layouts' estimates.
    """

    def __init__(self, search: Search, found: Found, machine: Machine, most: float) -> None:
        self.search, self.found, self.machine = search, found, machine
        self.most = self.left = most
        self.known, self.ratios, self.peaks = {}, {}, {}

    def simulate(self) -> None:
        """Simulate layouts until no other layout can be faster than the fastest one that fits.

        If none of the simulated layouts fits, the remaining layout with the lowest peak memory is
        simulated as well.
        """
        offers = [offer for each in self.found.timed if each.fits for offer in each.offers]
        shortest = inf
        while offer := self.promising(offers, shortest):
            offers.remove(offer)
            row = self.run(offer)
            shortest = min(shortest, row.seconds if self.fits(row) else inf)
        if shortest == inf and offers:
            self.run(min(offers, key=self.peak))

    def try_variants(self, variants: Callable[[Candidates, Config], Sequence[Estimate]]) -> None:
        """Simulate variants of the best layouts if they may become the fastest.

        `variants` returns estimates of the variants of a layout. If a variant is sufficiently
        faster than the layout, its estimate is appended to `offers`, the list of the candidate's
        estimates.
        """
        kept, self.left = self.left, _MORE * self.most
        for seconds, other, each in sorted(self._varied(variants), key=lambda one: one[0]):
            row, cost = self.row(each), _simulation_cost(other.config)
            fitting = filter(self.fits, self.known.values())
            shortest = min((fast.seconds for fast in fitting), default=inf)
            if cost <= self.left and _KIN * seconds < min(shortest, row.seconds):
                found = self.run(other)
                if self.fits(found) and gains(found.seconds, row.seconds):
                    each.offers.append(other)
        self.left = kept

    def _varied(
        self, variants: Callable[[Candidates, Config], Sequence[Estimate]]
    ) -> Iterator[tuple[float, Estimate, TimedCandidate]]:
        """Estimate variants of the best layouts that fit, and for which there are variants.

        Yields (corrected step time in s, estimate, candidate).
        """
        candidates = self.search.candidates
        rows = ((each, self.row(each)) for each in self.found.timed if each.fits)
        found = ((each, row, variants(candidates, row.config)) for each, row in rows if row)
        for each, row, others in islice((one for one in found if one[2]), _VARIED):
            ratio = row.seconds / self._offer(row.config).seconds
            for other in others[:_SIZES]:
                if self.peak(other) <= (1 + NEAR) * candidates.memory:
                    yield ratio * other.seconds, other, each

    def promising(self, offers: Sequence[Estimate], shortest: float) -> Estimate | None:
        """Return the most promising estimate in `offers`, or `None` if none is worth simulating.

        `shortest` is the shortest step time, in seconds, of a simulated layout that fits.
        """
        near = (offer for offer in offers if self.peak(offer) <= self.room(offer))
        offer = min(near, key=self.least, default=None)
        enough = shortest < inf and self.left < _SHOWN * self.most
        return None if enough or not offer or self.least(offer) > shortest else offer

    def least(self, estimate: Estimate) -> float:
        """Return a probable lower bound on the simulated step time of a layout, in seconds."""
        ratios = self.ratios.get(_family(estimate.config))
        return estimate.seconds * (_KIN * min(ratios) if ratios else _NEW)

    def peak(self, estimate: Estimate) -> float:
        """Return the expected peak memory of a layout in a simulation, in bytes per rank."""
        return estimate.peak * fmean(self.peaks.get(_family(estimate.config), [1]))

    def room(self, estimate: Estimate) -> float:
        """Return the limit on the expected peak memory of a layout to simulate, in bytes.

        The limit tightens as the budget is spent, so that layouts simulated later are more likely
        to fit in memory.
        """
        left = (self.left - _simulation_cost(estimate.config)) / self.most
        return self.search.candidates.memory * (1 + NEAR * max(-1, left))

    def run(self, estimate: Estimate) -> RankedLayout:
        """Simulate the layout of an estimate, and return its RankedLayout."""
        config = estimate.config
        self.left -= _simulation_cost(config)
        row = _simulated(config, self.search.estimator.vocabulary, self.machine)
        self.known[config] = row
        self.ratios.setdefault(_family(config), []).append(row.seconds / estimate.seconds)
        self.peaks.setdefault(_family(config), []).append(row.peak / estimate.peak)
        return row

    def _corrected(self, estimate: Estimate) -> RankedLayout:
        """Convert an estimate to a RankedLayout with a corrected step time.

        The correction factor is the mean ratio of simulated to estimated step times.
        """
        ratios = [*chain(*self.ratios.values())]
        seconds = estimate.seconds * (fmean(ratios) if ratios else 1)
        return estimated(estimate)._replace(seconds=seconds)

    def row(self, each: TimedCandidate) -> RankedLayout:
        """Return the best RankedLayout of a candidate, or `None` if none of its layouts fits.

        The best is the fastest simulated layout that fits or, if none has been simulated, the
        fastest estimate.
        """
        known = [self.known[one.config] for one in each.offers if one.config in self.known]
        fitting = filter(self.fits, known)
        new = (one for one in each.offers if one.config not in self.known)
        likely = (one for one in new if self.peak(one) <= self.search.candidates.memory)
        shortest = min(fitting, key=lambda row: row.seconds, default=None)
        return shortest or next(map(self._corrected, likely), None)

    def looked_at(self, each: TimedCandidate) -> RankedLayout:
        """Return the best RankedLayout of a candidate, and simulate it if the budget allows."""
        row = self.row(each)
        while row and not row.simulated and _simulation_cost(row.config) <= self.left:
            self.run(self._offer(row.config))
            row = self.row(each)
        return row

    def best(self, top: int) -> list[RankedLayout]:
        """Return the `top` fastest layouts that fit in memory.

        At least the first one has been simulated.
        """
        self.simulate()
        for variants in (with_groups, with_prefetch, with_overlap, with_other_buckets):
            self.try_variants(variants)
        fitting = [each for each in self.found.timed if each.fits]
        while True:
            rows = islice(filter(None, map(self.looked_at, fitting)), top)
            rows = sorted(rows, key=lambda row: row.seconds)
            if not rows or rows[0].simulated:
                return rows
            self.run(self._offer(rows[0].config))

    def fits(self, row: Estimate | RankedLayout) -> bool:
        return row.peak <= self.search.candidates.memory

    def widen(self, mesh: MeshConfig | None = None) -> None:
        """Estimate the most promising candidates of each class of layouts in `_NAMED`.

        If `mesh` is given, only candidates with its values of p, d, c and e are considered.
        """
        for is_it in self._named().values():
            named = sorted(self._named_candidates(is_it, mesh), key=self.search.bounds.least)
            self.found.widen(named[:_EACH], self.search.timed)

    def _named_candidates(
        self, is_it: Callable[[Config], bool], mesh: MeshConfig | None
    ) -> Iterator[Candidate]:
        """Yield the candidates for which the predicate `is_it(config)` is true.

        If `mesh` is given, only candidates with its values of p, d, c and e are yielded.
        """
        found = self.found
        for candidate in [*(each.candidate for each in found.timed), *found.left, *found.cut]:
            if is_it(candidate.config) and (mesh is None or _alike(candidate.config.mesh, mesh)):
                yield candidate

    def named(self, mesh: MeshConfig | None = None) -> dict[str, RankedLayout | str]:
        """Return the best RankedLayout of each class of layouts in `_NAMED`.

        The value of a class without a valid layout is the reason. If `mesh` is given, only layouts
        with its values of p, d, c and e are considered.
        """
        refusal = self.search.refusal
        return {
            name: self._called(is_it, mesh) or refusal(is_it, mesh)
            for name, is_it in self._named().items()
        }

    def _named(self) -> dict[str, Callable[[Config], bool]]:
        """Return `_NAMED`, extended by one class for each scheme that is not published."""
        others = [name for name in self.search.schemes if name not in PUBLISHED]
        return _NAMED | {name: partial(_is_of, name) for name in others}

    def _called(
        self, is_it: Callable[[Config], bool], mesh: MeshConfig | None
    ) -> RankedLayout | None:
        """Return the best RankedLayout for which the predicate `is_it(config)` is true.

        If none of these layouts fits in memory, return the one with the lowest peak. If the
        predicate is false for all layouts, return `None`.
        """
        chosen = {id(candidate) for candidate in self._named_candidates(is_it, mesh)}
        timed = [each for each in self.found.timed if id(each.candidate) in chosen]
        for each in timed[:_EACH]:
            self.looked_at(each)
        fitting = [row for each in timed if (row := self.row(each)) and self.fits(row)]
        nearest = [estimated(self.nearest([each.best for each in timed]))] if timed else []
        return min(fitting or nearest, key=lambda row: row.seconds, default=None)

    def losers(self, best: RankedLayout) -> list[Loser]:
        """Group the other layouts by the reason why they are slower than `best`, largest group
        first."""
        winner, groups = self._offer(best.config), {}
        for each in self.found.timed:
            if winner not in each.offers:
                row = self.row(each)
                reason = self.reason(row, winner) if row else "memory"
                groups.setdefault(reason, []).append(row or self._known(each.best))
        losers = [
            Loser(reason, len(group), self.nearest(group)) for reason, group in groups.items()
        ]
        return sorted(losers, key=lambda loser: -loser.count)

    def _known(self, estimate: Estimate) -> RankedLayout:
        """Return a simulated RankedLayout, or an estimate with the expected peak."""
        expected = estimated(estimate)._replace(peak=int(self.peak(estimate)))
        return self.known.get(estimate.config, expected)

    def _offer(self, config: Config) -> Estimate:
        offers = chain.from_iterable(each.offers for each in self.found.timed)
        return next(offer for offer in offers if offer.config == config)

    def nearest(self, group: Sequence[_Layout]) -> _Layout:
        """Return the fastest layout that fits in memory, or else the one with the lowest peak."""
        fitting = [each for each in group if self.fits(each)]
        smallest = min(group, key=lambda each: each.peak)
        return min(fitting, key=lambda each: each.seconds, default=smallest)

    def smallest(self) -> RankedLayout:
        """Return the layout with the lowest peak memory, which does not depend on the limit.

        The estimates of a layout contain only the memory options that the limit requires.
        Therefore, all options of the smallest layouts are estimated, and the smallest estimate is
        simulated if the budget allows.
        """
        offers = chain.from_iterable(each.offers for each in self.found.timed)
        nearest = sorted(offers, key=lambda each: each.peak)[:_LEAN]
        ways = (self.search.candidates.with_each_way(each.config) for each in nearest)
        smallest = self.checked(min(chain.from_iterable(ways), key=lambda each: each.peak))
        return min([*self.known.values(), smallest], key=lambda row: row.peak)

    def checked(self, estimate: Estimate) -> RankedLayout:
        """Return the RankedLayout of an estimate, simulated if the budget allows."""
        if estimate.config not in self.known and _simulation_cost(estimate.config) <= self.most:
            self.run(estimate)
        return self.known.get(estimate.config, estimated(estimate))

    def reason(self, row: RankedLayout, winner: Estimate) -> str:
        """Return the component of the step time that increases most compared with `winner`."""
        estimate = self._offer(row.config)
        waits = {axis: estimate.waits[axis] - winner.waits[axis] for axis in row.waits}
        more = {f"axis {axis}": seconds for axis, seconds in waits.items()}
        more["bubble"] = estimate.bubble - winner.bubble
        again = recomputation(row.config.parallel.recompute)
        again -= recomputation(winner.config.parallel.recompute)
        more["recompute" if again > 0 else "compute"] = estimate.compute - winner.compute
        return max(more, key=more.get)


def _is_of(name: str, config: Config) -> bool:
    return kind(config) == name


def _family(config: Config) -> tuple[MeshConfig, Split, str, bool]:
    """Return a grouping key such that estimates of layouts with the same key have similar
    errors."""
    parallel = config.parallel
    even = parallel.layers_per_stage is None
    return config.mesh, config.tensor_split, parallel.schedule, even


def _alike(mesh: MeshConfig, other: MeshConfig) -> bool:
    return (mesh.p, mesh.d, mesh.c, mesh.e) == (other.p, other.d, other.c, other.e)


def layout(config: Config) -> dict[str, dict[str, Any]]:
    """Return the non-default keys of a layout as {"mesh": {...}, "parallel": {...}}."""
    usual = {
        "mesh": asdict(MeshConfig()),
        "parallel": asdict(ParallelConfig(bucket_mb=BUCKET_MB)),
    }
    values = {table: asdict(getattr(config, table)) for table in usual}
    return {
        table: {
            key: value
            for key, value in values[table].items()
            if value not in (None, usual[table][key])
        }
        for table in usual
    }


def shown_layout(config: Config) -> str:
    """Format a layout on one line; sizes and counts of 1 are omitted."""
    tables = layout(config)
    by_name = kind(config) != "none" and config.parallel.split is None
    scheme = {"scheme": config.parallel.scheme} if by_name else {}
    shown = {key: tables["mesh"][key] for key in "pdcxyz" if key in tables["mesh"]}
    shown |= scheme | tables["mesh"] | tables["parallel"]
    plain = {"microbatches": 1, "chunks": 1, "schedule": "none", **dict.fromkeys("pdcxyz", 1)}
    return " ".join(written(*item) for item in shown.items() if item not in plain.items())


def written(key: str, value: Any) -> str:
    """Format a key and its value as `key=value`, without spaces in lists."""
    if isinstance(value, tuple):
        return f"{key}=[{','.join(map(str, value))}]"
    if isinstance(value, dict):
        return f"{key}={{{', '.join(written(*item) for item in value.items())}}}"
    return f'{key}="{value}"' if key in _QUOTED else f"{key}={str(value).lower()}"
