"""Gantt charts of pipeline schedules, as matplotlib figures or Bokeh plots for the HTML page.

The measured and the simulated schedule are separate panels with a common time axis.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any, NamedTuple

from hpc3d.analyze.report.palette import REDUCTION, WORK, default_style
from hpc3d.runtime.optional_packages import need

if TYPE_CHECKING:
    from bokeh.model import Model
    from matplotlib.figure import Figure

    from hpc3d.analyze.metrics.pass_spans import PassSpan

# Dict from kind of span to (name, color).
_KINDS = {
    "F": ("forward", WORK["forward"]),
    "B": ("backward, input", WORK["backward_input"]),
    "W": ("backward, weights", WORK["backward_weight"]),
    "BW": ("backward", WORK["backward"]),
    "message": ("message", WORK["transfer"]),
    "reduce": ("reduction", REDUCTION),
    "step": ("optimizer", WORK["optimizer"]),
}
_WIDTH, _TEXT = 10.0, 5.5  # figure width in inches, font size of the labels in points
_ROW = 26  # height of a stage's row on the HTML page in pixels
_TOOLTIPS = [
    ("stage", "@stage"),
    ("pass", "@name"),
    ("microbatch", "@label"),
    ("start", "@start{0,0.000} ms"),
    ("duration", "@took{0,0.000} ms"),
]


class Panels(NamedTuple):
    """Gantt chart panels (title, rows) from top to bottom, with one row per pipeline stage."""

    panels: list


def draw_gantt(
    panels: Sequence[tuple[str, Sequence[Sequence[PassSpan]]]], path: Path | str
) -> None:
    """Write a Gantt chart as a PNG file. `panels` is a list of (title, rows)."""
    with default_style():
        gantt(panels).savefig(path, dpi=200)


def gantt(panels: Sequence[tuple[str, Sequence[Sequence[PassSpan]]]]) -> Figure:
    """Return a Gantt chart with one panel per (title, rows) and one row of spans per stage.

    Each kind of span has its own color, which is lighter for later model chunks. Messages and
    reductions run concurrently with passes and are drawn as thin bars.
    """
    all_spans = [span for _, rows in panels for row in rows for span in row]
    first, last = min(span[0] for span in all_spans), max(span[1] for span in all_spans)
    with default_style():
        figure, axes = _figure([(title, len(rows)) for title, rows in panels])
        axes[-1].set_xlim(first, last)
        for panel, (_, rows) in zip(axes, panels):
            for stage, row in enumerate(rows):
                for kind in sorted({span[2] for span in row}):
                    _bars(panel, stage, [span for span in row if span[2] == kind], kind)
                _labels(panel, stage, row, (last - first) / (_WIDTH * 72))
        _legend(figure, {span[2] for span in all_spans})
    return figure


def _figure(titles):
    """Create a figure with one panel per (title, number of stages) and a shared time axis."""
    need("a figure", "matplotlib")
    from matplotlib.figure import Figure

    heights = [0.6 + 0.26 * stages for _, stages in titles]
    figure = Figure(figsize=(_WIDTH, 0.8 + sum(heights)), layout="constrained")
    axes = figure.subplots(len(titles), sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    for panel, (title, stages) in zip(axes, titles):
        panel.set_title(title.replace("$", r"\$"), loc="left", fontsize=9)
        panel.set_ylabel("stage")
        panel.set_ylim(stages - 0.5, -0.5)
        panel.set_yticks(range(0, stages, 1 + stages // 17))
        panel.spines[["top", "right"]].set_visible(False)
    axes[-1].set_xlabel("time [s]")
    return figure, axes


def _bars(panel, stage, row, kind):
    """Draw all spans of the same kind on one pipeline stage."""
    height = 0.3 if _split_kind(kind)[1] in ("message", "reduce") else 0.8
    panel.broken_barh(
        [(start, end - start) for start, end, *_ in row],
        (stage - height / 2, height),
        facecolors=[_color_of(kind)],
        edgecolors="black",
        linewidth=0.3,
        zorder=2 if height < 0.5 else 1,
    )


def _labels(panel, stage, row, seconds):
    """Label each span that is wide enough for its text.

    `seconds` is the approximate time span that corresponds to a width of one point.
    """
    for start, end, kind, label in row:
        if label and end - start > seconds * _TEXT * (0.64 * len(label) + 0.2):
            color = "white" if sum(_color_of(kind)) < 1.0 else "black"
            middle = (start + end) / 2
            panel.text(middle, stage, label, ha="center", va="center", fontsize=_TEXT, color=color)


def _legend(figure, kinds):
    from matplotlib.patches import Patch

    patches = [
        Patch(facecolor=_color_of(kind), edgecolor="black", linewidth=0.3, label=name_of(kind))
        for kind in sorted(kinds, key=_order_of)
    ]
    columns = len({_split_kind(kind)[1] for kind in kinds})
    style = {"loc": "outside lower center", "fontsize": 8, "frameon": False}
    figure.legend(handles=patches, ncols=columns, **style)


def _order_of(kind: str) -> tuple[int, int]:
    """Return the sort key that determines the position of a kind of span in the legend."""
    chunk, name = _split_kind(kind)
    return list(_KINDS).index(name), chunk


def name_of(kind: str) -> str:
    """Return the name of a kind of span for the legend."""
    chunk, name = _split_kind(kind)
    return _KINDS[name][0] + (f", chunk {chunk}" if chunk else "")


def _split_kind(kind: str) -> tuple[int, str]:
    """Split a kind of span, such as 1BW, into the model chunk index 1 and the base kind BW."""
    name = kind.lstrip("0123456789")
    return int(kind.removesuffix(name) or 0), name


def _color_of(kind: str) -> tuple[float, ...]:
    """Return the color of a kind of span as RGB components from 0 to 1.

    The color of each model chunk is twice as close to white as the color of the previous chunk.
    """
    chunk, name = _split_kind(kind)
    text = _KINDS[name][1]
    full = [int(text[index : index + 2], 16) / 255 for index in (1, 3, 5)]
    return tuple(1 - (1 - channel) * 0.5**chunk for channel in full)


# Gantt charts on the HTML page


def on_screen(chart: Panels, empty_plot: Callable[..., Any]) -> Model:
    """Return the Bokeh model of a Gantt chart, with one plot per panel and a shared time axis.

    Parameters
    ----------
    empty_plot
        Function that creates an empty plot of a given height in pixels.
    """
    from bokeh.layouts import column

    plots = []
    for title, rows in chart.panels:
        plot = empty_plot(130 + _ROW * len(rows), x_axis_label="time [ms]", title=fill(title, 56))
        plot.title.update(text_font_style="normal", text_font_size="9pt")
        _draw_passes(plot, rows)
        plots.append(plot)
    for plot in plots[1:]:
        plot.x_range = plots[0].x_range
    return column(*plots, sizing_mode="stretch_width")


def _draw_passes(plot, rows):
    from bokeh.models import BasicTicker, ColumnDataSource, HoverTool, Range1d

    for kind, columns in sorted(_by_kind(rows).items(), key=lambda item: _order_of(item[0])):
        thin = _split_kind(kind)[1] in ("message", "reduce")
        red, green, blue = (round(255 * channel) for channel in _color_of(kind))
        plot.hbar(
            y="stage",
            left="start",
            right="end",
            height=0.3 if thin else 0.8,
            color=f"#{red:02X}{green:02X}{blue:02X}",
            line_color="#40404080",
            line_width=0.5,
            source=ColumnDataSource(columns),
            legend_label=name_of(kind),
            level="glyph" if not thin else "annotation",
        )
    plot.y_range = Range1d(len(rows) - 0.5, -0.5)
    plot.yaxis.axis_label, plot.yaxis.ticker = "stage", BasicTicker(min_interval=1)
    plot.add_tools(HoverTool(tooltips=_TOOLTIPS))


def _by_kind(rows):
    """Return a dict from kind of span to the columns of these spans, with times in ms."""
    found = defaultdict(lambda: defaultdict(list))
    for stage, row in enumerate(rows):
        for start, end, kind, label in row:
            values = {
                "stage": stage,
                "start": start * 1e3,
                "end": end * 1e3,
                "label": label or "-",
            }
            values |= {"took": (end - start) * 1e3, "name": name_of(kind)}
            for key, value in values.items():
                found[kind][key].append(value)
    return found
