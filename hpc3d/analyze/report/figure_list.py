"""The figures of a report, in its order: their names, titles, captions and charts."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from hpc3d.analyze.report import charts
from hpc3d.analyze.report.cards import any_loss
from hpc3d.analyze.report.gantt import Panels
from hpc3d.comm.mesh import along
from hpc3d.plain import counted

if TYPE_CHECKING:
    from hpc3d.analyze.report.run_analysis import RunAnalysis


class Picture(NamedTuple):
    """A figure: the name of its files, its title, what it shows, and what is drawn."""

    name: str
    title: str
    caption: str
    chart: tuple


def of_runs(
    runs: Sequence[RunAnalysis], tables: Mapping[str, list[dict[str, Any]]]
) -> Iterator[Picture]:
    """The pictures of several runs side by side, the first one also of a single run."""
    if any(map(any_loss, runs)):
        yield Picture("loss", "Loss by training step", "", charts.loss(runs))
    if tables["scaling"]:
        caption = "What a mean step of a mean rank is made of."
        yield Picture("runs", "Time of the runs", caption, charts.runs(runs))
    if tables["scaling"] and (speedup := charts.speedup(tables["scaling"])):
        caption = (
            "How many times as long a step of the first run takes; where ranks do as much each,"
            " the rate of floating-point operations over that of the first run."
        )
        yield Picture("speedup", "Speed-up", caption, speedup)


def of_run(run: RunAnalysis) -> Iterator[Picture]:
    """The pictures of a run that it has something for."""
    if run.timeline:
        yield Picture("timeline", f"Step {run.step}", _shown(run.timeline), run.timeline)
    caption = (
        "What the mean step of each rank is made of; wait and transfer, together exposed, are time"
        " in calls."
    )
    yield Picture("ranks", "Time by rank", caption, charts.ranks(run))
    caption = "The mean step of a mean rank, calls by the mesh axis that they go along."
    yield Picture("phases", "Time by phase", caption, charts.phases(run.tables["time"]))
    if run.tables["path"]:
        caption = f"What step {run.step} was as long as: no wait is on the critical path."
        yield Picture("path", "Critical path", caption, charts.phases(run.tables["path"]))
    if run.tables["waits"]:
        caption = "Time in calls before and after the last one who takes part has arrived."
        yield Picture("waits", "Waiting and transfer", caption, charts.waits(run))
    if any(row["imposed_s"] for row in run.tables["stragglers"]):
        caption = "Whom the others wait for, summed over all of them."
        yield Picture("stragglers", "Who is waited for", caption, charts.stragglers(run))
    for number, (axis, matrix) in enumerate(run.matrices.items()):
        title = f"Bytes {along(axis)}" if axis else "Bytes from rank to rank"
        # A trace may call an axis anything, a file not.
        end = axis if re.fullmatch(r"\w*", axis, re.ASCII) else str(number)
        yield Picture(f"traffic-{end}".strip("-"), title, "", charts.traffic(matrix))
    if run.tables["crossing"]:
        caption = "What the ranks of each host receive in a step."
        yield Picture("hosts", "Bytes by host", caption, charts.crossing(run))
    if run.panels:
        caption = "The first rank of each stage, above the schedule on an ideal clock."
        yield Picture("pipeline", f"Pipeline of {run.label}", caption, Panels(run.panels))
    if run.loads:
        caption = (
            "The choices of each expert over those of the mean one: white where the load is even."
        )
        yield Picture("experts", "Load of experts", caption, charts.expert_loads(run.loads))
    memory = charts.memory(run)
    if memory.parts:
        caption = "Peaks of the kinds, which need not be at one time."
        yield Picture("memory", "Memory by rank", caption, memory)


def all_of(number: int, noun: str) -> str:
    """All of some things: "the only rank", "all 8 ranks"."""
    return f"the only {noun}" if number == 1 else f"all {counted(number, noun)}"


def _shown(timeline):
    if len(timeline.shown) == timeline.ranks:
        return f"{all_of(timeline.ranks, 'rank').capitalize()}."
    return (
        f"{len(timeline.shown)} of {timeline.ranks} ranks, for the step has too many events for a"
        " page: the first one, the one most waited for, the first of each stage, some of those on"
        " the critical path, and others at even distances."
    )
