"""Timelines as a picture: stages over time, measured and simulated ones on a common clock."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any, NamedTuple

from hpc3d.analyze.report.palette import REDUCTION, WORK, default_style
from hpc3d.extras import need

if TYPE_CHECKING:
    from bokeh.model import Model
    from matplotlib.figure import Figure

    from hpc3d.analyze.metrics.pass_spans import PassSpan

# {kind: (its name, its colour)}
_KINDS = {
    "F": ("forward", WORK["forward"]),
    "B": ("backward, input", WORK["backward_input"]),
    "W": ("backward, weights", WORK["backward_weight"]),
    "BW": ("backward", WORK["backward"]),
    "message": ("message", WORK["transfer"]),
    "reduce": ("reduction", REDUCTION),
    "step": ("optimiser", WORK["optimizer"]),
}
_WIDTH, _TEXT = 10.0, 5.5  # inches of a figure, points of the numbers in it
_ROW = 26  # pixels of a stage on the screen
_TOOLTIPS = [
    ("stage", "@stage"),
    ("pass", "@name"),
    ("microbatch", "@label"),
    ("begins", "@start{0,0.000} ms"),
    ("takes", "@took{0,0.000} ms"),
]


class Panels(NamedTuple):
    """Panels (title, rows) above each other; a row holds the spans of a stage."""

    panels: list


def draw_gantt(
    panels: Sequence[tuple[str, Sequence[Sequence[PassSpan]]]], path: Path | str
) -> None:
    """Write panels (title, rows) above each other as PNG; a row holds the spans of a stage."""
    with default_style():
        gantt(panels).savefig(path, dpi=200)


def gantt(panels: Sequence[tuple[str, Sequence[Sequence[PassSpan]]]]) -> Figure:
    """The figure of `draw_gantt`.  A span has the colour of its kind, lighter for later chunks;
    messages and reductions are thin, since they run beside passes."""
    everything = [span for _, rows in panels for row in rows for span in row]
    first, last = min(span[0] for span in everything), max(span[1] for span in everything)
    with default_style():
        figure, axes = _figure([(title, len(rows)) for title, rows in panels])
        axes[-1].set_xlim(first, last)
        for panel, (_, rows) in zip(axes, panels):
            for stage, row in enumerate(rows):
                for kind in sorted({span[2] for span in row}):
                    _bars(panel, stage, [span for span in row if span[2] == kind], kind)
                _labels(panel, stage, row, (last - first) / (_WIDTH * 72))
        _legend(figure, {span[2] for span in everything})
    return figure


def _figure(titles):
    """A figure with a panel for each (title, number of stages), which share their time."""
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
    """The spans of one kind on one stage."""
    height = 0.3 if _split_kind(kind)[1] in ("message", "reduce") else 0.8
    panel.broken_barh(
        [(start, end - start) for start, end, *_ in row],
        (stage - height / 2, height),
        facecolors=[_colour_of(kind)],
        edgecolors="black",
        linewidth=0.3,
        zorder=2 if height < 0.5 else 1,
    )


def _labels(panel, stage, row, seconds):
    """The text of each span into which it fits; a point is `seconds` long, or a little more."""
    for start, end, kind, label in row:
        if label and end - start > seconds * _TEXT * (0.64 * len(label) + 0.2):
            colour = "white" if sum(_colour_of(kind)) < 1.0 else "black"
            middle = (start + end) / 2
            panel.text(
                middle, stage, label, ha="center", va="center", fontsize=_TEXT, color=colour
            )


def _legend(figure, kinds):
    from matplotlib.patches import Patch

    patches = [
        Patch(facecolor=_colour_of(kind), edgecolor="black", linewidth=0.3, label=name_of(kind))
        for kind in sorted(kinds, key=_order_of)
    ]
    columns = len({_split_kind(kind)[1] for kind in kinds})
    how = {"loc": "outside lower center", "fontsize": 8, "frameon": False}
    figure.legend(handles=patches, ncols=columns, **how)


def _order_of(kind: str) -> tuple[int, int]:
    """Where a kind stands in a legend."""
    chunk, name = _split_kind(kind)
    return list(_KINDS).index(name), chunk


def name_of(kind: str) -> str:
    """A kind in words."""
    chunk, name = _split_kind(kind)
    return _KINDS[name][0] + (f", chunk {chunk}" if chunk else "")


def _split_kind(kind: str) -> tuple[int, str]:
    """The chunk of a kind, and the kind without it."""
    name = kind.lstrip("0123456789")
    return int(kind.removesuffix(name) or 0), name


def _colour_of(kind: str) -> tuple[float, ...]:
    """Red, green and blue from 0 to 1: the colour of a kind, half-way to white for each chunk."""
    chunk, name = _split_kind(kind)
    text = _KINDS[name][1]
    full = [int(text[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    return tuple(1 - (1 - part) * 0.5**chunk for part in full)


# On the screen


def on_screen(chart: Panels, empty_plot: Callable[..., Any]) -> Model:
    """The passes of a pipeline for a page: a plot for each of the panels, which share their time;
    `empty_plot` makes a plot."""
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
        red, green, blue = (round(255 * part) for part in _colour_of(kind))
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
    """{kind: columns of its passes on all stages}, times in ms."""
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
