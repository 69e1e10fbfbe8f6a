"""Report in Markdown that is also readable as plain text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from hpc3d.analyze.citations import bibliography
from hpc3d.analyze.report.comparison_tables import GROUPS, over_runs
from hpc3d.analyze.report.expert_words import in_words
from hpc3d.analyze.report.run_tables import OF_A_RUN
from hpc3d.analyze.report.table_format import in_markdown, markdown
from hpc3d.analyze.report.verdict import verdict
from hpc3d.console.sanitize import counted

if TYPE_CHECKING:
    from hpc3d.analyze.report.figure_list import Picture
    from hpc3d.analyze.report.run_analysis import Report

_LINES = 20  # maximum number of items in a list, such as the problems of a trace
_MEANS = (
    "Calls, times and bytes are averaged per rank and step over the steps in `averages`. The first"
    " step is excluded unless it is the only one."
)
_NOTES = {
    "pipeline": "Passes of step {step} on the first rank of each stage. Columns headed ideal refer"
    " to the ideal schedule. A microbatch is in flight on a model chunk from the start of its"
    " forward pass F to the end of its backward pass B or BW.",
    "bubble": "Idle time in step {step}: before the first backward pass, after the last forward"
    " pass, and in between.",
    "path": "Chain of dependent operations across ranks that determined the duration of step"
    " {step}.",
}


def page(report: Report, images: Sequence[str] = ()) -> str:
    """Return the report as Markdown text, with the texts of `images` before the bibliography."""
    sections = ["# Report", *_listed("Verdict:", report.verdict), _MEANS]
    sections += _listed("Limits of this comparison:", report.notes)
    for group, keys in report.differing.items():
        title = f"Differences in {GROUPS[group]}:"
        sections += _listed(title, [f"{key}: {text}" for key, text in keys.items()])
    for spec in over_runs([run.label for run in report.runs]):
        sections += _section("##", spec, report.tables[spec.name])
    for run in report.runs:
        summary = in_markdown(" ".join(verdict(run.tables)))
        facts = [f"* {title}: {in_markdown(text)}" for title, text in run.about.items()]
        sections += [f"## {in_markdown(run.label)}", summary, "\n".join(facts)]
        sections += _listed("The trace is incomplete. Missing:", run.missing)
        sections += _listed("The trace is inconsistent:", run.violations)
        for spec in OF_A_RUN:
            sections += _section("###", spec, run.tables[spec.name], run.step)
    sections += [each.strip() for each in images]
    if entries := bibliography(run.config for run in report.runs):
        sections += ["## Papers to cite", f"```bibtex\n{entries}\n```"]
    return "\n\n".join(sections) + "\n"


def _listed(title, lines):
    """Format `lines` as a Markdown list with a title. At most _LINES items are included."""
    shown = [f"* {in_markdown(line)}" for line in lines[:_LINES]]
    more = [f"* and {len(lines) - _LINES} more"] if len(lines) > _LINES else []
    return [title, "\n".join(shown + more)] if lines else []


def image(file: str, picture: Picture) -> str:
    """Return the Markdown line that embeds a figure, which is a file in figures/."""
    return f"![{in_markdown(picture.title)}](figures/{file})\n"


def _section(level, spec, rows, step=None):
    """Return the paragraphs of a table: title, notes and rows, truncated for a text report.

    The result is empty if the table has no rows.
    """
    if not rows or spec.rows_shown < 0:
        return []
    shown = rows[: spec.rows_shown or None]
    note = [_NOTES[spec.name].format(step=step)] if spec.name in _NOTES else []
    if spec.name == "expert_cost":
        note = [in_words(rows[0])]
    more = len(rows) - len(shown)
    rest = [f"tables/{spec.name}.csv has {counted(more, 'more row')}."] if more else []
    narrow = spec.narrowed()
    if narrow.fields != spec.fields:
        rest.append(f"The columns for the other runs are in tables/{spec.name}.csv.")
    return [f"{level} {spec.title}", *note, markdown(narrow.known(shown), shown), *rest]
