"""The charts of a report as data: what is drawn, not how.

`plot_matplotlib` draws them on paper and `plot_bokeh` on the screen.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from hpc3d.analyze.report import palette
from hpc3d.comm.grid import AXES
from hpc3d.comm.mesh import PLANES, WORLD, along
from hpc3d.trace.schema import CATEGORY

if TYPE_CHECKING:
    from hpc3d.analyze.metrics.expert_loads import ExpertLoads
    from hpc3d.analyze.report.run_analysis import RunAnalysis

_CATEGORIES = {
    "compute": palette.COMPUTE,
    "comm": palette.WORK["transfer"],
    "wait": palette.WORK["wait"],
    "copy": palette.WORK["copy"],
    "optimizer": palette.WORK["optimizer"],
    "io": palette.READING,
    "host": palette.WORK["host"],
    "marker": palette.MARKER,
}
_PARTS = {
    **dict(zip(map(along, AXES), palette.AXES, strict=True)),
    **dict(zip(map(along, PLANES), palette.PLANES, strict=True)),
    along(WORLD): palette.WORLD,
    **{name: _CATEGORIES[name] for name in CATEGORY},
    "unrecorded": palette.UNRECORDED,
    "recorded": palette.RECORDED,
}
_OTHER = palette.WORK["other"]
_RANK_PARTS = {
    "compute": palette.COMPUTE,
    "exposed": palette.EXPOSED,  # where transfer and wait are not known
    "transfer": palette.WORK["transfer"],
    "wait": palette.WORK["wait"],
    "copy": palette.WORK["copy"],
    "other": _OTHER,
    "unrecorded": palette.UNRECORDED,
}
_LATE = 16  # ranks in the chart of stragglers, hosts in that of their bytes
_LETTERS = 32  # of a host's name
_UNITS = (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3), ("B", 1))
_CELLS = 256  # rows and columns of a matrix at most
_MAPS = 12  # layers whose experts are drawn at most


class Lines(NamedTuple):
    """Values by a number, such as a step: {label: (numbers, values)}.

    `below`, if there are any, are drawn on an axis of their own, `beneath`, under the others.
    """

    across: str
    down: str
    lines: dict
    beneath: str = ""
    below: dict | None = None


class Bars(NamedTuple):
    """Stacked bars, one a label: {part: (colour, values)}."""

    across: str
    down: str
    labels: list
    parts: dict
    lying: bool = False


class Heat(NamedTuple):
    """A matrix [sender, receiver] in a unit, not a number where nothing is; a cell stands for
    `ranks` by `ranks` of them."""

    unit: str
    values: np.ndarray
    ranks: int


class LoadMaps(NamedTuple):
    """The load of every expert by step, {layer: [experts, steps]}, 1 where it is even; a column
    stands for several steps where they are many, and begins at one of `edges`."""

    edges: np.ndarray
    maps: dict


# Charts of several runs


def loss(runs: Sequence[RunAnalysis]) -> Lines:
    """The loss by step, one line per run and one of its evaluations, and the difference of the
    training losses from the first run."""
    lines = {run.label: _losses(run, "loss") for run in runs}
    first = lines[runs[0].label]
    below = {run.label: _less(lines[run.label], first) for run in runs[1:]}
    evaluated = [run for run in runs if run.tables["evaluation"]]
    lines |= {f"{run.label}, validation": _losses(run, "evaluation") for run in evaluated}
    beneath = "difference from\nthe first run [nat]"
    return Lines("training step", "loss [nat per token]", lines, beneath, below or None)


def _losses(run, table):
    """(steps, losses) of a table of a run."""
    rows = run.tables[table]
    values = [np.nan if row["loss"] is None else row["loss"] for row in rows]
    return [row["step"] for row in rows], values


def _less(line, other):
    """A line less another one, in the numbers that both have."""
    theirs = dict(zip(*other))
    both = [(at, value - theirs[at]) for at, value in zip(*line) if at in theirs]
    return [at for at, _ in both], [value for _, value in both]


def speedup(rows: Sequence[dict[str, Any]]) -> Lines | None:
    """The speed-up over the first run by the number of ranks, one line per series, and the ideal
    one; None if no series has runs on two numbers of ranks."""
    series = {name: line for name, line in _series(rows).items() if len({*line[0]}) > 1}
    ranks = sorted({count for numbers, _ in series.values() for count in numbers})
    ideal = {"ideal": (ranks, [count / rows[0]["ranks"] for count in ranks])}
    return Lines("ranks", "speed-up over the first run", ideal | series) if series else None


def _series(rows):
    """{layout and kind of scaling: (ranks, speed-ups)}: runs of one layout that do the work of the
    first one or as much a rank.  A first run on one rank begins them all."""
    first, lines = rows[0], {}
    for row in rows[1:]:
        if row["scaling"] != "other" and row["speedup"] is not None:
            name = f"{row['layout'] or '1 rank'}, {row['scaling']}"
            begins = first["ranks"] == 1 or first["layout"] == row["layout"]
            start = [first] if begins and first["speedup"] is not None else []
            lines.setdefault(name, start).append(row)
    pairs = {
        name: sorted((row["ranks"], row["speedup"]) for row in line)
        for name, line in lines.items()
    }
    return {name: tuple(map(list, zip(*line))) for name, line in pairs.items()}


def runs(found: Sequence[RunAnalysis]) -> Bars:
    """What the mean step of each run is made of."""
    labels, rows = zip(*((run.label, _mean(run.tables["ranks"])) for run in found))
    return _of_ranks([*labels], rows)._replace(lying=True)


def _mean(rows):
    """The parts of the mean of some rows, None where they are not known."""
    keys = [f"{part}_s" for part in _RANK_PARTS]
    return {
        key: None if rows[0][key] is None else sum(row[key] for row in rows) / len(rows)
        for key in keys
    }


# Charts of one run


def ranks(run: RunAnalysis) -> Bars:
    """What the mean step of each rank is made of."""
    rows = sorted(run.tables["ranks"], key=lambda row: row["rank"])
    return _of_ranks([str(row["rank"]) for row in rows], rows)._replace(across="rank")


def _of_ranks(labels, rows):
    parts = {
        part: (colour, [(_disjoint(row)[f"{part}_s"] or 0.0) * 1e3 for row in rows])
        for part, colour in _RANK_PARTS.items()
    }
    return Bars("", "time of a step [ms]", labels, _present(parts))


def _disjoint(row):
    """A row without what its wait and transfer are, if these are known."""
    return row if row["wait_s"] is None else row | {"exposed_s": None}


def phases(rows: Sequence[dict[str, Any]]) -> Bars:
    """Rows of time by category, phase and axis as bars, a phase each."""
    labels = list(dict.fromkeys(row["phase"] or row["category"] for row in rows))
    parts = defaultdict(lambda: [0.0] * len(labels))
    for row in rows:
        part = along(row["axis"]) if row["axis"] else row["category"]
        parts[part][labels.index(row["phase"] or row["category"])] += row["seconds"] * 1e3
    coloured = {part: (_PARTS.get(part, _OTHER), values) for part, values in parts.items()}
    return Bars("", "time of a step [ms]", labels, coloured, lying=True)


def waits(run: RunAnalysis) -> Bars:
    """Wait and transfer by axis and operation."""
    rows = sorted(run.tables["waits"], key=lambda row: -row["blocked_s"])
    parts = {
        part: (_RANK_PARTS[part], [row[f"{part}_s"] * 1e3 for row in rows])
        for part in ("transfer", "wait")
    }
    labels = [f"{row['op'].replace('_', '-')} {along(row['axis'])}" for row in rows]
    return Bars("", "time of a step [ms]", labels, parts, lying=True)


def stragglers(run: RunAnalysis) -> Bars:
    """The ranks that the others wait for longest."""
    rows = run.tables["stragglers"][:_LATE]
    parts = {"others wait for it": (palette.LATE, [row["imposed_s"] * 1e3 for row in rows])}
    return Bars("rank", "time of a step [ms]", [str(row["rank"]) for row in rows], parts)


def expert_loads(loads: ExpertLoads) -> LoadMaps:
    """The loads of experts by step; of many steps means, of many layers some at even distances."""
    width = -(-len(loads.steps) // _CELLS)
    first = np.arange(0, len(loads.steps), width)
    counts = np.diff([*first, len(loads.steps)])
    means = np.add.reduceat(loads.load, first) / counts[:, None, None]
    layers = len(loads.layers)
    shown = np.linspace(0, layers - 1, min(_MAPS, layers)).round().astype(int)
    maps = {int(loads.layers[place]): means[:, place].T for place in shown}
    return LoadMaps(np.append(loads.steps[first], loads.steps[-1] + 1), maps)


def memory(run: RunAnalysis) -> Bars:
    """The peak of each kind of memory by rank."""
    rows = [row for row in run.tables["memory_ranks"] if row["rank"] is not None]
    kinds = [*dict.fromkeys(key for row in rows for key in row if key not in ("rank", "all"))]
    parts = {
        kind: (palette.MEMORY.get(kind, _OTHER), [row.get(kind, 0) / 1e6 for row in rows])
        for kind in kinds
    }
    labels = [str(row["rank"]) for row in rows]
    return Bars("rank", "sum of the kinds' peaks [MB]", labels, _present(parts))


def _present(parts):
    """The parts that are anywhere more than nothing."""
    return {part: (colour, values) for part, (colour, values) in parts.items() if any(values)}


def traffic(matrix: np.ndarray) -> Heat:
    """Bytes from rank to rank; of many ranks sums over blocks of them."""
    block = -(-len(matrix) // _CELLS)
    edges = np.arange(0, len(matrix), block)
    sums = np.add.reduceat(np.add.reduceat(matrix, edges, axis=0), edges, axis=1)
    unit, size = _unit(sums.max())
    return Heat(f"{unit} of a step", np.where(sums > 0, sums / size, np.nan), block)


def crossing(run: RunAnalysis) -> Bars:
    """What the ranks of a host receive from its own and from others, of those with most of it."""
    rows = sorted(run.tables["crossing"], key=lambda row: -row["crossing"])[:_LATE]
    unit, size = _unit(max(row["bytes"] for row in rows))
    inside = [(row["bytes"] - row["crossing"]) / size for row in rows]
    parts = {
        "from this host": (palette.INSIDE, inside),
        "from other hosts": (palette.CROSSING, [row["crossing"] / size for row in rows]),
    }
    labels = [row["host"][:_LETTERS] for row in rows]
    return Bars("host", f"{unit} of a step", labels, parts, lying=True)


def _unit(largest):
    return next(each for each in _UNITS if largest >= each[1] or each[1] == 1)
