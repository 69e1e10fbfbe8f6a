"""Interactive charts of a report, drawn with Bokeh. The page embeds Bokeh's JavaScript library.

Plots use Bokeh's canvas backend, because WebGL takes seconds per frame without a GPU.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from functools import singledispatch
from textwrap import fill
from typing import TYPE_CHECKING

import numpy as np

from hpc3d.analyze.report.charts import Bars, Heat, Lines
from hpc3d.analyze.report.gantt import Panels, color_of, is_thin, name_of, order_of
from hpc3d.analyze.report.palette import BAND, MARK, PATH, UNRECORDED
from hpc3d.analyze.report.step_timeline import KINDS, Timeline, lanes, rest

if TYPE_CHECKING:
    from bokeh.model import Model

_TOOLS = "pan,box_zoom,reset,save"
_TICKS = 32  # maximum number of labels on a rank axis
_ROW, _STAGE_ROW = 14, 26  # height in pixels of a row in a timeline and in a Gantt chart
# page/timeline.js replaces @rank{all} with the details of the event.
_TOOLTIP = '<div style="white-space: pre-line">@rank{all}</div>'
_PASS_TOOLTIPS = [
    ("stage", "@stage"),
    ("pass", "@name"),
    ("microbatch", "@label"),
    ("start", "@start{0,0.000} ms"),
    ("duration", "@took{0,0.000} ms"),
]


def embed(models: Mapping[str, Model]) -> tuple[str, str, Mapping[str, str]]:
    """Return Bokeh's library code, a script that draws the models, and their HTML placeholders."""
    from bokeh.document import Document
    from bokeh.embed import components
    from bokeh.resources import Resources

    document = Document()
    with document.models.freeze():  # otherwise, each root visits the models of all roots again
        for model in models.values():
            document.add_root(model)
    script, divs = components(models)
    library = Resources(mode="inline", components=["bokeh"]).render_js()
    return library, script, divs


def _plot(height, **values):
    from bokeh.plotting import figure

    plot = figure(height=height, sizing_mode="stretch_width", tools=_TOOLS, **values)
    plot.toolbar.update(logo=None, autohide=True)
    # The plot is transparent, because page/state.js sets the background color of the page.
    plot.update(outline_line_color=None, background_fill_color=None, border_fill_color=None)
    plot.axis.axis_label_text_font_style = "normal"
    plot.axis.minor_tick_line_color = None
    return plot


@singledispatch
def draw(chart: object) -> Model:
    """Return the Bokeh model of a chart."""
    raise TypeError(chart)


@draw.register
def _lines(chart: Lines):
    from bokeh.layouts import column

    styles = chart.styles(6, 1.5)
    names = len(chart.lines) - len(chart.dotted or {})
    upper = _panel(chart, chart.ylabel, chart.lines, styles, 290 + 24 * names)
    if chart.top:
        upper.y_range.update(start=0, end=chart.top)
    for label, band in (chart.bands or {}).items():
        upper.varea(*band, fill_color=styles[label].color, fill_alpha=BAND)
    _legend(upper, "vertical")
    _mark(upper, chart.marks or {}, labeled=True)
    if not chart.lower:
        return upper
    lower = _panel(chart, chart.lower_ylabel, chart.lower, styles, 200)
    lower.x_range, lower.legend.visible = upper.x_range, False
    _mark(lower, chart.marks or {}, labeled=False)
    return column(upper, lower, sizing_mode="stretch_width")


def _mark(plot, marks, labeled):
    """Draw a vertical line before each step in `marks`, with its label at the top of the plot."""
    from bokeh.models import Label, Node, Span

    top = Node(target="frame", symbol="top", offset=4)
    for step, text in marks.items():
        line = {"line_color": MARK, "line_dash": "dashed", "level": "underlay"}
        plot.add_layout(Span(location=step - 0.5, dimension="height", **line))
        if labeled:
            style = {"text_color": MARK, "text_font_size": "9pt", "text_baseline": "bottom"}
            style |= {"angle": -90, "angle_units": "deg", "x_offset": 4}
            plot.add_layout(Label(x=step - 0.5, y=top, text=text, **style))


def _panel(chart, ylabel, lines, styles, height):
    from bokeh.models import BasicTicker, HoverTool

    plot = _plot(height, x_axis_label=chart.xlabel, y_axis_label=ylabel)
    plot.xaxis.ticker = BasicTicker(min_interval=1)
    # Later lines are thinner and dashed, so that earlier lines under them remain visible.
    for label, (numbers, values) in lines.items():
        color, dash, width = styles[label]
        entry = (chart.dotted or {}).get(label, label)  # hides both lines when it is clicked
        line = {"color": color, "legend_label": entry, "name": label}
        dash = [round(length * width) for length in dash]
        plot.line(numbers, values, line_width=width, line_dash=dash, **line)
        plot.scatter(numbers, values, size=3 + width, **line)
    tooltips = [("", "$name"), (chart.xlabel, "@x{0}"), (ylabel, "@y{0.0000[00]}")]
    plot.add_tools(HoverTool(tooltips=tooltips))
    return plot


@draw.register
def _bars(chart: Bars):
    from bokeh.models import ColumnDataSource, HoverTool

    names, positions = list(chart.parts), np.arange(len(chart.labels))
    values = {part: values for part, (_, values) in chart.parts.items()}
    source = ColumnDataSource({"position": positions, "label": chart.labels, **values})
    style = {"fill_color": [color for color, _ in chart.parts.values()], "source": source}
    style |= {"line_color": None, "legend_label": names}
    if chart.horizontal:
        rows = len(positions)
        plot = _plot(90 + 26 * rows, x_axis_label=chart.ylabel, y_range=_range(rows))
        plot.x_range.start = 0
        plot.hbar_stack(names, y="position", height=0.8, **style)
        _label(plot.yaxis[0], chart.labels)
    else:
        plot = _plot(340, x_axis_label=chart.xlabel, y_axis_label=chart.ylabel)
        plot.y_range.start = 0
        plot.vbar_stack(names, x="position", width=0.8 if len(positions) < 200 else 1, **style)
        _label(plot.xaxis[0], chart.labels)
    plot.add_tools(HoverTool(tooltips=[("", "@label"), ("$name", "@$name{0,0.00[0]}")]))
    return _legend(plot)


def _range(rows):
    """Return an axis range with the first row at the top."""
    from bokeh.models import Range1d

    return Range1d(rows - 0.5, -0.5)


def _label(axis, labels):
    """Label the positions 0, 1, 2, ... of an axis, or an evenly spaced subset of them."""
    from bokeh.models import FixedTicker

    shown = range(0, len(labels), 1 + (len(labels) - 1) // _TICKS)
    axis.ticker = FixedTicker(ticks=list(shown))
    axis.major_label_overrides = {index: str(labels[index]) for index in shown}


def _legend(plot, orientation="horizontal"):
    """Move the legend above the plot. Clicking on a legend entry hides or shows its glyphs."""
    legend = plot.legend[0]
    plot.add_layout(legend, "above")
    legend.update(orientation=orientation, location="left", click_policy="hide")
    legend.update(border_line_color=None, label_text_font_size="9pt")
    spacing = 12 if orientation == "horizontal" else 0
    legend.update(padding=2, spacing=spacing, margin=0, background_fill_color=None)
    return plot


@draw.register
def _heat(chart: Heat):
    from bokeh.models import BasicTicker, ColorBar, HoverTool, LinearColorMapper
    from bokeh.palettes import Blues256

    edge = len(chart.values) * chart.ranks
    ranges = {"x_range": (-0.5, edge - 0.5), "y_range": (edge - 0.5, -0.5)}
    names = {"x_axis_label": "receiver [rank]", "y_axis_label": "sender [rank]"}
    plot = _plot(460, match_aspect=True, **ranges, **names)
    plot.axis.ticker = BasicTicker(min_interval=1)
    high = float(np.nanmax(chart.values))
    colors = LinearColorMapper(Blues256[::-1], low=0, high=high, nan_color="#00000000")
    plot.image([chart.values.astype("f4")], x=-0.5, y=-0.5, dw=edge, dh=edge, color_mapper=colors)
    plot.add_layout(
        ColorBar(color_mapper=colors, title=chart.unit, background_fill_color=None), "right"
    )
    tooltips = [("from rank", "$y{0}"), ("to rank", "$x{0}"), (chart.unit, "@image{0,0.000}")]
    plot.add_tools(HoverTool(tooltips=tooltips))
    return plot


@draw.register
def _panels(chart: Panels):
    from bokeh.layouts import column

    plots = []
    for title, rows in chart.panels:
        height = 130 + _STAGE_ROW * len(rows)
        plot = _plot(height, x_axis_label="time [ms]", title=fill(title, 56))
        plot.title.update(text_font_style="normal", text_font_size="9pt")
        _draw_passes(plot, rows)
        plots.append(_legend(plot))
    for plot in plots[1:]:
        plot.x_range = plots[0].x_range
    return column(*plots, sizing_mode="stretch_width")


def _draw_passes(plot, rows):
    from bokeh.models import BasicTicker, ColumnDataSource, HoverTool

    for kind, columns in sorted(_by_kind(rows).items(), key=lambda item: order_of(item[0])):
        red, green, blue = (round(255 * channel) for channel in color_of(kind))
        plot.hbar(
            y="stage",
            left="start",
            right="end",
            height=0.3 if is_thin(kind) else 0.8,
            color=f"#{red:02X}{green:02X}{blue:02X}",
            line_color="#40404080",
            line_width=0.5,
            source=ColumnDataSource(columns),
            legend_label=name_of(kind),
            level="annotation" if is_thin(kind) else "glyph",
        )
    plot.y_range = _range(len(rows))
    plot.yaxis.axis_label, plot.yaxis.ticker = "stage", BasicTicker(min_interval=1)
    plot.add_tools(HoverTool(tooltips=_PASS_TOOLTIPS))


def _by_kind(rows):
    """Group spans by kind. Return a dict from kind to a dict of columns, with times in ms."""
    found = defaultdict(lambda: defaultdict(list))
    for stage, row in enumerate(rows):
        for start, end, kind, label in row:
            values = {"stage": stage, "start": start * 1e3, "end": end * 1e3}
            values |= {"label": label or "-", "took": (end - start) * 1e3, "name": name_of(kind)}
            for key, value in values.items():
                found[kind][key].append(value)
    return found


@draw.register
def _timeline(chart: Timeline):
    """Create an empty timeline plot with one row per rank.

    page/steps.js adds the events of the selected step. When an event is clicked, page/timeline.js
    shows the details of the event and the ranks that are involved.
    """
    from bokeh.models import ColumnDataSource, CustomJS, WheelZoomTool

    height = 140 + min(900, max(160, _ROW * len(chart.shown)))
    ranges = {"x_range": (0, float(chart.extents.max())), "y_range": _range(len(chart.shown))}
    plot = _plot(height, x_axis_label="time [ms]", **ranges)
    plot.yaxis.axis_label, plot.yaxis.major_label_text_font_size = "rank", "7pt"
    zoom = WheelZoomTool(dimensions="width")
    plot.add_tools(zoom)
    plot.toolbar.update(active_scroll=zoom, autohide=False)
    _label(plot.yaxis[0], chart.shown)
    background = ColumnDataSource({key: [] for key in ("rank", "row", "start", "end")})
    source = ColumnDataSource({key: [] for key in ("row", "kind", "waited", *chart.events)})
    # The background of each row makes unrecorded time visible.
    box = {"y": "row", "left": "start", "right": "end", "height": 0.84}
    style = {"color": UNRECORDED, "line_color": None, "legend_label": rest(chart)}
    plot.hbar(**box, **style, source=background)
    _draw_boxes(plot, source, chart)
    path = ColumnDataSource({key: [] for key in ("time", "rank", "row")})
    style = {"line_width": 2, "line_color": PATH, "legend_label": "critical path"}
    plot.line("time", "row", source=path, name="path", **style)
    about = {"names": _names(chart), "axes": chart.axes, "peak": chart.peak}
    plot.tags = [about, source, path, background]
    clicked = CustomJS(args={"plot": plot}, code="hpc3d.clicked(plot)")
    source.selected.js_on_change("indices", clicked)
    return _legend(plot)


def _draw_boxes(plot, source, chart):
    from bokeh.models import CDSView, CustomJSHover, GroupFilter, HoverTool, TapTool

    drawn, height = [], 0.84 * lanes(chart.events)[1]
    kinds = np.unique(chart.events["kind"]).tolist()
    groups = [(*item, "until", "end", "kind", number) for number, item in enumerate(KINDS.items())]
    groups = [group for group in groups if group[-1] in kinds]
    groups.append(("wait", KINDS["wait"], "start", "until", "waited", 1))
    for kind, color, left, right, column, value in groups:
        view = CDSView(filter=GroupFilter(column_name=column, group=value))
        style = {"color": color, "line_color": None, "nonselection_alpha": 0.25}
        box = {"y": "row", "left": left, "right": right, "height": height}
        drawn.append(plot.hbar(**box, **style, source=source, view=view, legend_label=kind))
    code = "return hpc3d.lines(plot.tags[1].data, plot.tags[0], special_vars.index)"
    formatter = CustomJSHover(args={"plot": plot}, code=code)
    hover = HoverTool(tooltips=_TOOLTIP, formatters={"@rank": formatter}, renderers=drawn)
    plot.add_tools(hover, TapTool(renderers=drawn))


def _names(chart):
    return {
        key: [names.get(code, "") for code in range(1 + max(names, default=-1))]
        for key, names in chart.names.items()
    }
