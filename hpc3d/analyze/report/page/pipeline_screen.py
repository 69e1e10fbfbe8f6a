"""The passes of a pipeline on the screen: measured ones above those on an ideal clock."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from textwrap import fill
from typing import TYPE_CHECKING, Any

from hpc3d.analyze.report.gantt import Panels, colour_of, name_of, order_of, split_kind

if TYPE_CHECKING:
    from bokeh.model import Model

_ROW = 26  # pixels of a stage
_TOOLTIPS = [
    ("stage", "@stage"),
    ("pass", "@name"),
    ("microbatch", "@label"),
    ("begins", "@start{0,0.000} ms"),
    ("takes", "@took{0,0.000} ms"),
]


def panels(chart: Panels, empty_plot: Callable[..., Any]) -> Model:
    """A plot for each of the panels, which share their time; `empty_plot` makes a plot."""
    from bokeh.layouts import column

    plots = []
    for title, rows in chart.panels:
        plot = empty_plot(130 + _ROW * len(rows), x_axis_label="time [ms]", title=fill(title, 56))
        plot.title.update(text_font_style="normal", text_font_size="9pt")
        _draw(plot, rows)
        plots.append(plot)
    for plot in plots[1:]:
        plot.x_range = plots[0].x_range
    return column(*plots, sizing_mode="stretch_width")


def _draw(plot, rows):
    from bokeh.models import BasicTicker, ColumnDataSource, HoverTool, Range1d

    for kind, columns in sorted(_by_kind(rows).items(), key=lambda item: order_of(item[0])):
        thin = split_kind(kind)[1] in ("message", "reduce")
        red, green, blue = (round(255 * part) for part in colour_of(kind))
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
