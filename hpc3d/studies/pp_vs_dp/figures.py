"""Plot the tables of findings.py, which reproduce the findings of arXiv:2407.02081."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hpc3d.analyze.report.palette import (
    BLUE,
    GRAY,
    GREEN,
    LIGHT,
    NAVY,
    ORANGE,
    PINK,
    RED,
    default_style,
)
from hpc3d.analyze.report.plot_matplotlib import WIDTH, empty, save

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.collections import QuadMesh
    from matplotlib.figure import Figure

_MEMORY = {"states": GRAY, "copies": RED, "activations": BLUE, "buffers": ORANGE}
_REASONS = {
    "bubble": "bubble",
    "messages": "messages",
    "passes": "small passes",
    "sums": "reduction",
}
_OVERLAP = {True: (GREEN, "overlapped with backward"), False: (RED, "after backward")}
_SCHEMES = {"1d": BLUE, "2d-summa": NAVY}


def write(found: Mapping[str, list[dict[str, Any]]], folder: Path) -> None:
    """Write all figures to a folder as PNG and SVG. `found` maps each table name to its rows."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, draw in _FIGURES.items():
        with default_style():
            save(draw(found), folder / name)


def races(found: Mapping[str, list[dict[str, Any]]]) -> Figure:
    """Plot the ratio of the step times of pipeline and data parallelism.

    The axes of each panel are the number of tokens per step and the hidden size.
    """
    networks = [[*group] for _, group in groupby(found["races"], lambda row: row["network"])]
    figure, panels = empty(WIDTH, 0.6 + 2.7 * len(networks), len(networks))
    for panel, rows in zip(panels, networks):
        image = _race_panel(panel, rows)
    panels[-1].set_xlabel("tokens per step")
    ticks = [0.25, 0.5, 1, 2, 4]
    text = "step time ratio, pipeline / data parallelism"
    bar = figure.colorbar(image, ax=panels, label=text, extend="both", aspect=40)
    bar.set_ticks(np.log2(ticks), labels=ticks)
    handles, names = panels[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside upper left", ncols=1, frameon=False, fontsize=8)
    return figure


def _race_panel(panel: Axes, rows: Sequence[dict[str, Any]]) -> QuadMesh:
    tokens, hidden = (sorted({row[key] for row in rows}) for key in ("tokens", "hidden"))
    ratios = np.empty((len(hidden), len(tokens)))
    for row in rows:
        size = np.log2(row["pipeline_s"] / row["data_s"])
        ratios[hidden.index(row["hidden"]), tokens.index(row["tokens"])] = size
        how = {"color": "white" if abs(size) > 1.4 else "black", "ha": "center", "va": "center"}
        panel.text(row["tokens"], row["hidden"], _cell(row), fontsize=7, **how)
    how = {"cmap": "PuOr_r", "vmin": -2, "vmax": 2}
    image = panel.pcolormesh(_edges(tokens), _edges(hidden), ratios, **how)
    if ratios.min() < 0 < ratios.max():
        panel.contour(tokens, hidden, ratios, levels=[0], colors="black", linewidths=1.8)
    panel.plot([], [], color="black", linewidth=1.8, label="equal step time")
    lines = sorted({(row["boundary"], row["hidden"]) for row in rows})
    text = "equal traffic: T = 12 L h (d-1)/d (bytes per gradient / bytes per activation)"
    panel.plot(*zip(*lines), color=GREEN, linestyle="--", linewidth=1.8, label=text)
    panel.set(xscale="log", yscale="log", title=rows[0]["network"], ylabel="hidden")
    panel.set(xlim=_edges(tokens)[[0, -1]], ylim=_edges(hidden)[[0, -1]])
    panel.set_xticks(tokens, [f"{number:,}" for number in tokens])
    panel.set_yticks(hidden, hidden)
    panel.minorticks_off()
    return image


def _edges(middles: Sequence[float]) -> np.ndarray:
    """Return the cell boundaries for the given cell centers on a logarithmic axis."""
    logs = np.log(middles)
    between = (logs[1:] + logs[:-1]) / 2
    return np.exp([2 * logs[0] - between[0], *between, 2 * logs[-1] - between[-1]])


def _cell(row: dict[str, Any]) -> str:
    """Format the step time ratio, with a reason if the faster strategy moves more bytes."""
    ratio = f"{row['pipeline_s'] / row['data_s']:.2f}"
    return f"{ratio}\n{_REASONS[row['why']]}" if row["why"] else ratio


def partitions(found: Mapping[str, list[dict[str, Any]]]) -> Figure:
    """Plot the total memory by kind and the maximum per rank against the number of stages."""
    kinds = [[*group] for _, group in groupby(found["partitions"], lambda row: row["partition"])]
    figure, panels = empty(WIDTH, 0.8 + 2.2 * len(kinds), len(kinds), sharey=True)
    for panel, rows in zip(panels, kinds):
        _partition_panel(panel, rows)
    panels[-1].set_xticks(range(len(rows)), [row["count"] for row in rows])
    panels[-1].set_xlabel("stages")
    handles, names = panels[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside upper left", ncols=3, frameon=False, fontsize=8)
    return figure


def _partition_panel(panel: Axes, rows: Sequence[dict[str, Any]]) -> None:
    xs, bottom = np.arange(len(rows)), np.zeros(len(rows))
    for part, color in _MEMORY.items():
        values = np.array([row[part] for row in rows]) / 1e9
        panel.bar(xs, values, 0.6, bottom, color=color, label=part)
        bottom = bottom + values
    how = {"color": NAVY, "linestyle": "--", "label": "closed-form estimate (without buffers)"}
    panel.hlines([_closed(row) for row in rows], xs - 0.4, xs + 0.4, **how)
    panel.plot(xs, [row["worst"] / 1e9 for row in rows], "o-", c="black", label="worst rank")
    above = {"xytext": (0, 5), "textcoords": "offset points", "ha": "center", "size": 7}
    for x, top, row in zip(xs, bottom, rows):
        panel.annotate(f"{row['in_flight']} in flight", (x, top), **above)
    panel.set(ylabel="memory [GB]", title=f"{rows[0]['partition']} partition")


def _closed(row: dict[str, Any]) -> float:
    """Return an estimate of the memory for model states, embedding copies and activations in GB.

    The activation memory follows from the closed-form number of layers in flight.
    """
    layer = row["activations"] / row["layers_held"]
    return (row["states"] + row["copies"] + row["in_flight"] * layer) / 1e9


def _messages(found: Mapping[str, list[dict[str, Any]]]) -> Figure:
    """Plot the step time against the mean message size.

    The upper panel shows gradient buckets, and the lower panel tensor-parallel collectives.
    """
    figure, (above, below) = empty(WIDTH, 5.4, 2)
    for overlap, (color, label) in _OVERLAP.items():
        rows = [row for row in found["buckets"] if row["overlap"] is overlap]
        _curve(above, rows, "step_s", color=color, label=f"step, reductions {label}")
    _half(
        above, rows, "black", "n1/2 of an all-reduce (message size at half of the peak bandwidth)"
    )
    for scheme, color in _SCHEMES.items():
        rows = [row for row in found["microbatches"] if row["scheme"] == scheme]
        _curve(below, rows, "step_s", color=color, label=f"{scheme}: step")
        _curve(below, rows, "calls_s", color=color, linestyle=":", label=f"{scheme}: calls")
        _half(below, rows, color, f"n1/2 of a {scheme} call")
    below.set(xlabel="mean message [MB]", xscale="log", yscale="log")
    for panel in (above, below):
        panel.set_ylabel("time [ms]")
        panel.grid(color="0.9", linewidth=0.6)
        panel.legend(frameon=False, fontsize=7)
    return figure


def _curve(panel: Axes, rows: Sequence[dict[str, Any]], key: str, **how: Any) -> None:
    sizes, values = (np.array([row[name] for row in rows]) for name in ("message", key))
    panel.plot(sizes / 1e6, values * 1e3, marker="o", ms=3, **how)


def _half(panel: Axes, rows: Sequence[dict[str, Any]], color: str, label: str) -> None:
    how = {"color": color, "linestyle": "--", "linewidth": 0.9}
    panel.axvline(rows[0]["half"] / 1e6, label=label, **how)


def waiting(found: Mapping[str, list[dict[str, Any]]]) -> Figure:
    """Plot rank-averaged wait and transfer times by mesh axis for pipelines with uneven stages."""
    rows = found["waiting"]
    figure, (panel,) = empty(WIDTH, 3.4)
    xs, bottom = np.arange(len(rows)), np.zeros(len(rows))
    for (axis, part), color in _parts(rows).items():
        values = np.array([row[f"{part}_s"][axis] for row in rows]) * 1e3
        panel.bar(xs, values, 0.6, bottom, color=color, label=f"{part}, {axis}")
        bottom = bottom + values
    labels = [f"{', '.join(map(str, row['stages']))}\n{row['imbalance']:+.0%}" for row in rows]
    panel.set_xticks(xs, labels)
    panel.set_xlabel("layers per stage, and excess of the largest stage over the mean")
    panel.set_ylabel("time in calls [ms]")
    panel.legend(frameon=False, fontsize=8)
    return figure


def _parts(rows: Sequence[dict[str, Any]]) -> dict[tuple[str, str], str]:
    """Return the colors of the bar segments by (axis, "wait" or "transfer").

    Segments that never exceed 0.1 % of the longest bar are omitted.
    """
    shades = {
        "transfer": dict(zip(("x", "p", "d", "world"), (NAVY, BLUE, GREEN, PINK))),
        "wait": dict(zip(("p", "world"), (LIGHT, GRAY))),
    }
    most = max(sum(row["wait_s"].values()) + sum(row["transfer_s"].values()) for row in rows)
    return {
        (axis, part): color
        for part, axes in shades.items()
        for axis, color in axes.items()
        if max(row[f"{part}_s"].get(axis, 0) for row in rows) > 1e-3 * most
    }


_FIGURES = {
    "pipeline-or-data": races,
    "partition": partitions,
    "message-size": _messages,
    "waiting": waiting,
}
