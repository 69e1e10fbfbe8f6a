"""Gantt charts of pipeline schedules, drawn with matplotlib.

The measured and the simulated schedule are drawn in separate panels that share a time axis.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, NamedTuple

from hpc3d.analyze.report.palette import REDUCTION, WORK, default_style
from hpc3d.runtime.optional_packages import need

if TYPE_CHECKING:
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
_WIDTH, _MARGINS = 10.0, 0.5  # width of a figure, and of the margins of its panels, in inches
_TEXT = 5.5  # font size of the labels in points


class Panels(NamedTuple):
    """Gantt chart panels (title, rows) from top to bottom, with one row per pipeline stage.

    `width` is the width of the figure in inches.
    """

    panels: list
    width: float = _WIDTH


def draw_gantt(
    panels: Sequence[tuple[str, Sequence[Sequence[PassSpan]]]], path: Path | str
) -> None:
    """Write a Gantt chart as a PNG file. `panels` is a list of (title, rows)."""
    with default_style():
        gantt(panels).savefig(path, dpi=200)


def gantt(
    panels: Sequence[tuple[str, Sequence[Sequence[PassSpan]]]], width: float = _WIDTH
) -> Figure:
    """Return a Gantt chart with one panel per (title, rows) and one row of spans per stage.

    Each kind of span has its own color, which is lighter for later model chunks. Messages and
    reductions run concurrently with passes and are drawn as thin bars. `width` is the width of the
    figure in inches.
    """
    all_spans = [span for _, rows in panels for row in rows for span in row]
    first, last = min(span[0] for span in all_spans), max(span[1] for span in all_spans)
    figure, axes = _figure([(title, len(rows)) for title, rows in panels], width)
    axes[-1].set_xlim(first, last)
    for panel, (_, rows) in zip(axes, panels):
        for stage, row in enumerate(rows):
            for kind in sorted({span[2] for span in row}):
                _bars(panel, stage, [span for span in row if span[2] == kind], kind)
            _labels(panel, stage, row, (last - first) / ((width - _MARGINS) * 72))
    _legend(figure, {span[2] for span in all_spans})
    return figure


def _figure(titles, width):
    """Create a figure with one panel per (title, number of stages) and a shared time axis."""
    need("a figure", "matplotlib")
    from matplotlib import rcParams
    from matplotlib.figure import Figure

    size = min(9, rcParams["font.size"])
    columns = int((width - _MARGINS) * 72 / (0.6 * size))
    titles = [(fill(title.replace("$", r"\$"), columns), stages) for title, stages in titles]
    heights = [0.6 + 0.26 * stages for _, stages in titles]
    figure = Figure(figsize=(width, 0.8 + sum(heights)), layout="constrained")
    axes = figure.subplots(len(titles), sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    for panel, (title, stages) in zip(axes, titles):
        panel.set_title(title, loc="left", fontsize=size)
        panel.set_ylabel("stage")
        panel.set_ylim(stages - 0.5, -0.5)
        panel.set_yticks(range(0, stages, 1 + stages // 17))
        panel.spines[["top", "right"]].set_visible(False)
    axes[-1].set_xlabel("time [s]")
    return figure, axes


def _bars(panel, stage, row, kind):
    height = 0.3 if is_thin(kind) else 0.8
    panel.broken_barh(
        [(start, end - start) for start, end, *_ in row],
        (stage - height / 2, height),
        facecolors=[color_of(kind)],
        edgecolors="black",
        linewidth=0.3,
        zorder=2 if height < 0.5 else 1,
    )


def _labels(panel, stage, row, seconds):
    """Label each span that is wide enough for its text.

    `seconds` is the approximate duration represented by one point (1/72 inch) of figure width.
    """
    for start, end, kind, label in row:
        if label and end - start > seconds * _TEXT * (0.64 * len(label) + 0.2):
            color = "white" if sum(color_of(kind)) < 1.0 else "black"
            middle = (start + end) / 2
            panel.text(middle, stage, label, ha="center", va="center", fontsize=_TEXT, color=color)


def _legend(figure, kinds):
    from matplotlib import rcParams
    from matplotlib.patches import Patch

    patches = [
        Patch(facecolor=color_of(kind), edgecolor="black", linewidth=0.3, label=name_of(kind))
        for kind in sorted(kinds, key=order_of)
    ]
    columns = len({_split_kind(kind)[1] for kind in kinds})
    style = {"loc": "outside lower center", "fontsize": min(8, rcParams["font.size"])}
    figure.legend(handles=patches, ncols=columns, frameon=False, **style)


def order_of(kind: str) -> tuple[int, int]:
    """Return the sort key that orders kinds of spans in the legend."""
    chunk, name = _split_kind(kind)
    return list(_KINDS).index(name), chunk


def name_of(kind: str) -> str:
    """Return the legend label of a kind of span."""
    chunk, name = _split_kind(kind)
    return _KINDS[name][0] + (f", chunk {chunk}" if chunk else "")


def is_thin(kind: str) -> bool:
    """Return True for kinds of spans that overlap passes and are therefore drawn as thin bars."""
    return _split_kind(kind)[1] in ("message", "reduce")


def _split_kind(kind: str) -> tuple[int, str]:
    """Split a kind of span, such as 1BW, into the model chunk index 1 and the base kind BW."""
    name = kind.lstrip("0123456789")
    return int(kind.removesuffix(name) or 0), name


def color_of(kind: str) -> tuple[float, ...]:
    """Return the color of a kind of span as RGB components from 0 to 1.

    The color of each model chunk is halfway between the color of the previous chunk and white.
    """
    chunk, name = _split_kind(kind)
    text = _KINDS[name][1]
    full = [int(text[index : index + 2], 16) / 255 for index in (1, 3, 5)]
    return tuple(1 - (1 - channel) * 0.5**chunk for channel in full)
