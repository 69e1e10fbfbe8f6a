"""List of the figures of a report: file names, titles, captions and charts."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from hpc3d.analyze.report import charts
from hpc3d.analyze.report.cards import any_loss
from hpc3d.analyze.report.gantt import Panels
from hpc3d.analyze.report.table_format import seconds
from hpc3d.comm.mesh import along
from hpc3d.console.sanitize import counted

if TYPE_CHECKING:
    from hpc3d.analyze.report.run_analysis import Report, RunAnalysis


_RESUMED = (
    "Each dashed vertical line marks a resumption of the run. Its label names the attempt and, if"
    " it changed, the layout."
)


# Names of the figures; a figure per mesh axis or per run also has a suffix, as in traffic-x-2.
NAMES = (
    *("loss", "runs", "speedup", "steps", "timeline", "ranks", "phases", "path", "waits"),
    *("stragglers", "traffic", "hosts", "pipeline", "experts", "memory"),
)


class Picture(NamedTuple):
    """Figure of a report: file name, title, caption and chart."""

    name: str
    title: str
    caption: str
    chart: tuple


def of_runs(report: Report) -> Iterator[Picture]:
    """Yield the figures that compare runs. For a single run, yield only the loss figure."""
    tables, runs = report.tables, charts.averaged(report.runs, report.groups)
    size = charts.common_size(report.groups)
    group = f"a group ({size})" if size else "a group of seeds"
    if any(map(any_loss, runs)):
        chart = charts.loss(runs, report.groups)
        captions = [_RESUMED] if chart.marks else []
        if chart.bands:
            seeds = "is the mean, and the band is the range of its runs"
            captions.append(f"The curve of {group} {seeds}.")
        if chart.dotted:
            captions.append("Dotted curves are validation losses.")
        if tables["scaling"] and any(each.reference for each in report.groups):
            column = "the column reference of the table Speed and scaling"
            captions.append(f"The lower panel shows the differences from the runs in {column}.")
        yield Picture("loss", "Loss by training step", " ".join(captions), chart)
    if tables["scaling"]:
        caption = (
            f"Step time breakdown, averaged over steps, ranks, and the runs of {group}. These"
            " means differ from the median step times in the tables and in the verdict."
        )
        yield Picture("runs", "Step time of each run", caption, charts.runs(runs))
    if tables["scaling"] and (speedup := charts.speedup(tables["scaling"])):
        caption = (
            "Ratio of the step times (strong scaling) or of the FLOP/s (weak scaling) to the first"
            " run."
        )
        yield Picture("speedup", "Speedup", caption, speedup)


def of_run(run: RunAnalysis) -> Iterator[Picture]:
    """Yield the nonempty figures of one run."""
    yield from _step_times(run)
    if run.timeline:
        yield Picture("timeline", f"Step {run.step}", _shown(run.timeline), run.timeline)
    caption = "Mean step time per rank. Exposed communication is the sum of wait and transfer."
    yield Picture("ranks", "Time by rank", caption, charts.ranks(run))
    caption = "Step time breakdown, averaged over steps and ranks. Calls are listed by mesh axis."
    yield Picture("phases", "Time by phase", caption, charts.phases(run.tables["time"]))
    if run.tables["path"]:
        caption = (
            f"Chain of dependent operations that determined the duration of step {run.step}. It"
            " excludes wait times."
        )
        yield Picture("path", "Critical path", caption, charts.phases(run.tables["path"]))
    if run.tables["waits"]:
        caption = "Time in calls before (wait) and after (transfer) the last member arrives."
        yield Picture("waits", "Wait and transfer time", caption, charts.waits(run))
    if any(row["imposed_s"] for row in run.tables["stragglers"]):
        caption = "Total time that the ranks that do the same work spend waiting for a rank."
        yield Picture("stragglers", "Stragglers", caption, charts.stragglers(run))
    for number, (axis, matrix) in enumerate(run.matrices.items()):
        title = f"Bytes {along(axis)}" if axis else "Bytes between ranks"
        # The axis name in a trace is not necessarily a valid file name.
        suffix = axis if re.fullmatch(r"\w*", axis, re.ASCII) else str(number)
        yield Picture(f"traffic-{suffix}".strip("-"), title, "", charts.traffic(matrix))
    if run.tables["crossing"]:
        caption = "Bytes received per step by the ranks of each host."
        yield Picture("hosts", "Bytes by host", caption, charts.host_traffic(run))
    if run.panels:
        caption = "Measured passes on the first rank of each stage, above the ideal schedule."
        yield Picture("pipeline", f"Pipeline of {run.label}", caption, Panels(run.panels))
    if run.loads:
        caption = (
            "Tokens routed to each expert, relative to the mean. White marks a balanced load."
        )
        yield Picture("experts", "Expert load", caption, charts.expert_loads(run.loads))
    memory = charts.memory(run)
    if memory.parts:
        caption = "Peak of each kind of memory. Different kinds may peak at different times."
        yield Picture("memory", "Memory by rank", caption, memory)


def _step_times(run):
    chart = charts.step_times(run)
    if sum(len(steps) for steps, _ in chart.lines.values()) > 1:
        caption = ["Time of the slowest rank, without the first step of each attempt."]
        if chart.marks:
            caption.append(_RESUMED)
        if chart.top:
            caption.append(_outliers(chart))
        yield Picture("steps", "Step time by training step", " ".join(caption), chart)


def _outliers(chart):
    """Return a sentence that describes the steps above the top of a chart of step times."""
    steps = [pair for line in chart.lines.values() for pair in zip(*line) if pair[1] > chart.top]
    step, longest = max(steps, key=lambda pair: pair[1])
    times = f"Longer than the range of the chart: {counted(len(steps), 'step')}"
    return f"{times}, at most {seconds(longest * 1e-3)} (step {step})."


def all_of(number: int, noun: str) -> str:
    """Return "the only NOUN" if `number` is 1, else "all N NOUNs"."""
    return f"the only {noun}" if number == 1 else f"all {counted(number, noun)}"


def _shown(timeline):
    if len(timeline.shown) == timeline.ranks:
        return f"{all_of(timeline.ranks, 'rank').capitalize()}."
    return (
        f"{len(timeline.shown)} of {timeline.ranks} ranks, because the step has too many events"
        " for a page: the first rank, the rank that others wait for longest, the first rank of"
        " each stage, ranks on the critical path, and evenly spaced other ranks."
    )
