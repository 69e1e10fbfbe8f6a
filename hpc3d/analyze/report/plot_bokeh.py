"""Figures on the screen: the charts of a report with Bokeh, whose code lies in the page itself.

Boxes are drawn on a plain canvas: without a graphics card WebGL takes seconds a frame.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import singledispatch
from typing import TYPE_CHECKING

import numpy as np

from hpc3d.analyze.report.charts import Bars, Heat, Lines
from hpc3d.analyze.report.gantt import Panels, on_screen
from hpc3d.analyze.report.palette import PATH, RUNS, UNRECORDED
from hpc3d.analyze.report.step_timeline import KINDS, Timeline, lanes, rest

if TYPE_CHECKING:
    from bokeh.model import Model

_TOOLS = "pan,box_zoom,reset,save"
_TICKS = 32  # labels on an axis of ranks at most
_ROW = 14  # pixels of a row of a timeline
_SAID = '<div style="white-space: pre-line">@rank{all}</div>'  # what page/timeline.js says


def embed(models: Mapping[str, Model]) -> tuple[str, str, Mapping[str, str]]:
    """Bokeh's code, a script that draws the models {name: model}, and {name: its place}."""
    from bokeh.embed import components
    from bokeh.resources import Resources

    script, places = components(models)
    library = Resources(mode="inline", components=["bokeh"]).render_js()
    return library, script, places


def _plot(height, **values):
    from bokeh.plotting import figure

    plot = figure(height=height, sizing_mode="stretch_width", tools=_TOOLS, **values)
    plot.toolbar.update(logo=None, autohide=True)
    # page/state.js gives them the ground of the page.
    plot.update(outline_line_color=None, background_fill_color=None, border_fill_color=None)
    plot.axis.axis_label_text_font_style = "normal"
    plot.axis.minor_tick_line_color = None
    return plot


@singledispatch
def draw(chart: object) -> Model:
    """The Bokeh model of a chart."""
    raise TypeError(chart)


@draw.register
def _lines(chart: Lines):
    from bokeh.layouts import column

    colours = {label: RUNS[at % len(RUNS)] for at, label in enumerate(chart.lines)}
    upper = _panel(chart.across, chart.down, chart.lines, colours, 290 + 20 * len(chart.lines))
    _legend(upper, "vertical")
    if not chart.below:
        return upper
    lower = _panel(chart.across, chart.beneath, chart.below, colours, 200)
    lower.x_range, lower.legend.visible = upper.x_range, False
    return column(upper, lower, sizing_mode="stretch_width")


def _panel(across, down, lines, colours, height):
    from bokeh.models import BasicTicker, HoverTool

    plot = _plot(height, x_axis_label=across, y_axis_label=down)
    plot.xaxis.ticker = BasicTicker(min_interval=1)
    # Of lines that lie on each other the last is the thinnest, so that all are seen.
    widths = np.linspace(6, 1.5, len(lines)) if len(lines) > 1 else [2]
    for width, (label, (numbers, values)) in zip(widths, lines.items()):
        line = {"color": colours[label], "legend_label": label, "name": label}
        plot.line(numbers, values, line_width=width, **line)
        plot.scatter(numbers, values, size=3 + width, **line)
    what = [("", "$name"), (across, "@x{0}"), (down, "@y{0.0000[00]}")]
    plot.add_tools(HoverTool(tooltips=what))
    return plot


@draw.register
def _bars(chart: Bars):
    from bokeh.models import ColumnDataSource, HoverTool

    names, places = list(chart.parts), np.arange(len(chart.labels))
    values = {part: values for part, (_, values) in chart.parts.items()}
    source = ColumnDataSource({"place": places, "label": chart.labels, **values})
    how = {"fill_color": [colour for colour, _ in chart.parts.values()], "source": source}
    how |= {"line_color": None, "legend_label": names}
    if chart.lying:
        plot = _plot(90 + 26 * len(places), x_axis_label=chart.down, y_range=_range(len(places)))
        plot.x_range.start = 0
        plot.hbar_stack(names, y="place", height=0.8, **how)
        _label(plot.yaxis[0], chart.labels)
    else:
        plot = _plot(340, x_axis_label=chart.across, y_axis_label=chart.down)
        plot.y_range.start = 0
        plot.vbar_stack(names, x="place", width=0.8 if len(places) < 200 else 1, **how)
        _label(plot.xaxis[0], chart.labels)
    plot.add_tools(HoverTool(tooltips=[("", "@label"), ("$name", "@$name{0,0.00[0]}")]))
    return _legend(plot)


def _range(rows):
    """Rows from above to below."""
    from bokeh.models import Range1d

    return Range1d(rows - 0.5, -0.5)


def _label(axis, labels):
    """Write labels, or as many as fit, at 0, 1, 2 ... of an axis."""
    from bokeh.models import FixedTicker

    places = range(0, len(labels), 1 + (len(labels) - 1) // _TICKS)
    axis.ticker = FixedTicker(ticks=list(places))
    axis.major_label_overrides = {place: str(labels[place]) for place in places}


def _legend(plot, orientation="horizontal"):
    """The legend above the plot; a click on a name hides what it names."""
    legend = plot.legend[0]
    plot.add_layout(legend, "above")
    legend.update(orientation=orientation, location="left", click_policy="hide")
    legend.update(border_line_color=None, label_text_font_size="9pt")
    legend.update(padding=2, spacing=12, margin=0, background_fill_color=None)
    return plot


@draw.register
def _heat(chart: Heat):
    from bokeh.models import BasicTicker, ColorBar, HoverTool, LinearColorMapper
    from bokeh.palettes import Blues256

    edge = len(chart.values) * chart.ranks
    sides = {"x_range": (-0.5, edge - 0.5), "y_range": (edge - 0.5, -0.5)}
    names = {"x_axis_label": "receiver [rank]", "y_axis_label": "sender [rank]"}
    plot = _plot(460, match_aspect=True, **sides, **names)
    plot.axis.ticker = BasicTicker(min_interval=1)
    high = float(np.nanmax(chart.values))
    colours = LinearColorMapper(Blues256[::-1], low=0, high=high, nan_color="#00000000")
    plot.image([chart.values.astype("f4")], x=-0.5, y=-0.5, dw=edge, dh=edge, color_mapper=colours)
    plot.add_layout(
        ColorBar(color_mapper=colours, title=chart.unit, background_fill_color=None), "right"
    )
    what = [("from rank", "$y{0}"), ("to rank", "$x{0}"), (chart.unit, "@image{0,0.000}")]
    plot.add_tools(HoverTool(tooltips=what))
    return plot


@draw.register
def _panels(chart: Panels):
    plot = on_screen(chart, _plot)
    for each in plot.children:
        _legend(each)
    return plot


@draw.register
def _timeline(chart: Timeline):
    """One row per rank, empty until page/steps.js gives it a step.  A click shows what a box is
    and who took part in it: page/timeline.js."""
    from bokeh.models import ColumnDataSource, CustomJS, WheelZoomTool

    height = 140 + min(900, max(160, _ROW * len(chart.shown)))
    sides = {"x_range": (0, float(chart.extents.max())), "y_range": _range(len(chart.shown))}
    plot = _plot(height, x_axis_label="time [ms]", **sides)
    plot.yaxis.axis_label, plot.yaxis.major_label_text_font_size = "rank", "7pt"
    zoom = WheelZoomTool(dimensions="width")
    plot.add_tools(zoom)
    plot.toolbar.update(active_scroll=zoom, autohide=False)
    _label(plot.yaxis[0], chart.shown)
    whole = ColumnDataSource({key: [] for key in ("rank", "row", "start", "end")})
    source = ColumnDataSource({key: [] for key in ("row", "kind", "waited", *chart.events)})
    _draw_rest(plot, whole, chart)
    _draw_boxes(plot, source, chart)
    path = _draw_path(plot)
    about = {"names": _names(chart), "axes": chart.axes, "peak": chart.peak}
    plot.tags = [about, source, path.data_source, whole]
    clicked = CustomJS(args={"plot": plot}, code="hpc3d.clicked(plot)")
    source.selected.js_on_change("indices", clicked)
    return _legend(plot)


def _draw_rest(plot, source, chart):
    """A box as long as the step under those of each rank: what it shows through is the rest."""
    where = {"y": "row", "left": "start", "right": "end", "height": 0.84}
    how = {"color": UNRECORDED, "line_color": None, "legend_label": rest(chart)}
    plot.hbar(**where, **how, source=source)


def _draw_boxes(plot, source, chart):
    """The boxes of each kind, those of waits by the flag `waited`, and what is said of them."""
    from bokeh.models import CDSView, CustomJSHover, GroupFilter, HoverTool, TapTool

    drawn, height = [], 0.84 * lanes(chart.events)[1]
    kinds = np.unique(chart.events["kind"]).tolist()
    groups = [(*item, "until", "end", "kind", number) for number, item in enumerate(KINDS.items())]
    groups = [group for group in groups if group[-1] in kinds]
    groups.append(("wait", KINDS["wait"], "start", "until", "waited", 1))
    for kind, colour, left, right, column, value in groups:
        view = CDSView(filter=GroupFilter(column_name=column, group=value))
        how = {"color": colour, "line_color": None, "nonselection_alpha": 0.25}
        where = {"y": "row", "left": left, "right": right, "height": height}
        drawn.append(plot.hbar(**where, **how, source=source, view=view, legend_label=kind))
    code = "return hpc3d.lines(plot.tags[1].data, plot.tags[0], special_vars.index)"
    written = CustomJSHover(args={"plot": plot}, code=code)
    hover = HoverTool(tooltips=_SAID, formatters={"@rank": written}, renderers=drawn)
    plot.add_tools(hover, TapTool(renderers=drawn))


def _draw_path(plot):
    """The line of the critical path, over the boxes."""
    from bokeh.models import ColumnDataSource

    source = ColumnDataSource({key: [] for key in ("time", "rank", "row")})
    how = {"line_width": 2, "line_color": PATH, "legend_label": "critical path"}
    return plot.line("time", "row", source=source, name="path", **how)


def _names(chart):
    """{column: [name of code 0, of code 1 ...]}."""
    return {
        key: [names.get(code, "") for code in range(1 + max(names, default=-1))]
        for key, names in chart.names.items()
    }
