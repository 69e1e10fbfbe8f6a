"""Tables and figure of a sweep: one row per run, and one row per combination of the axes.

Runs that differ only in the seed or the repetition are summarized by their mean and its 95 %
confidence interval. The mean of a rate is the harmonic mean. Each seed contributes one sample, the
mean over its repetitions. With a single seed, each repetition is a sample, but losses have no
interval, because repetitions do not change them. Times have no interval if there are only two
samples, because it is too wide to be useful.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from hpc3d.analyze.metrics.compare import FEWEST, half_width
from hpc3d.analyze.report.palette import RUNS
from hpc3d.analyze.report.plot_matplotlib import WIDTH, empty, save, sized, with_legend
from hpc3d.analyze.report.table_format import (
    ColumnSpec,
    digits,
    integer,
    latex,
    markdown,
    with_half_width,
    write_csv,
)
from hpc3d.config.argument_types import FIGURES
from hpc3d.console.small_files import replacing
from hpc3d.runtime.metrics_file import VALIDATION_LOSS_OF
from hpc3d.trace.file import create

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_SEED = "seed"
_LOG = 8  # minimum ratio of the largest to the smallest x value of a logarithmic x axis
_OFFSET = 0.15  # width in inches over which the lines are shifted


class _Quantity(NamedTuple):
    """Metric of a run.

    `repeated` is True if it varies between repetitions with the same seed. The mean of a `rate` is
    the harmonic mean, so that the mean rate is the work divided by the mean time.
    """

    key: str
    heading: str
    scale: float = 1
    write: Callable[[float], str] = digits
    repeated: bool = True
    rate: bool = False

    @property
    def half(self) -> str:
        """Key of the half-width of the confidence interval."""
        return f"{self.key}_ci95"

    def text(self, row: dict[str, Any]) -> str | None:
        """Format the mean and the half-width of its confidence interval, such as 5.32 ± 0.12."""
        mean, half = row[self.key], row[self.half]
        if mean is None:
            return None
        return with_half_width(mean * self.scale, half and half * self.scale, self.write)


_QUANTITIES = (
    _Quantity("loss", "loss", write="{:.4f}".format, repeated=False),
    _Quantity("validation_loss", "validation loss", write="{:.4f}".format, repeated=False),
    _Quantity("step_s", "step time [ms]", 1e3),
    _Quantity("tokens_per_s", "tokens/s", rate=True),
    _Quantity("received_bytes", "received [MB]", 1e-6),
    _Quantity("peak_bytes", "peak memory [MB]", 1e-6),
)
_DRAWN = _QUANTITIES[:3]


def _quantities(rows: Sequence[dict[str, Any]]) -> list[_Quantity]:
    """Return the metrics of a table, including the loss of each of several validation texts."""
    keys = dict.fromkeys(key for row in rows for key in row if key.startswith(VALIDATION_LOSS_OF))
    total = _QUANTITIES[1]
    texts = [
        total._replace(key=key, heading=f"{total.heading} {key.removeprefix(VALIDATION_LOSS_OF)}")
        for key in keys
    ]
    return [*_QUANTITIES[:2], *texts, *_QUANTITIES[2:]]


def summarized(
    rows: Sequence[dict[str, Any]], axes: Mapping[str, Sequence[Any]]
) -> list[dict[str, Any]]:
    """Return one row per combination of the axes, in the order of the values of each axis.

    Each row contains the number of ranks, which an axis such as a layout can set.
    For each metric KEY, the row contains the mean (KEY) and the half-width of its 95 % confidence
    interval (KEY_ci95). Unknown values are None.
    """
    groups: dict[tuple, list[dict[str, Any]]] = {values: [] for values in product(*axes.values())}
    for row in rows:
        groups[tuple(row[axis] for axis in axes)].append(row)
    found = []
    for values, group in groups.items():
        if not group:
            continue
        row = dict(zip(axes, values)) | {"ranks": group[0].get("ranks"), "runs": len(group)}
        for quantity in _quantities(rows):
            samples = _samples(quantity, group)
            mean = float(samples.mean()) if len(samples) else None
            fewest = FEWEST if quantity.repeated else 2
            half = half_width(samples) if len(samples) >= fewest else None
            if quantity.rate and mean is not None:
                mean, half = 1 / mean, half and half / mean**2
            row |= {quantity.key: mean, quantity.half: half}
        found.append(row)
    return found


def _samples(quantity: _Quantity, group: Sequence[dict[str, Any]]) -> np.ndarray:
    """Return the independent samples of a metric, or of the inverse of a rate."""
    seeds: dict[int, list[float]] = {}
    for row in group:
        value = row.get(quantity.key)
        if value or (value is not None and not quantity.rate):
            seeds.setdefault(row[_SEED], []).append(1 / value if quantity.rate else value)
    if len(seeds) == 1 and quantity.repeated:
        return np.array(*seeds.values())
    return np.array([np.mean(values) for values in seeds.values()])


def write(
    rows: Sequence[dict[str, Any]],
    axes: Mapping[str, Sequence[Any]],
    folder: Path,
    formats: Sequence[str] = FIGURES,
    width: float | None = None,
) -> str:
    """Write the tables and the figure; return the summary as a table for the terminal.

    If no axis is numeric, there is no figure, and the last line of the returned text says so.
    `axes` is a dict from each axis to its values. The formats are CSV and HDF5 for the table of
    runs; CSV, Markdown and LaTeX for the summary; and `formats` for the figure. An earlier figure
    is removed. `width` is the width of the figure in inches.
    """
    folder.mkdir(parents=True, exist_ok=True)
    write_csv(folder / "runs.csv", rows)
    _write_hdf5(folder / "runs.h5", rows)
    varied = {axis: values for axis, values in axes.items() if axis != _SEED}
    summary, names = summarized(rows, varied), [*varied]
    write_csv(folder / "summary.csv", summary)
    quantities = _quantities(rows)
    fields = _fields(summary, names, quantities)
    shown = [row | {each.key: each.text(row) for each in quantities} for row in summary]
    (folder / "summary.md").write_text(markdown(fields, shown) + "\n", encoding="utf-8")
    (folder / "summary.tex").write_text(latex(fields, shown), encoding="utf-8")
    for each in FIGURES:
        (folder / f"summary.{each}").unlink(missing_ok=True)
    if across := _across(summary, names):
        save(sized(partial(_figure, summary, names, across), width), folder / "summary", formats)
    missing = (
        "" if across else "\nno figure: the finished points have one value of each numeric axis"
    )
    return markdown(fields, shown, escape=str) + missing


def _fields(summary, axes, quantities):
    write = {axis: "{}".format if _is_numeric(summary, axis) else str for axis in axes}
    fields = [ColumnSpec(axis, axis.rpartition(".")[2], write[axis]) for axis in axes]
    if "ranks" not in axes and _varied(summary, ["ranks"]):
        fields.append(ColumnSpec("ranks", "ranks", integer))
    fields.append(ColumnSpec("runs", "runs", integer))
    known = [each for each in quantities if any(row[each.key] is not None for row in summary)]
    return [*fields, *(ColumnSpec(each.key, each.heading, "{}".format) for each in known)]


def _is_numeric(rows, axis):
    return all(isinstance(row[axis], int | float) and row[axis] is not True for row in rows)


def _write_hdf5(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Write the table of runs with one dataset per column; unknown numbers are NaN."""
    with replacing(path) as temporary, create(temporary) as (file, _):
        file.attrs["description"] = "one row per run; times in s, sizes in B"
        for key in dict.fromkeys(key for row in rows for key in row):
            values = [row.get(key) for row in rows]
            if any(isinstance(value, str | list | dict) for value in values):
                data = ["" if value is None else str(value) for value in values]
            else:
                data = [math.nan if value is None else value for value in values]
            file.create_dataset(key.replace("/", "_"), data=data)  # "/" would create a group


def _varied(summary: Sequence[dict[str, Any]], axes: Sequence[str]) -> list[str]:
    """Return the axes with several values."""
    return [axis for axis in axes if len({row[axis] for row in summary}) > 1]


def _across(summary: Sequence[dict[str, Any]], axes: Sequence[str]) -> str | None:
    """Return the axis of the figure: the first numeric axis with several values, or None."""
    return next((axis for axis in _varied(summary, axes) if _is_numeric(summary, axis)), None)


def _figure(summary: Sequence[dict[str, Any]], axes: Sequence[str], across: str) -> Figure:
    """Plot losses and step time against the axis `across`.

    The figure has one line per combination of the other axes. Lines are shifted sideways, so that
    their error bars do not cover each other.
    """
    from matplotlib.transforms import ScaledTranslation

    varied = _varied(summary, axes)
    lines: dict[str, list[dict[str, Any]]] = {}
    for row in sorted(summary, key=lambda row: row[across]):
        label = ", ".join(_named(axis, row[axis]) for axis in varied if axis != across)
        lines.setdefault(label.replace("$", r"\$"), []).append(row)
    drawn = [each for each in _DRAWN if any(row[each.key] is not None for row in summary)]
    figure, panels = empty(WIDTH, 1 + 2.4 * len(drawn), len(drawn))
    for panel, quantity in zip(panels, drawn):
        for number, (label, line) in enumerate(lines.items()):
            inches = _OFFSET * (number - (len(lines) - 1) / 2) / len(lines)
            shift = ScaledTranslation(inches, 0, figure.dpi_scale_trans)
            known = [row for row in line if row[quantity.key] is not None]
            drawing = panel.errorbar(
                [row[across] for row in known],
                [row[quantity.key] * quantity.scale for row in known],
                [(row[quantity.half] or 0) * quantity.scale for row in known],
                **{"color": RUNS[number % len(RUNS)], "marker": "o", "ms": 3, "capsize": 2},
                label=label,
            )
            for part in drawing.get_children():
                part.set_transform(panel.transData + shift)
        panel.set_ylabel(quantity.heading)
        panel.grid(color="0.9", linewidth=0.6)
    _label_x(panels[-1], across, sorted({row[across] for row in summary}))
    return with_legend(figure) if len(lines) > 1 else figure


def _named(axis: str, value: Any) -> str:
    """Format a value for the legend: a word stands alone, a number or list follows its key."""
    word = isinstance(value, str) and not value.startswith("[")
    return str(value) if word else f"{axis.rpartition('.')[2]}={value}"


def _label_x(panel, axis, values):
    if values[0] > 0 and values[-1] / values[0] >= _LOG:
        panel.set_xscale("log")
    panel.set_xticks(values, values)
    panel.minorticks_off()
    panel.set_xlabel(axis)
