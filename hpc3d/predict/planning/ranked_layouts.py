"""Search and rank the layouts for an input file; used by `plan` and the Python API."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpc3d.config.load import load
from hpc3d.config.parallel_rules import wrong_compression, wrong_experts, wrong_offload
from hpc3d.config.resolve import refuse
from hpc3d.config.rules import not_there_yet, unknown_values
from hpc3d.config.wrong_values import mark_wrong, reported
from hpc3d.predict.planning.layouts import bare
from hpc3d.predict.planning.ranking import Ranking, layout
from hpc3d.predict.planning.search import Search
from hpc3d.predict.simulation.simulator import vocabulary_of
from hpc3d.training.graphed_step import graph_in_words

if TYPE_CHECKING:
    from hpc3d.config.input_file import Config
    from hpc3d.predict.machine.machine import Machine
    from hpc3d.predict.planning.ranking import RankedLayout
    from hpc3d.predict.planning.search import Found

_FEW = 16  # number of ranks up to which a search is practically exhaustive


def allowed(source: Path | str, overrides: Sequence[str]) -> Config:
    """Load an input, and raise Problems if it is invalid for every layout."""
    config = load(source, overrides, rules=_wrong_everywhere)
    refuse(_wrong_everywhere(config))
    return config


def _wrong_everywhere(config: Config) -> list[str]:
    """Return the errors of an input that do not depend on the layout."""
    problems = [*unknown_values(config), *reported(not_there_yet(config))]
    alone = bare(mark_wrong(config, problems))  # `plan` chooses the mesh
    rules = wrong_experts(alone), wrong_compression(alone), wrong_offload(alone)
    return [*problems, *reported(*rules)]


def ranked(
    config: Config, ranks: int, machine: Machine, memory: float, top: int
) -> tuple[Found, Ranking]:
    """Search for the `top` fastest layouts on `ranks` ranks with `memory` bytes per rank.

    Returns the result of the search and the Ranking of its layouts.
    """
    search = Search(config, ranks, vocabulary_of(config.model), machine, memory)
    found = search.run(top, _most_costs(ranks))
    ranking = Ranking(search, found, machine, _most_effort(ranks))
    ranking.widen()
    ranking.widen(config.mesh)
    return found, ranking


def searched(found: Found, ranking: Ranking) -> dict[str, int]:
    """Return the numbers of layouts, mesh candidates, estimates and simulations in a search.

    Mesh candidates are counted by outcome: timed, pruned (`cut`), or not reached within the budget
    (`left`).
    """
    return {
        "layouts": found.considered,
        "timed": len(found.timed),
        "cut": len(found.cut),
        "left": len(found.left),
        "estimates": ranking.search.candidates.count,
        "simulated": len(ranking.known),
    }


def as_plain(row: RankedLayout) -> dict[str, Any]:
    """Convert a RankedLayout to a JSON-serializable dict for `--json`."""
    on_gpus = row.config.train.backend == "cupy"
    return {
        "layout": layout(row.config),
        "step_time_s": row.seconds,
        "simulated": row.simulated,
        "bubble": row.bubble,
        "communication": row.communication,
        "axis": row.axis,
        "waits_s": row.waits,
        "peak_bytes": row.peak,
        "stage": row.stage,
        "memory": row.kinds,
    } | ({"cuda_graph": graph_in_words(row.config)} if on_gpus else {})


def _most_costs(ranks: int) -> int:
    """Return the maximum number of pass costs to measure, at about 3 ms per measurement."""
    return 2500 if ranks <= _FEW else min(1250, 200 + 2 * ranks)


def _most_effort(ranks: int) -> int:
    """Return the budget for simulations: the maximum sum of their estimated run times in ms."""
    return 3000 if ranks <= _FEW else min(6000, 500 + 5 * ranks)
