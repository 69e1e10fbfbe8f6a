"""A report as one HTML page that needs nothing else: no network, no other file.

The figures are there twice: for the screen, where they answer to the mouse, and for paper.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from hpc3d import __version__
from hpc3d.analyze.report import plot_bokeh
from hpc3d.analyze.report.comparison_tables import OVER_RUNS
from hpc3d.analyze.report.expert_words import in_words
from hpc3d.analyze.report.figure_list import Picture
from hpc3d.analyze.report.run_tables import OF_A_RUN
from hpc3d.analyze.report.table_format import milliseconds, percent, prefixed
from hpc3d.analyze.report.table_notes import GENERAL, MEANING

if TYPE_CHECKING:
    from hpc3d.analyze.report.run_analysis import Report, RunAnalysis

_OPEN = 12  # rows of a table that is not folded


class Shown(NamedTuple):
    """A picture on the page: its place on the screen, if it has one, and its image for paper."""

    picture: Picture
    place: str
    image: str
    name: str


def page(report: Report, pictures: Sequence[Mapping[str, Picture]], folder: Path) -> str:
    """The text of the page.

    `pictures` are those over all runs and then those of each run, whose files lie in `folder`.
    """
    named = {name: each for found in pictures for name, each in found.items()}
    models = {name: model for name, each in named.items() if (model := _model(name, each))}
    library, script, places = plot_bokeh.embed(models)
    shown = [
        {
            each.name: Shown(each, places.get(name, ""), _image(folder / name), name)
            for name, each in found.items()
        }
        for found in pictures
    ]
    return _template().render(
        report=report,
        shown=shown[0],
        runs=list(zip(report.runs, shown[1:])),
        specs={spec.name: spec for spec in (*OVER_RUNS, *OF_A_RUN)},
        general=prose(GENERAL),
        definitions=[(spec, prose(MEANING[spec.name])) for spec in (*OVER_RUNS, *OF_A_RUN)],
        cards=cards,
        counted=_counted,
        in_words=in_words,
        version=__version__,
        open_rows=_OPEN,
        example=_example,
        library=library,
        code=_text("timeline.js"),
        script=script,
        style=_text("report.css"),
    )


def _model(name, picture):
    """What answers to the mouse, if the picture has such a form."""
    if type(picture.chart) not in plot_bokeh.draw.registry:
        return None
    model = plot_bokeh.draw(picture.chart)
    model.name = name
    return model


def _image(path):
    """The smaller one of a figure's files as an address that contains it."""
    kinds = {path.with_suffix(".svg"): "svg+xml", path.with_suffix(".png"): "png"}
    smaller = min(kinds, key=lambda file: file.stat().st_size)
    data = base64.b64encode(smaller.read_bytes()).decode()
    return f"data:image/{kinds[smaller]};base64,{data}"


def _template():
    from jinja2 import Environment, StrictUndefined

    rules = {"autoescape": True, "undefined": StrictUndefined}
    made = Environment(**rules, trim_blocks=True, lstrip_blocks=True)
    return made.from_string(_text("report.html.j2"))


def _text(name):
    return (resources.files("hpc3d.analyze.report") / "page" / name).read_text(encoding="utf-8")


def prose(text: str) -> str:
    """A text as HTML: paragraphs, and headings between `."""
    return "\n".join(f"<p>{_marked(part)}</p>" for part in text.split("\n\n"))


def _marked(text):
    return re.sub(r"`([^`]+)`", r"<b>\1</b>", escape(text, quote=False))


# The numbers that one looks for first


def cards(run: RunAnalysis) -> Iterator[tuple[str, str, str]]:
    """(title, value, what belongs to it) of a run."""
    tables = run.tables
    step, work = tables["step"][0], tables["efficiency"][0]
    yield "step", f"{milliseconds(step['step_s_median'])} ms", _spread(step)
    yield "tokens/s", _written(step["tokens_per_s"], prefixed), f"{step['ranks']} ranks"
    communication = _written(step["communication_share"], percent)
    yield "communication", communication, _waiting(tables["ranks"])
    if stages := tables["pipeline"]:
        yield "bubble", percent(_mean(stages, "idle_share")), _simulated(stages)
    imbalance = tables["imbalance"][0]
    yield "imbalance", _written(imbalance["imbalance"], "{:.3f}".format), "most / mean computation"
    if tables["stragglers"]:
        yield "straggler", *_straggler(tables["stragglers"])
    if work["mfu"] is not None:
        yield "MFU", percent(work["mfu"]), f"HFU {percent(work['hfu'])}"
    else:
        yield "FLOP/s", _written(work["recorded_flop_per_s"], prefixed), "products and attention"
    yield "memory", *_memory(tables["memory_ranks"])
    last = tables["loss"][-1]
    yield "loss", _written(last["loss"], "{:.4f}".format), f"nat a token after step {last['step']}"
    if tables["evaluation"]:
        last = tables["evaluation"][-1]
        loss = _written(last["loss"], "{:.4f}".format)
        yield "validation", loss, f"nat a token after step {last['step']}"


def _counted(number: int, noun: str) -> str:
    """All of some things: "the only rank", "all 8 ranks"."""
    return f"the only {noun}" if number == 1 else f"all {number} {noun}s"


def _straggler(rows):
    """The rank that is slower than the others by more than chance, if there is one."""
    named = [row for row in rows if row["straggler"] == "yes"]
    if not named:
        return "none", "no rank is slower by more than chance"
    imposed = f"others wait {milliseconds(named[0]['imposed_s'])} ms for it"
    return f"rank {named[0]['rank']}", imposed


def _memory(rows):
    """What the fullest rank held at one time; in older traces the sum of the kinds' peaks."""
    *ranks, total = rows
    if "all" in total:
        most = max(ranks, key=lambda row: row["all"])
        return f"{prefixed(most['all'])}B", f"at one time on rank {most['rank']}, the fullest"
    peaks = sum(value for key, value in total.items() if key != "rank")
    return f"{prefixed(peaks)}B", "peaks of all kinds and ranks"


def _written(value, write):
    return "unknown" if value is None else write(value)


def _spread(row):
    return f"{milliseconds(row['step_s_min'])} to {milliseconds(row['step_s_max'])}"


def _mean(rows, key):
    return sum(row[key] for row in rows) / len(rows)


def _waiting(ranks):
    step = _mean(ranks, "step_s")
    outstanding = f"computing, a call outstanding {percent(_mean(ranks, 'outstanding_s') / step)}"
    if ranks[0]["wait_s"] is None:
        return outstanding
    return f"waiting {percent(_mean(ranks, 'wait_s') / step)}; {outstanding}"


def _simulated(stages):
    if stages[0]["idle_share_simulated"] is None:
        return "idle share of the stages"
    return f"{percent(_mean(stages, 'idle_share_simulated'))} on an ideal clock"


def _example(run: RunAnalysis) -> str:
    """Some of a run's ranks, as they are written to choose them."""
    axes = [f"{axis}=0" for axis, size in run.timeline.axes if size > 1]
    return " ".join(axes[:2]) or "0"
