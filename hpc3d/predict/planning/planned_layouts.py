"""Plan for an input file: the fastest layouts that fit in memory.

If no layout fits in memory, the search is repeated with a memory-saving technique.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import ceil
from pathlib import Path
from typing import Any, NamedTuple

from hpc3d.config.input_file import Config
from hpc3d.config.load import to_toml
from hpc3d.predict.machine.machine import Machine
from hpc3d.predict.planning.ranked_layouts import allowed, as_plain, ranked
from hpc3d.predict.planning.ranking import RankedLayout, Ranking, estimated, shown_layout
from hpc3d.predict.planning.resorts import FallbackLayout, fallback_layouts
from hpc3d.predict.planning.search import Found
from hpc3d.predict.simulation.simulator import uncollected

TOP = 10  # default number of layouts to show


class PlannedLayouts(NamedTuple):
    """Plan for the input `config`.

    `found` is the result of the search, `ranking` ranks its layouts, and `best` lists the fastest
    layouts that fit in memory.
    """

    config: Config
    found: Found
    ranking: Ranking
    best: list[RankedLayout]


class ResortedLayouts(NamedTuple):
    """Plan with a memory-saving technique, because no layout fits in memory without one.

    `planned` is the plan, and `fit` describes the technique. `nearest` is the layout that needs
    the least memory without the technique. `others` lists alternative techniques with which a
    layout fits.
    """

    planned: PlannedLayouts
    nearest: RankedLayout
    fit: FallbackLayout
    others: list[FallbackLayout]

    def plain(self) -> dict[str, Any]:
        """Return a JSON-serializable dict for `--json`."""
        rows = [(each, estimated(each.estimate)) for each in self.others]
        others = [each.resort.plain() | as_plain(row) for each, row in rows]
        nearest = as_plain(self.nearest)
        return {"with": self.fit.resort.plain(), "nearest": nearest, "others": others}


def plan_layouts(
    source: Path | str,
    overrides: Sequence[str],
    ranks: int,
    machine: Machine,
    memory: float | None = None,
    top: int = TOP,
) -> tuple[PlannedLayouts, ResortedLayouts | None]:
    """Plan the best layouts of an input on `ranks` ranks with `memory` bytes per rank.

    `memory` defaults to the machine's memory per rank. Returns a PlannedLayouts object and, if
    layouts fit only with a memory-saving technique, a ResortedLayouts object (otherwise `None`).
    Raises ValueError if the input is invalid for every layout, or if no layout fits.
    """
    config = allowed(source, overrides)
    memory = memory or machine.memory_gb * 1e9
    planned = _planned(config, ranks, machine, memory, top)
    if planned.best:
        return planned, None
    tried = [*fallback_layouts(source, overrides, planned.ranking.search, planned.found)]
    resorted = _resorted(planned, [each for each in tried if each.fits], top)
    if resorted is None:
        raise ValueError(_nothing_fits(planned, tried))
    return resorted.planned, resorted


def _planned(
    config: Config, ranks: int, machine: Machine, memory: float, top: int
) -> PlannedLayouts:
    with uncollected():
        found, ranking = ranked(config, ranks, machine, memory, top)
        best = ranking.best(top)
    return PlannedLayouts(config, found, ranking, best)


def _resorted(
    short: PlannedLayouts, fitting: Sequence[FallbackLayout], top: int
) -> ResortedLayouts | None:
    """Plan with the first technique with which a layout fits in memory.

    Returns `None` if no layout fits with any technique.
    """
    search, machine = short.ranking.search, short.ranking.machine
    for fit in fitting:
        again = _planned(fit.config, search.ranks, machine, search.memory, top)
        if again.best:
            # Maps each combination of changed keys to the first technique that changes these keys.
            # This technique has the least effect on the results of a run.
            mildest = {fit.resort.keys: fit}
            for other in fitting:
                mildest.setdefault(other.resort.keys, other)
            _, *others = mildest.values()
            return ResortedLayouts(again, short.ranking.smallest(), fit, others)
    return None


def _nothing_fits(planned: PlannedLayouts, tried: Sequence[FallbackLayout]) -> str:
    """Return an error message with the smallest memory in which a layout fits.

    The message also contains this memory for the techniques in `tried`, if it is smaller.
    """
    ranking = planned.ranking
    row, memory = ranking.smallest(), ranking.search.memory
    peak: float = row.peak
    for estimate in sorted((each.estimate for each in tried), key=lambda each: each.peak):
        if estimate.peak < peak:  # the simulated peak is rarely below the estimated one
            peak = min(peak, max(estimate.peak, ranking.checked(estimate).peak))
    sizes = f"--memory {ceil(row.peak / 1e6)}MB"
    if memory < peak and ceil(peak / 1e6) < ceil(row.peak / 1e6):
        sizes += f" ({ceil(peak / 1e6)}MB with offloading or techniques that change the results)"
    return (
        f"no layout fits in {gigabytes(memory)} per rank; {nearest_in_words(row)}; use {sizes}, "
        "more ranks, a smaller model, or a smaller batch"
    )


def nearest_in_words(row: RankedLayout) -> str:
    """Describe the layout with the lowest peak memory, and its peak, in words."""
    about = "" if row.simulated else "~"
    return f"the smallest layout found, {shown_layout(row.config)}, needs {about}{held(row)}"


def held(row: RankedLayout) -> str:
    """Format the peak memory of a layout, followed by its size by kind, largest first.

    Estimates and simulations divide activations and communication buffers differently.
    """
    kinds = {kind: row.kinds.get(kind, 0) for kind in ("parameter", "gradient", "optimizer")}
    kinds["activations and communication buffers"] = row.peak - sum(kinds.values())
    ordered = sorted(kinds.items(), key=lambda item: -item[1])
    parts = ", ".join(f"{kind} {gigabytes(size)}" for kind, size in ordered if size > 0)
    return f"{gigabytes(row.peak)} on stage {row.stage} ({parts})"


def gigabytes(nbytes: float) -> str:
    """Format a number of bytes in GB, or in MB below 0.1 GB."""
    return f"{nbytes / 1e9:.2f} GB" if nbytes >= 1e8 else f"{nbytes / 1e6:.2f} MB"


def input_with(config: Config, planned: Config) -> str:
    """Return `config` as the text of an input file, with the mesh and parallelism of a plan."""
    return to_toml(replace(config, mesh=planned.mesh, parallel=planned.parallel))
