"""Charts of a report as PNG and SVG files, drawn with matplotlib.

Matplotlib is required only for figures. The extra `report` installs it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import partial, singledispatch
from io import BytesIO
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any

import numpy as np

from hpc3d.analyze.report.charts import Bars, Heat, Lines, LoadMaps
from hpc3d.analyze.report.gantt import Panels, gantt
from hpc3d.analyze.report.palette import BAND, MARK, PATH, UNRECORDED, default_style
from hpc3d.analyze.report.step_timeline import KINDS, Timeline, boxes, lanes, path, rest
from hpc3d.runtime.optional_packages import need

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH = 7.2  # figure width in inches
_DATES = {"svg": "Date", "pdf": "CreationDate"}  # metadata that would differ between two files
_NARROW = 48  # maximum number of vertical bars that are drawn with gaps between them
_INSIDE, _NAMED = 4, 8  # maximum number of lines in a legend inside the panel, and above it
_DOT = 2.5  # marker size of dotted lines, which may have a single point
_LENGTH = 48  # maximum number of characters of a bar label in a figure of width WIDTH


def save(figure: Figure, path: Path, formats: Sequence[str] = ("png", "svg")) -> None:
    """Write a figure as PATH.png and so on, in all `formats`. PDF files contain their fonts.

    The output is reproducible byte for byte.
    """
    from matplotlib import rc_context

    style = {"svg.hashsalt": path.name, "pdf.fonttype": 42}  # TrueType fonts
    with default_style(), rc_context(style), warnings.catch_warnings():
        # Ignore the warning about names that are too wide for the automatic layout.
        warnings.filterwarnings("ignore", "constrained_layout not applied")
        figure.draw_without_rendering()
        figure.set_layout_engine("none")  # keep the layout for all formats
        for each in formats:
            metadata = {_DATES[each]: None} if each in _DATES else None
            figure.savefig(path.with_suffix(f".{each}"), metadata=metadata, dpi=200)


def as_png(figure: Figure) -> bytes:
    """Return a figure as the contents of a PNG file."""
    data = BytesIO()
    with default_style():
        figure.savefig(data, format="png", dpi=110)
    return data.getvalue()


def empty(
    width: float, height: float, rows: int = 1, **values: Any
) -> tuple[Figure, Sequence[Axes]]:
    """Return an empty figure of the given size in inches, and its matplotlib Axes, one per row."""
    need("a figure", "matplotlib")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots(rows, sharex=True, squeeze=False, **values)[:, 0]
    for panel in axes:
        panel.spines[["top", "right"]].set_visible(False)
        panel.set_axisbelow(True)
    return figure, axes


def draw(chart: object, width: float | None = None) -> Figure:
    """Return the figure of a chart, as `sized` does."""
    if isinstance(chart, Bars):
        chart = chart._replace(labels=_wrapped(chart.labels, _longest(width)))
    if isinstance(chart, Panels) and width:
        chart = chart._replace(width=width)
    loc = "lower center" if isinstance(chart, Panels) else "upper left"
    return sized(partial(_drawn, chart), width, loc)


def sized(
    drawn: Callable[[], Figure], width: float | None = None, loc: str = "upper left"
) -> Figure:
    """Return the figure that `drawn` returns, drawn with matplotlib's default style.

    If `width` is given, the figure has this width in inches. In narrow figures, the text is
    smaller, and long names are wrapped or shortened. `loc` is the location of a legend outside the
    panels.
    """
    from matplotlib import rc_context

    with default_style(), rc_context({"font.size": max(6, 10 * _scale(width))}):
        figure = drawn()
        if width:
            before, height = figure.get_size_inches()
            figure.set_size_inches(width, height * (width / before) ** 0.5)
        legends = [panel.get_legend() for panel in figure.axes] + figure.legends
        for texts in [legend.get_texts() for legend in legends if legend]:
            names = _wrapped([text.get_text() for text in texts], _longest(width) * 3 // 2)
            for text, name in zip(texts, names, strict=True):
                text.set_text(name)
        for legend in [*figure.legends]:
            _fit(legend, figure, loc=f"outside {loc}")
    return figure


def _scale(width):
    return 1 if width is None or width >= WIDTH else (width / WIDTH) ** 0.5


def _longest(width):
    """Return the maximum number of characters of a bar label."""
    return int(_LENGTH * _scale(width) ** 1.5)


def _wrapped(names: Sequence[str], limit: int) -> list[str]:
    """Wrap long names into two lines of `limit` characters; names that differ remain different.

    If a name is too long, parts that all names contain are removed first, such as a common mesh.
    The middle of names that are still too long is replaced by dots, unless the results are equal.
    """
    if max(map(len, names), default=0) <= limit:
        return [*names]
    parts = [name.split(", ") for name in names]
    rest = [[part for part in own if not all(part in each for each in parts)] for own in parts]
    kept = [", ".join(each) for each in (rest if all(rest) else parts)]
    found = [_lines_of(_shortened(name, 2 * limit - 3), limit) for name in kept]
    return found if len({*found}) == len({*names}) else [_lines_of(name, limit) for name in names]


def _lines_of(name, limit):
    """Break a name into lines, preferably after a comma."""
    parts = [part if len(part) > limit else part.replace(" ", "\xa0") for part in name.split(", ")]
    return fill(", ".join(parts), limit, break_on_hyphens=False).replace("\xa0", " ")


def _shortened(name, limit):
    """Replace the middle of a long name by dots. The ends of names usually differ."""
    half = (limit - 3) // 2
    return name if len(name) <= limit else f"{name[:half]}...{name[-half:]}"


def _fit(legend, figure, **style):
    """Reduce the columns of a legend until it fits into the figure; add height for its rows."""
    handles, names = legend.legend_handles, [text.get_text() for text in legend.get_texts()]
    before = legend.get_window_extent().height
    for columns in range(len(names) - 1, 0, -1):
        if legend.get_window_extent().width + figure.dpi / 8 <= figure.bbox.width:
            break
        legend.remove()
        legend = figure.legend(handles, names, ncols=columns, **_LEGEND, **style)
    width, height = figure.get_size_inches()
    added = (legend.get_window_extent().height - before) / figure.dpi
    figure.set_size_inches(width, height + added)


@singledispatch
def _drawn(chart: object) -> Figure:
    raise TypeError(chart)


@_drawn.register
def _lines(chart: Lines):
    """Draw a line plot. Later lines are thinner and dashed, so that earlier ones are visible."""
    rows = 2 if chart.lower else 1
    figure, axes = empty(WIDTH, 2.4 + 1.2 * rows, rows, height_ratios=(2, 1)[:rows])
    styles = chart.styles(4.0, 1.2)
    _draw_upper_lines(axes[0], chart, styles)
    for label, band in (chart.bands or {}).items():
        axes[0].fill_between(*band, color=styles[label].color, alpha=BAND, linewidth=0)
    for label, line in (chart.lower or {}).items():
        axes[1].plot(*line, **_drawn_with(styles[label]._replace(width=1.4)))
    if chart.top:
        axes[0].set_ylim(0, chart.top)
    if len(chart.lines) > _INSIDE or chart.marks:
        with_legend(figure, _NAMED)
    else:
        axes[0].legend(frameon=False)
    for panel, text in zip(axes, (chart.ylabel, chart.lower_ylabel)):
        panel.set_ylabel(text)
        panel.grid(color="0.9", linewidth=0.6)
        for step, text in (chart.marks or {}).items():
            panel.axvline(step - 0.5, color=MARK, linewidth=0.8, linestyle="--", zorder=0)
            if panel is axes[0]:
                where = panel.get_xaxis_transform()
                style = {"rotation": 90, "va": "top", "ha": "right", "fontsize": 7}
                panel.text(
                    step - 0.5, 0.98, _escaped(text), transform=where, color="0.35", **style
                )
    if rows == 2:
        axes[1].ticklabel_format(axis="y", scilimits=(-2, 3), useMathText=True)
    axes[-1].set_xlabel(chart.xlabel)
    axes[-1].xaxis.get_major_locator().set_params(integer=True)
    return figure


def _draw_upper_lines(panel, chart, styles):
    """Draw the lines of the upper panel; the dotted ones share an entry of the legend."""
    dotted = chart.dotted or {}
    for label, line in chart.lines.items():
        style = _drawn_with(styles[label])
        if label in dotted:
            panel.plot(*line, label="_", **style | {"ms": _DOT})  # "_" is not in the legend
        else:
            panel.plot(*line, label=_escaped(label), **style)
    for label in [*dotted][:1]:
        panel.plot([], [], label="validation", **_drawn_with(styles[label]._replace(color=MARK)))


def _drawn_with(style):
    """Return the style of a line with markers, so that isolated points are as visible as the line.

    In narrow figures, lines are thinner, as the text is smaller.
    """
    from matplotlib import rcParams

    width = style.width * min(1, rcParams["font.size"] / 10)
    line = {"linestyle": (0, style.dash)} if style.dash else {}
    return {"color": style.color, "linewidth": width, "marker": "o", "ms": width, "mew": 0} | line


def _escaped(label):
    return label.replace("$", r"\$")


@_drawn.register
def _bars(chart: Bars):
    if chart.horizontal:
        return _horizontal_bars(chart)
    figure, (panel,) = empty(WIDTH, 3.2)
    edges, bottom = np.arange(len(chart.labels) + 1) - 0.5, np.zeros(len(chart.labels))
    for part, (color, values) in chart.parts.items():
        top = bottom + values
        if len(bottom) <= _NARROW:
            panel.bar(edges[1:] - 0.5, values, bottom=bottom, color=color, label=_escaped(part))
        else:
            panel.stairs(top, edges, baseline=bottom, fill=True, color=color, label=_escaped(part))
        bottom = top
    ticks = range(0, len(bottom), 1 + (len(bottom) - 1) // 32)
    panel.set_xticks(ticks, [_escaped(chart.labels[tick]) for tick in ticks])
    panel.set_xlim(edges[0], edges[-1])
    panel.set_xlabel(chart.xlabel)
    panel.set_ylabel(chart.ylabel)
    return with_legend(figure)


def _horizontal_bars(chart):
    lines = max((label.count("\n") + 1 for label in chart.labels), default=1)
    figure, (panel,) = empty(WIDTH, 1.1 + (0.08 + 0.18 * lines) * len(chart.labels))
    left, rows = np.zeros(len(chart.labels)), range(len(chart.labels))
    for part, (color, values) in chart.parts.items():
        panel.barh(rows, values, left=left, color=color, label=_escaped(part))
        left = left + values
    panel.set_yticks(rows, [_escaped(label) for label in chart.labels])
    panel.invert_yaxis()
    panel.set_xlabel(chart.ylabel)
    return with_legend(figure)


_LEGEND = {"frameon": False, "fontsize": 8, "handlelength": 1.0, "columnspacing": 1.2}


def with_legend(figure: Figure, limit: int | None = None) -> Figure:
    """Add a legend above the panels, with the first `limit` names and the number of the others."""
    from matplotlib.lines import Line2D

    handles, names = figure.axes[0].get_legend_handles_labels()
    if limit and len(names) > limit + 1:  # "and 1 more" needs as much space as the name
        names = [*names[:limit], f"and {len(names) - limit} more"]
        handles = [*handles[:limit], Line2D([], [], linestyle="none")]
    figure.legend(handles, names, loc="outside upper left", ncols=min(len(names), 8), **_LEGEND)
    return figure


@_drawn.register
def _heat(chart: Heat):
    figure, (panel,) = empty(4.6, 4.0)
    edge = len(chart.values) * chart.ranks - 0.5
    style = {"cmap": "Blues", "vmin": 0, "interpolation": "nearest", "aspect": "equal"}
    image = panel.imshow(chart.values, extent=(-0.5, edge, edge, -0.5), **style)
    panel.set_xlabel("receiver [rank]")
    panel.set_ylabel("sender [rank]")
    for axis in (panel.xaxis, panel.yaxis):
        axis.get_major_locator().set_params(integer=True, min_n_ticks=1)
    figure.colorbar(image, label=chart.unit, shrink=0.8)
    return figure


@_drawn.register
def _load_maps(chart: LoadMaps):
    """Draw a heat map of the expert load for each layer, in two columns.

    A balanced load is white, a higher load is red, and a lower load is blue.
    """
    from matplotlib.colors import TwoSlopeNorm
    from matplotlib.figure import Figure

    columns = min(2, len(chart.maps))
    rows = -(-len(chart.maps) // columns)
    figure = Figure(figsize=(WIDTH, 0.7 + 1.8 * rows), layout="constrained")
    panels = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    highest = max(values.max() for values in chart.maps.values())
    style = {"cmap": "RdBu_r", "norm": TwoSlopeNorm(1, 0, max(2.0, highest)), "rasterized": True}
    for panel, (layer, values) in zip(panels.ravel(), chart.maps.items()):
        borders = np.arange(len(values) + 1) - 0.5
        image = panel.pcolormesh(chart.edges - 0.5, borders, values, **style)
        panel.set_title(f"layer {layer}", fontsize=9)
        panel.invert_yaxis() if panel is panels[0, 0] else None
    for panel in panels.ravel()[len(chart.maps) :]:
        panel.set_visible(False)
    for panel in panels[:, 0]:
        panel.set_ylabel("expert")
    for panel in panels[-1]:
        panel.set_xlabel("training step")
    for axis in (panels[0, 0].xaxis, panels[0, 0].yaxis):
        axis.get_major_locator().set_params(integer=True, min_n_ticks=1)
    figure.colorbar(image, ax=panels, label="load relative to the mean", shrink=0.8)
    return figure


@_drawn.register
def _panels(chart: Panels):
    return gantt(chart.panels, chart.width)


@_drawn.register
def _timeline(chart: Timeline):
    """Draw a timeline with one row per rank.

    Boxes are rasterized, because a step has too many boxes for vector graphics.
    """
    from matplotlib.collections import PolyCollection

    rows, half = len(chart.shown), 0.42 * lanes(chart.events)[1]
    figure, (panel,) = empty(10.0, 1.2 + min(8.0, max(1.0, 0.2 * rows)))
    begin, end = chart.extents.T
    style = {"height": 0.84, "color": UNRECORDED, "label": rest(chart)}
    panel.barh(range(rows), end - begin, left=begin, **style)
    for kind, (left, right, row) in boxes(chart).items():
        top, bottom = row - half, row + half
        corners = [(left, top), (left, bottom), (right, bottom), (right, top)]
        style = {"facecolors": KINDS[kind], "linewidths": 0, "rasterized": True, "label": kind}
        panel.add_collection(PolyCollection(np.moveaxis(np.array(corners), -1, 0), **style))
    ticks = range(0, rows, 1 + (rows - 1) // 32)
    panel.plot(*path(chart), color=PATH, linewidth=1, label="critical path")
    panel.set_yticks(ticks, [chart.shown[tick] for tick in ticks])
    panel.set_ylim(rows - 0.5, -0.5)
    panel.set_xlim(0, chart.extents.max())
    panel.set_xlabel("time [ms]")
    panel.set_ylabel("rank")
    return with_legend(figure)
