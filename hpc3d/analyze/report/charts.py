"""Data of a report's charts, independent of the plotting library.

plot_matplotlib draws the charts as image files; plot_bokeh draws them for the HTML page.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from itertools import cycle
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from hpc3d.analyze.attempts import resumes
from hpc3d.analyze.metrics.step import mean_row
from hpc3d.analyze.report import palette
from hpc3d.comm.grid import AXES
from hpc3d.comm.mesh import COPIES, PLANES, WORLD, along

if TYPE_CHECKING:
    from hpc3d.analyze.metrics.expert_loads import ExpertLoads
    from hpc3d.analyze.report.run_analysis import RunAnalysis
    from hpc3d.analyze.run_comparison import SeedGroup

_PARTS = {
    **dict(zip(map(along, AXES), palette.AXES, strict=True)),
    **dict(zip(map(along, PLANES), palette.PLANES, strict=True)),
    along(COPIES): palette.COPIES,
    along(WORLD): palette.WORLD,
    "compute": palette.COMPUTE,
    "comm": palette.WORK["transfer"],
    "io": palette.READING,
    "marker": palette.MARKER,
    **{name: palette.WORK[name] for name in ("wait", "copy", "optimizer", "host")},
    "unrecorded": palette.UNRECORDED,
    "recorded": palette.RECORDED,
}
_OTHER = palette.WORK["other"]
_RANK_PARTS = {
    "compute": palette.COMPUTE,
    "exposed": palette.EXPOSED,  # drawn if the wait and transfer times are unknown
    "transfer": palette.WORK["transfer"],
    "wait": palette.WORK["wait"],
    "copy": palette.WORK["copy"],
    "other": _OTHER,
    "unrecorded": palette.UNRECORDED,
}
_RANGE = ("low", "high")  # columns with the range of the losses of a group of seeds
_BARS = 16  # maximum number of ranks in the straggler chart, and of hosts in the traffic chart
_NAME_LENGTH = 32  # maximum length of a host name in charts
_UNITS = (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3), ("B", 1))
_CELLS = 256  # maximum number of rows and of columns in a heat map
_OUTLIER = 3  # ratio of a step time to the median above which the step is an outlier
_MAPS = 12  # maximum number of layers for which the expert load is shown


class LineStyle(NamedTuple):
    """Style of a line. `dash` contains the lengths of dashes and gaps in line widths."""

    color: str
    dash: tuple[int, ...]
    width: float


class Lines(NamedTuple):
    """Line plot with an optional lower panel.

    `lines` and `lower` are dicts from label to (x values, y values). `marks` is a dict from the x
    value of a vertical line to its label. If lines may `coincide`, earlier lines are thicker than
    later ones. If `top` is given, the y axis ranges from 0 to `top`. `bands` is a dict from the
    label of a line to the range around it: (x values, lower limits, upper limits). `dotted` is a
    dict from the label of a thin dotted line to the label of another line with the same color.
    """

    xlabel: str
    ylabel: str
    lines: dict
    lower_ylabel: str = ""
    lower: dict | None = None
    marks: dict | None = None
    coincide: bool = True
    top: float | None = None
    bands: dict | None = None
    dotted: dict | None = None

    def styles(self, thickest: float, thinnest: float) -> dict[str, LineStyle]:
        """Return a dict from label to style. The widths lie between the given limits."""
        dotted = self.dotted or {}
        labels = [label for label in self.lines if label not in dotted]
        widths = [max(thinnest, 1.8)] * len(labels)
        if len(labels) > 1 and self.coincide:
            widths = np.linspace(thickest, thinnest, len(labels)).tolist()
        colors, dashes = cycle(palette.RUNS), cycle(palette.DASHES)
        found = dict(zip(labels, map(LineStyle, colors, dashes, widths)))
        for label, other in dotted.items():
            found[label] = LineStyle(found[other].color, palette.DOTS, thinnest)
        return found


class Bars(NamedTuple):
    """Stacked bar chart.

    `parts` is a dict from the name of a stacked segment to a pair: a color and a list with one
    value per bar. `labels` are the labels of the bars.
    """

    xlabel: str
    ylabel: str
    labels: list
    parts: dict
    horizontal: bool = False


class Heat(NamedTuple):
    """Heat map of a traffic matrix, shape [sender, receiver], in `unit`. Empty cells are NaN.

    Each cell is the sum over a block of `ranks` x `ranks` pairs of ranks.
    """

    unit: str
    values: np.ndarray
    ranks: int


class LoadMaps(NamedTuple):
    """Load of each expert over time, relative to a balanced load.

    `maps` is a dict from layer to an array of shape [experts, columns]. Column i is the mean load
    over the steps from edges[i] (inclusive) to edges[i + 1] (exclusive).
    """

    edges: np.ndarray
    maps: dict


# Charts that compare several runs


def averaged(runs: Sequence[RunAnalysis], groups: Sequence[SeedGroup]) -> list[RunAnalysis]:
    """Return one run per group of seeds, with the mean losses and the rank tables of its runs.

    If all groups have the same number of runs, their labels omit it. See `common_size`.
    """
    found, size = [], common_size(groups)
    for group in groups:
        members = [runs[index] for index in group.runs]
        if len(members) == 1:
            found.append(members[0])
            continue
        tables = {
            name: _mean_losses([run.tables[name] for run in members])
            for name in ("loss", "evaluation", "validation")
        }
        tables["ranks"] = [row for run in members for row in run.tables["ranks"]]
        tables = members[0].tables | tables | {"attempts": []}
        label = group.label.removesuffix(f" ({size})")
        found.append(replace(members[0], label=label, tables=tables))
    return found


def common_size(groups: Sequence[SeedGroup]) -> str:
    """Return the size of all groups, such as "3 seeds", or "" if they differ."""
    sizes = {group.size for group in groups}
    return sizes.pop() if len(sizes) == 1 else ""


def _mean_losses(tables):
    """Return the mean loss and its range `low` to `high` for each step that all tables contain."""
    losses = defaultdict(list)
    for row in (row for rows in tables for row in rows):
        losses[row.get("text"), row["step"]].append(row["loss"])
    return [
        {"text": text, "step": step}
        | dict.fromkeys(("loss", *_RANGE))
        | ({} if None in each else {"loss": np.mean(each), "low": min(each), "high": max(each)})
        for (text, step), each in losses.items()
        if len(each) == len(tables)
    ]


def _band(rows):
    columns = ((np.nan if row[key] is None else row[key] for row in rows) for key in _RANGE)
    return [row["step"] for row in rows], *map(list, columns)


def loss(runs: Sequence[RunAnalysis], groups: Sequence[SeedGroup] = ()) -> Lines:
    """Return the plot of the training and validation loss curves of all runs.

    If there are several validation texts, each text has a separate curve. The names of the curves
    contain the name of the run if there are several runs. The lower panel shows the difference of
    each training loss from that of the reference of its group, or of the first run if `groups` is
    empty. It omits groups whose losses are not comparable. Groups of seeds have a band.
    """
    several = len(runs) > 1
    lines = {run.label if several else "training": _losses(run.tables["loss"]) for run in runs}
    references = _references(runs, groups)
    lower = {
        label: _difference(line, lines[references[label]])
        for label, line in lines.items()
        if label in references
    }
    ranges = {label: run.tables["loss"] for label, run in zip(lines, runs)}
    bands = {label: _band(rows) for label, rows in ranges.items() if rows and "low" in rows[0]}
    dotted = {}
    for run in runs:
        curves = _validation(run, f"{run.label}, validation" if several else "validation")
        dotted |= dict.fromkeys(curves, run.label) if several else {}
        lines |= curves
    others = {*references.values()} - {runs[0].label}
    lower_ylabel = f"difference from\nthe {'reference' if others else 'first run'} [nat]"
    chart = Lines("training step", "loss [nat per token]", lines, lower_ylabel, lower or None)
    marks = _marks(runs)
    return chart._replace(
        marks=marks, coincide=several, bands=bands or None, dotted=dotted or None
    )


def _validation(run, name):
    """Return the validation curves of a run: of all texts, and of each of several texts."""
    total, each = run.tables["evaluation"], run.tables["validation"]
    lines = {name: _losses(total)} if total else {}
    for text in dict.fromkeys(row["text"] for row in each):
        lines[f"{name} on {text}"] = _losses([row for row in each if row["text"] == text])
    return lines


def _references(runs, groups):
    """Return a dict from the label of each run in the lower panel to that of its reference."""
    if not groups:
        return {run.label: runs[0].label for run in runs[1:]}
    return {
        run.label: runs[group.reference].label
        for number, (run, group) in enumerate(zip(runs, groups, strict=True))
        if group.comparable and group.reference != number
    }


def step_times(run: RunAnalysis) -> Lines:
    """Return the plot of the step times, with one line per attempt.

    The first step of an attempt is omitted: it is a warmup, which takes longer than other steps.
    If a step exceeds _OUTLIER times the largest median of an attempt, this limit is the top of the
    chart.
    """
    names = {
        row["attempt"]: f"attempt {row['attempt']}: {row['layout']}"
        for row in run.tables["attempts"]
    }
    marks, lines = _marks([run]), defaultdict(lambda: ([], []))
    firsts = {run.tables["loss"][0]["step"], *marks}
    for row in run.tables["loss"]:
        if row["seconds"] is not None and row["step"] not in firsts:
            steps, times = lines[names.get(row["attempt"], run.label)]
            steps.append(row["step"])
            times.append(row["seconds"] * 1e3)
    limit = _OUTLIER * max([float(np.median(times)) for _, times in lines.values()], default=0)
    top = limit if any(max(times) > limit for _, times in lines.values()) else None
    chart = Lines("training step", "step time [ms]", dict(lines), marks=marks)
    return chart._replace(coincide=False, top=top)


def _marks(runs):
    """Return a dict from the first step after each resume to a label of the resume."""
    found: dict[int, str] = {}
    for run in runs:
        for step, text in resumes(run.tables["attempts"]).items():
            text = f"{run.label}: {text}" if len(runs) > 1 else text
            found[step] = f"{found[step]}; {text}" if step in found else text
    return found


def _losses(rows):
    values = [np.nan if row["loss"] is None else row["loss"] for row in rows]
    return [row["step"] for row in rows], values


def _difference(line, other):
    theirs = dict(zip(*other))
    both = [(x, value - theirs[x]) for x, value in zip(*line) if x in theirs]
    return [x for x, _ in both], [value for _, value in both]


def speedup(rows: Sequence[dict[str, Any]]) -> Lines | None:
    """Plot the speedup over the first run against the number of ranks.

    The plot has one line per layout and kind of scaling, and a line for the ideal speedup. The
    result is `None` if no line has points at two or more numbers of ranks. Rows with another
    reference than the first run are omitted.
    """
    rows = [row for row in rows if row["reference"] in (None, rows[0]["run"])]
    series = {name: line for name, line in _series(rows).items() if len({*line[0]}) > 1}
    ranks = sorted({count for numbers, _ in series.values() for count in numbers})
    ideal = {"ideal": (ranks, [count / rows[0]["ranks"] for count in ranks])}
    return Lines("ranks", "speedup over the first run", ideal | series) if series else None


def _series(rows):
    """Return a dict from the label of a series to (numbers of ranks, speedups).

    A series contains the runs of one layout with the same total work (strong scaling) or the same
    work per rank (weak scaling) as the first run. Runs that share a label are one layout. The
    first run is included in the series of its own layout, or in all series if it has a single
    rank.
    """
    labels = [row["label"] for row in rows]
    names = [each if each and labels.count(each) > 1 else "" for each in labels]
    names = [name or row["layout"] or "1 rank" for name, row in zip(names, rows)]
    first, lines = rows[0], {}
    for name, row in zip(names[1:], rows[1:]):
        if row["scaling"] != "other" and row["speedup"] is not None:
            starts = first["ranks"] == 1 or name == names[0]
            start = [first] if starts and first["speedup"] is not None else []
            lines.setdefault(f"{name}, {row['scaling']}", start).append(row)
    pairs = {
        name: sorted((row["ranks"], row["speedup"]) for row in line)
        for name, line in lines.items()
    }
    return {name: tuple(map(list, zip(*line))) for name, line in pairs.items()}


def runs(found: Sequence[RunAnalysis]) -> Bars:
    """Return a bar chart with the mean step time breakdown of each run."""
    keys = [f"{part}_s" for part in _RANK_PARTS]
    rows = [mean_row(run.tables["ranks"], keys) for run in found]
    return _of_ranks([run.label for run in found], rows)._replace(horizontal=True)


# Charts of a single run


def ranks(run: RunAnalysis) -> Bars:
    """Return a bar chart with the mean step time breakdown of each rank."""
    rows = sorted(run.tables["ranks"], key=lambda row: row["rank"])
    return _of_ranks([str(row["rank"]) for row in rows], rows)._replace(xlabel="rank")


def _of_ranks(labels, rows):
    # If wait_s and transfer_s are known, their sum exposed_s is not drawn.
    rows = [row if row["wait_s"] is None else row | {"exposed_s": None} for row in rows]
    parts = {
        part: (color, [(row[f"{part}_s"] or 0.0) * 1e3 for row in rows])
        for part, color in _RANK_PARTS.items()
    }
    return Bars("", "time per step [ms]", labels, _present(parts))


def phases(rows: Sequence[dict[str, Any]]) -> Bars:
    """Return the bar chart of the time per step and phase, stacked by category or mesh axis.

    `rows` is a breakdown by category, phase and axis.
    """
    labels = list(dict.fromkeys(row["phase"] or row["category"] for row in rows))
    parts = defaultdict(lambda: [0.0] * len(labels))
    for row in rows:
        part = along(row["axis"]) if row["axis"] else row["category"]
        parts[part][labels.index(row["phase"] or row["category"])] += row["seconds"] * 1e3
    colored = {part: (_PARTS.get(part, _OTHER), values) for part, values in parts.items()}
    return Bars("", "time per step [ms]", labels, colored, horizontal=True)


def waits(run: RunAnalysis) -> Bars:
    """Return the bar chart of the wait and transfer times by axis and operation."""
    rows = sorted(run.tables["waits"], key=lambda row: -row["blocked_s"])
    parts = {
        part: (_RANK_PARTS[part], [row[f"{part}_s"] * 1e3 for row in rows])
        for part in ("transfer", "wait")
    }
    labels = [f"{row['op'].replace('_', '-')} {along(row['axis'])}" for row in rows]
    return Bars("", "time per step [ms]", labels, parts, horizontal=True)


def stragglers(run: RunAnalysis) -> Bars:
    """Return the bar chart of the ranks that impose the longest waits on their peers."""
    rows = run.tables["stragglers"][:_BARS]
    parts = {"imposed wait": (palette.LATE, [row["imposed_s"] * 1e3 for row in rows])}
    return Bars("rank", "time per step [ms]", [str(row["rank"]) for row in rows], parts)


def expert_loads(loads: ExpertLoads) -> LoadMaps:
    """Return the heat maps of the expert load by step, one per layer.

    If there are more than _CELLS steps, consecutive steps are averaged. If there are more than
    _MAPS layers, _MAPS evenly spaced layers are shown.
    """
    width = -(-len(loads.steps) // _CELLS)
    first = np.arange(0, len(loads.steps), width)
    counts = np.diff([*first, len(loads.steps)])
    means = np.add.reduceat(loads.load, first) / counts[:, None, None]
    layers = len(loads.layers)
    shown = np.linspace(0, layers - 1, min(_MAPS, layers)).round().astype(int)
    maps = {int(loads.layers[index]): means[:, index].T for index in shown}
    return LoadMaps(np.append(loads.steps[first], loads.steps[-1] + 1), maps)


def memory(run: RunAnalysis) -> Bars:
    """Return a bar chart of each rank's peak memory by kind, in MB."""
    rows = [row for row in run.tables["memory_ranks"] if row["rank"] is not None]
    kinds = [*dict.fromkeys(key for row in rows for key in row if key not in ("rank", "all"))]
    parts = {
        kind: (palette.MEMORY.get(kind, _OTHER), [row.get(kind, 0) / 1e6 for row in rows])
        for kind in kinds
    }
    labels = [str(row["rank"]) for row in rows]
    return Bars("rank", "sum of the peaks [MB]", labels, _present(parts))


def _present(parts):
    return {part: (color, values) for part, (color, values) in parts.items() if any(values)}


def traffic(matrix: np.ndarray) -> Heat:
    """Return the heat map of the bytes sent from rank to rank.

    If there are more than _CELLS ranks, the bytes are summed over blocks of ranks.
    """
    block = -(-len(matrix) // _CELLS)
    edges = np.arange(0, len(matrix), block)
    totals = np.add.reduceat(np.add.reduceat(matrix, edges, axis=0), edges, axis=1)
    unit, size = _unit(totals.max())
    return Heat(f"{unit} per step", np.where(totals > 0, totals / size, np.nan), block)


def host_traffic(run: RunAnalysis) -> Bars:
    """Return a bar chart of the bytes that each host's ranks receive, split by origin.

    The origin is the host itself or another host. Only the _BARS hosts that receive the most bytes
    from other hosts are included.
    """
    rows = sorted(run.tables["crossing"], key=lambda row: -row["crossing"])[:_BARS]
    unit, size = _unit(max(row["bytes"] for row in rows))
    inside = [(row["bytes"] - row["crossing"]) / size for row in rows]
    parts = {
        "from this host": (palette.INSIDE, inside),
        "from other hosts": (palette.CROSSING, [row["crossing"] / size for row in rows]),
    }
    labels = [row["host"][:_NAME_LENGTH] for row in rows]
    return Bars("host", f"{unit} per step", labels, parts, horizontal=True)


def _unit(largest):
    return next(each for each in _UNITS if largest >= each[1] or each[1] == 1)
