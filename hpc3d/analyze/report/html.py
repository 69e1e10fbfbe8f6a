"""HTML report: a single, self-contained page that loads no other files.

Each figure is included twice: as an interactive plot for the screen and as an image for printing.
"""

from __future__ import annotations

import base64
import json
import os
import re
from collections.abc import Mapping, Sequence
from functools import partial
from html import escape
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import quote

from hpc3d import __version__
from hpc3d.analyze.citations import bibliography
from hpc3d.analyze.picture import layout_svg
from hpc3d.analyze.report import plot_bokeh, plot_matplotlib
from hpc3d.analyze.report.cards import any_loss, cards
from hpc3d.analyze.report.comparison_tables import GROUPS, over_runs
from hpc3d.analyze.report.expert_words import in_words
from hpc3d.analyze.report.figure_list import Picture, all_of
from hpc3d.analyze.report.packed_steps import packed
from hpc3d.analyze.report.palette import LAYERS
from hpc3d.analyze.report.run_tables import OF_A_RUN
from hpc3d.analyze.report.table_format import seconds
from hpc3d.analyze.report.table_notes import GENERAL, MEANING
from hpc3d.analyze.report.verdict import verdict
from hpc3d.console.sanitize import counted

if TYPE_CHECKING:
    from hpc3d.analyze.report.run_analysis import Report, RunAnalysis

_OPEN = 12  # tables with more rows are initially collapsed
IMAGES = {"png": "png", "svg": "svg+xml"}  # dict from file extension to MIME subtype
_SCRIPTS = ("state.js", "steps.js", "timeline.js", "tables.js")


class Shown(NamedTuple):
    """Figure on the HTML page.

    `placeholder` is the HTML element of the interactive plot, and `image` the data URL of the
    image for printing. Each of them is "" if it does not exist.
    """

    picture: Picture
    placeholder: str
    image: str
    name: str


def page(report: Report, pictures: Sequence[Mapping[str, Picture]], folder: Path) -> str:
    """Return the report as HTML.

    `pictures` contains dicts from file name to figure: one dict for the comparison, followed by
    one dict per run. `folder` is the folder of the image files, which may not exist.
    """
    named = {name: each for found in pictures for name, each in found.items()}
    models = {name: model for name, each in named.items() if (model := _model(name, each))}
    library, script, divs = plot_bokeh.embed(models)
    shown = [
        {each.name: _shown(name, each, divs, folder) for name, each in found.items()}
        for found in pictures
    ]
    specs = (*over_runs([run.label for run in report.runs]), *OF_A_RUN)
    compared = [report.tables] if len(report.runs) > 1 else []
    tables = [*compared, *(run.tables for run in report.runs)]
    used = {name for found in tables for name, rows in found.items() if rows}
    return _template().render(
        report=report,
        shown=shown[0],
        runs=list(zip(report.runs, shown[1:])),
        specs={spec.name: spec for spec in specs},
        bibliography=bibliography(run.config for run in report.runs),
        general=prose(GENERAL),
        definitions=[(spec, prose(MEANING[spec.name])) for spec in specs if spec.name in used],
        groups=GROUPS,
        version=__version__,
        open_rows=_OPEN,
        library=library,
        code="".join(map(_text, _SCRIPTS)),
        static=any(each.image and each.placeholder for each in shown[-1].values()),
        link=partial(_link, folder.parent),
        script=script,
        style=_text("report.css"),
    )


def _shown(name, picture, divs, folder):
    placeholder = divs.get(name, "")
    return Shown(picture, placeholder, _image(folder / name, picture, placeholder), name)


def _model(name, picture):
    """Return the Bokeh model of a figure, or None if the figure is only available as an image."""
    if type(picture.chart) not in plot_bokeh.draw.registry:
        return None
    model = plot_bokeh.draw(picture.chart)
    model.name = name
    return model


def _image(path, picture, placeholder):
    """Return the smallest image file of a figure as a data URL, or "" without a file.

    A figure without an interactive plot is drawn if it has no image file.
    """
    kinds = {path.with_suffix(f".{end}"): kind for end, kind in IMAGES.items()}
    files = [(file.read_bytes(), kind) for file, kind in kinds.items() if file.is_file()]
    if not files and not placeholder:
        files = [(plot_matplotlib.as_png(plot_matplotlib.draw(picture.chart)), "png")]
    if not files:
        return ""
    data, kind = min(files, key=lambda file: len(file[0]))
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


def _link(folder, path):
    """Return the relative URL of a file on a page in `folder`."""
    return quote(os.path.relpath(path, folder))


def _template():
    from jinja2 import Environment, StrictUndefined

    rules = {"autoescape": True, "undefined": StrictUndefined}
    made = Environment(**rules, trim_blocks=True, lstrip_blocks=True)
    made.globals |= {
        "any_loss": any_loss,
        "all_of": all_of,
        "cards": cards,
        "counted": counted,
        "example": _example,
        "in_words": in_words,
        "layout": partial(layout_svg.page, colors=LAYERS),
        "steps": _steps,
        "verdict": verdict,
    }
    return made.from_string(_text("report.html.j2"))


def _text(name):
    return (resources.files("hpc3d.analyze.report") / "page" / name).read_text(encoding="utf-8")


def prose(text: str) -> str:
    """Convert text to HTML paragraphs. Column headings in backticks are printed in bold."""
    marked = re.sub(r"`([^`]+)`", r"<b>\1</b>", escape(text, quote=False))
    return "\n".join(f"<p>{part}</p>" for part in marked.split("\n\n"))


class StepChoices(NamedTuple):
    """Steps that can be selected in the timeline.

    `choices` contains pairs (step, label), and `data` contains the timelines as JSON with "<"
    escaped.
    """

    choices: list
    data: str


def _steps(run: RunAnalysis) -> StepChoices:
    charts = [run.timeline, *run.others]
    ends = {chart.step: float(chart.extents.max()) * 1e-3 for chart in charts}
    longest = max(ends, key=ends.__getitem__)
    choices = []
    for chart in sorted(charts, key=lambda chart: chart.step):
        label = f"{chart.step}: {seconds(ends[chart.step])}"
        label += ", the longest" if chart.step == longest and len(charts) > 1 else ""
        if len(chart.shown) < chart.ranks:
            label += f", {counted(len(chart.shown), 'rank')}"
        choices.append((chart.step, label))
    data = json.dumps(packed(charts), separators=(",", ":")).replace("<", "\\u003c")
    return StepChoices(choices, data)


def _example(run: RunAnalysis) -> str:
    """Return sample input for the rank filter of the page, such as "p=0 d=0"."""
    axes = [f"{axis}=0" for axis, size in run.timeline.axes if size > 1]
    return " ".join(axes[:2]) or "0"
