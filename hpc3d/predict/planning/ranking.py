"""What is reported of a search: the best layouts simulated, those with a name, why others lose."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from itertools import chain, islice
from math import inf
from statistics import fmean
from typing import TYPE_CHECKING, Any, NamedTuple

from hpc3d.config.input_file import Config, MeshConfig, ParallelConfig
from hpc3d.predict.planning.adaptation import gains, with_other_buckets
from hpc3d.predict.planning.bounds import kind
from hpc3d.predict.planning.candidates import NEAR, RECOMPUTE
from hpc3d.predict.simulation.simulator import simulate
from hpc3d.predict.simulation.summary import summary, waits_of

if TYPE_CHECKING:
    from hpc3d.predict.machine.machine import Machine
    from hpc3d.predict.planning.bounds import Candidate
    from hpc3d.predict.planning.candidates import TimedCandidate
    from hpc3d.predict.planning.estimate import Estimate
    from hpc3d.predict.planning.search import Found, Search

_CUBOIDS = ("1d-sequence", "2d", "3d")  # cuboids of 3-D, some flat
_NAMED = {
    "1-D": lambda config: kind(config) == "1-D",
    "2-D": lambda config: kind(config) == "2-D",
    "cube": lambda config: kind(config) == "3-D" and _is_cube(config.mesh),
    "best cuboid": lambda config: kind(config) != "none" and config.parallel.scheme in _CUBOIDS,
}
_EACH = 2  # candidates that are timed for a name
_SHOWN = 0.25  # of the effort is left for layouts that are shown beside the fastest
_RESIZED, _SIZES = 6, 3  # layouts that may have buckets of other sizes, and how many
_SIZED = 0.25  # of the effort is spent on simulations of them beside
_NEW, _KIN = 0.9, 0.97  # of an estimate a step takes at least; of what it took for its like


class RankedLayout(NamedTuple):
    """A layout with its step: `bubble` and `communication` are shares of it, `waits` seconds by
    axis, `kinds` the bytes of the fullest rank, on `stage`.  Not `_simulated`: estimated."""

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
        """The axis that is waited for most, or "none"."""
        axes = {axis: seconds for axis, seconds in self.waits.items() if axis != "world"}
        return max(axes, key=axes.get) if sum(axes.values()) else "none"


class Loser(NamedTuple):
    """Why `count` layouts lose, and the one of them that is nearest to winning."""

    reason: str
    count: int
    nearest: RankedLayout


def _is_cube(mesh: MeshConfig) -> bool:
    return mesh.x == mesh.y == mesh.z > 1


def estimated(estimate: Estimate) -> RankedLayout:
    """The RankedLayout of an estimate."""
    seconds, waits = estimate.seconds, estimate.waits
    return RankedLayout(
        estimate.config,
        seconds,
        estimate.bubble / seconds,
        waits.total() / seconds,
        dict(waits),
        int(estimate.peak),
        estimate.stage,
        {name: int(size) for name, size in estimate.kinds.items() if size},
        False,
    )


def _simulated(config: Config, vocabulary: int, machine: Machine) -> RankedLayout:
    """The RankedLayout of a simulation; the waits are those of the stage that idles least."""
    runs = simulate(config, vocabulary, machine)
    found = summary(runs, config, machine)
    seconds, worst = found["step_time_s"], found["memory"]["worst"]
    waits = min(map(waits_of, runs), key=lambda waits: waits["p"])
    kinds = {name: size for name, size in worst.items() if name not in ("stage", "all", "tables")}
    return RankedLayout(
        config,
        seconds,
        found["bubble"],
        found["communication"],
        {axis: waits[axis] for axis in waits if axis != "p"},
        worst["all"],
        worst["stage"],
        {name: size for name, size in kinds.items() if size},
        True,
    )


def _simulation_cost(config: Config) -> float:
    """What it takes to simulate a layout, roughly in ms: its layers, its stages, its passes."""
    stages, parallel = config.mesh.p, config.parallel
    passes = stages * parallel.microbatches * parallel.chunks
    return 8 * config.model.layers + 10 * stages + passes


class Ranking:
    """The rows of a search: simulations of the most promising offers, as far as `most` [ms of
    effort] goes, and estimates of the others, corrected by what was simulated."""

    def __init__(self, search: Search, found: Found, machine: Machine, most: float) -> None:
        self.search, self.found, self.machine = search, found, machine
        self.most = self.left = most
        self.known, self.ratios, self.peaks = {}, {}, {}

    def simulate(self) -> None:
        """Simulate offers while one may be faster than the fastest that fits; where none fits,
        at last the smallest."""
        offers = [offer for each in self.found.timed if each.fits for offer in each.offers]
        quickest = inf
        while offer := self.promising(offers, quickest):
            offers.remove(offer)
            row = self.run(offer)
            quickest = min(quickest, row.seconds if self.fits(row) else inf)
        if quickest == inf and offers:
            self.run(min(offers, key=self.peak))

    def try_buckets(self) -> None:
        """Simulate buckets of other sizes, too, for layouts that may be the fastest with them, and
        offer what is worth it."""
        kept, self.left = self.left, _SIZED * self.most
        for seconds, other, each in sorted(self._resized(), key=lambda one: one[0]):
            row, cost = self.row(each), _simulation_cost(other.config)
            quickest = min(self._fitting_seconds(), default=inf)
            if cost <= self.left and _KIN * seconds < min(quickest, row.seconds):
                found = self.run(other)
                if self.fits(found) and gains(found.seconds, row.seconds):
                    each.offers.append(other)
        self.left = kept

    def _resized(self) -> Iterator[tuple[float, Estimate, TimedCandidate]]:
        """(likely seconds, estimate, candidate) of the best layouts with other buckets."""
        fitting = (
            each for each in self.found.timed if each.fits and each.best.config.mesh.replicas() > 1
        )
        for each in islice(fitting, _RESIZED):
            if row := self.row(each):
                ratio = row.seconds / self._offer(row.config).seconds
                for other in with_other_buckets(self.search.candidates, row.config)[:_SIZES]:
                    if self.peak(other) <= self.search.candidates.memory:
                        yield ratio * other.seconds, other, each

    def _fitting_seconds(self) -> list[float]:
        """The seconds of the simulated layouts that fit."""
        return [row.seconds for row in self.known.values() if self.fits(row)]

    def promising(self, offers: Sequence[Estimate], quickest: float) -> Estimate | None:
        """The most promising of the offers, or None where it is not worth a simulation."""
        near = (offer for offer in offers if self.peak(offer) <= self.room(offer))
        offer = min(near, key=self.least, default=None)
        enough = quickest < inf and self.left < _SHOWN * self.most
        return None if enough or not offer or self.least(offer) > quickest else offer

    def least(self, estimate: Estimate) -> float:
        """Seconds that an estimate may turn out to be at least."""
        ratios = self.ratios.get(_family(estimate.config))
        return estimate.seconds * (_KIN * min(ratios) if ratios else _NEW)

    def peak(self, estimate: Estimate) -> float:
        """Bytes that an estimate is likely to turn out to be."""
        return estimate.peak * fmean(self.peaks.get(_family(estimate.config), [1]))

    def room(self, estimate: Estimate) -> float:
        """Bytes that an estimate may have to be simulated: it is to fit the surer, the less effort
        is left after it."""
        left = (self.left - _simulation_cost(estimate.config)) / self.most
        return self.search.candidates.memory * (1 + NEAR * max(-1, left))

    def run(self, estimate: Estimate) -> RankedLayout:
        """The RankedLayout of a layout by simulation."""
        config = estimate.config
        self.left -= _simulation_cost(config)
        row = _simulated(config, self.search.estimator.vocabulary, self.machine)
        self.known[config] = row
        self.ratios.setdefault(_family(config), []).append(row.seconds / estimate.seconds)
        self.peaks.setdefault(_family(config), []).append(row.peak / estimate.peak)
        return row

    def _corrected(self, estimate: Estimate) -> RankedLayout:
        """The RankedLayout of an estimate, as wrong as others were."""
        ratios = [*chain(*self.ratios.values())]
        seconds = estimate.seconds * (fmean(ratios) if ratios else 1)
        return estimated(estimate)._replace(seconds=seconds)

    def row(self, each: TimedCandidate) -> RankedLayout:
        """The RankedLayout of a candidate: the fastest of its layouts that were simulated and fit,
        or that of an estimate; None if none fits."""
        known = [self.known[one.config] for one in each.offers if one.config in self.known]
        fitting = filter(self.fits, known)
        new = (one for one in each.offers if one.config not in self.known)
        likely = (one for one in new if self.peak(one) <= self.search.candidates.memory)
        quickest = min(fitting, key=lambda row: row.seconds, default=None)
        return quickest or next(map(self._corrected, likely), None)

    def looked_at(self, each: TimedCandidate) -> RankedLayout:
        """The RankedLayout of a candidate, by simulation while there is effort left."""
        row = self.row(each)
        while row and not row.simulated and _simulation_cost(row.config) <= self.left:
            self.run(self._offer(row.config))
            row = self.row(each)
        return row

    def best(self, top: int) -> list[RankedLayout]:
        """The fastest layouts that fit, by simulation where there is one; the first always is."""
        self.simulate()
        self.try_buckets()
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
        """Time some candidates of every name, too."""
        for is_it in _NAMED.values():
            named = sorted(self._named_candidates(is_it, mesh), key=self.search.bounds.least)
            self.found.widen(named[:_EACH], self.search.timed)

    def _named_candidates(
        self, is_it: Callable[[Config], bool], mesh: MeshConfig | None
    ) -> Iterator[Candidate]:
        """The candidates that have a name, with the p, d, c and e of a mesh if one is given."""
        found = self.found
        for candidate in [*(each.candidate for each in found.timed), *found.left, *found.cut]:
            if is_it(candidate.config) and (mesh is None or _alike(candidate.config.mesh, mesh)):
                yield candidate

    def named(self, mesh: MeshConfig | None = None) -> dict[str, RankedLayout | None]:
        """Name -> the RankedLayout of the best layout of that name, with the p, d, c and e of a
        mesh if one is given; or None."""
        return {name: self._called(is_it, mesh) for name, is_it in _NAMED.items()}

    def _called(
        self, is_it: Callable[[Config], bool], mesh: MeshConfig | None
    ) -> RankedLayout | None:
        """The best of what was timed, or of what was simulated, among those that have a name."""
        chosen = {id(candidate) for candidate in self._named_candidates(is_it, mesh)}
        timed = [each for each in self.found.timed if id(each.candidate) in chosen]
        rows = [row for each in timed[:_EACH] if (row := self.looked_at(each))]
        fitting = [row for row in rows if self.fits(row)]
        nearest = [estimated(self.nearest([each.best for each in timed]))] if timed else []
        return min(fitting or nearest, key=lambda row: row.seconds, default=None)

    def losers(self, best: RankedLayout) -> list[Loser]:
        """Why all others lose against the row `best`."""
        winner, groups = self._offer(best.config), {}
        for each in self.found.timed:
            if winner not in each.offers:
                groups.setdefault(self.reason(each, winner), []).append(each.best)
        losers = [
            Loser(reason, len(group), estimated(self.nearest(group)))
            for reason, group in groups.items()
        ]
        return sorted(losers, key=lambda loser: -loser.count)

    def _offer(self, config: Config) -> Estimate:
        """The estimate of a layout."""
        offers = chain.from_iterable(each.offers for each in self.found.timed)
        return next(offer for offer in offers if offer.config == config)

    def nearest(self, group: Sequence[Estimate]) -> Estimate:
        """The fastest of those that fit, else the smallest."""
        fitting = [each for each in group if self.fits(each)]
        smallest = min(group, key=lambda each: each.peak)
        return min(fitting, key=lambda each: each.seconds, default=smallest)

    def reason(self, each: TimedCandidate, winner: Estimate) -> str:
        """What a layout takes longest for, more than the winner."""
        if not each.fits:
            return "memory"
        more = {f"axis {axis}": s - winner.waits[axis] for axis, s in each.best.waits.items()}
        more["bubble"] = each.best.bubble - winner.bubble
        again = RECOMPUTE.index(each.best.config.parallel.recompute)
        again -= RECOMPUTE.index(winner.config.parallel.recompute)
        more["recompute" if again > 0 else "compute"] = each.best.compute - winner.compute
        return max(more, key=more.get)


def _family(config: Config) -> tuple[MeshConfig, str, str, bool]:
    """What layouts have in common whose estimates are wrong alike."""
    parallel = config.parallel
    return config.mesh, parallel.scheme, parallel.schedule, parallel.layers_per_stage is None


def _alike(mesh: MeshConfig, other: MeshConfig) -> bool:
    return (mesh.p, mesh.d, mesh.c, mesh.e) == (other.p, other.d, other.c, other.e)


def layout(config: Config) -> dict[str, dict[str, Any]]:
    """A layout as tables of the input file, {"mesh": {...}, "parallel": {...}}, without the keys
    that have their defaults."""
    usual = {"mesh": asdict(MeshConfig()), "parallel": asdict(ParallelConfig())}
    values = {table: asdict(getattr(config, table)) for table in usual}
    return {
        table: {key: value for key, value in values[table].items() if value != usual[table][key]}
        for table in usual
    }


def shown_layout(config: Config) -> str:
    """The same on a line, without sizes and counts of 1."""
    tables = layout(config)
    scheme = {} if kind(config) == "none" else {"scheme": config.parallel.scheme}
    shown = {key: tables["mesh"][key] for key in "pdcxyz" if key in tables["mesh"]}
    shown |= scheme | tables["mesh"] | tables["parallel"]
    plain = {"microbatches": 1, "chunks": 1, "schedule": "none", **dict.fromkeys("pdcxyz", 1)}
    return " ".join(_written(*item) for item in shown.items() if item not in plain.items())


def _written(key: str, value: Any) -> str:
    if isinstance(value, tuple):
        return f"{key}=[{','.join(map(str, value))}]"
    return f'{key}="{value}"' if key == "order" else f"{key}={str(value).lower()}"
