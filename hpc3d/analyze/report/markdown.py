"""A report as Markdown that reads well as plain text, too."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpc3d.analyze.report.comparison_tables import GROUPS, over_runs
from hpc3d.analyze.report.expert_words import in_words
from hpc3d.analyze.report.run_tables import OF_A_RUN
from hpc3d.analyze.report.table_format import in_markdown, markdown
from hpc3d.analyze.report.verdict import verdict

if TYPE_CHECKING:
    from hpc3d.analyze.report.figure_list import Picture
    from hpc3d.analyze.report.run_analysis import Report

_LINES = 20  # of what is wrong with a trace
_MEANS = (
    "Calls, times and bytes are means a rank and step, over the steps that `averages` says: all"
    " but the first one, where there are others."
)
_NOTES = {
    "pipeline": "Step {step}, on the first rank of each stage; simulated is its schedule on an"
    " ideal clock. In flight: microbatches and chunks from F to the end of B.",
    "bubble": "Step {step}: idle before the first backward pass, between, and after the last"
    " forward pass.",
    "path": "Step {step}: what it was as long as.",
}


def page(report: Report) -> str:
    """The text of a Report."""
    sections = ["# Report", _MEANS, *_listed("Before these runs are compared:", report.notes)]
    for group, keys in report.differing.items():
        title = f"They differ in {GROUPS[group]}:"
        sections += _listed(title, [f"{key}: {text}" for key, text in keys.items()])
    sections += _listed("Losses:", report.curves)
    for spec in over_runs([run.label for run in report.runs]):
        sections += _section("##", spec, report.tables[spec.name])
    for run in report.runs:
        said = in_markdown(" ".join(verdict(run.tables)))
        sections += [f"## {in_markdown(run.label)}", said, _facts(run)]
        sections += _listed("The trace is incomplete; missing are:", run.missing)
        sections += _listed("The trace contradicts itself:", run.violations)
        for spec in OF_A_RUN:
            sections += _section("###", spec, run.tables[spec.name], run.step)
    return "\n\n".join(sections) + "\n"


def _facts(run):
    return "\n".join(f"* {title}: {in_markdown(text)}" for title, text in run.about.items())


def _listed(title, lines):
    """Lines under a title, or as many as one reads."""
    shown = [f"* {in_markdown(line)}" for line in lines[:_LINES]]
    more = [f"* and {len(lines) - _LINES} more"] if len(lines) > _LINES else []
    return [title, "\n".join(shown + more)] if lines else []


def image(name: str, picture: Picture) -> str:
    """The line that shows a picture."""
    return f"![{in_markdown(picture.title)}](figures/{name}.png)\n"


def _section(level, spec, rows, step=None):
    """The table under its title, or as much of it as is shown in a text; none without rows."""
    if not rows or spec.rows_shown < 0:
        return []
    shown = rows[: spec.rows_shown or None]
    note = [_NOTES[spec.name].format(step=step)] if spec.name in _NOTES else []
    if spec.name == "expert_cost":
        note = [in_words(rows[0])]
    more = len(rows) - len(shown)
    rest = [f"{more} more rows are in tables/{spec.name}.csv."] if more else []
    narrow = spec.narrowed()
    if narrow.fields != spec.fields:
        rest.append(f"The columns of more runs are in tables/{spec.name}.csv.")
    return [f"{level} {spec.title}", *note, markdown(narrow.known(shown), shown), *rest]
