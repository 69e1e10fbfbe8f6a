"""Bubble and idle time of a pipelined step.

The pipeline bubble is (cost - work) / cost, where `cost` is the time from the start of the first
to the end of the last pass of a stage, and `work` this time without waits for messages; both are
maxima over stages (arXiv:2401.10241, section 5.3). `simulate` and `plan` print the same quantity.
The ideal bubble is the bubble of the schedule with instantaneous messages and identical stages.
The idle time of a stage is the time in which it runs no pass, including waits for messages, and
also before its first pass and after its last pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from hpc3d.analyze.metrics.columns import STAGES, coordinates, overlapped, with_label
from hpc3d.analyze.metrics.intervals import before
from hpc3d.trace.schema import MESSAGES

if TYPE_CHECKING:
    from hpc3d.pipeline.timeline import Row
    from hpc3d.trace.reader import Trace

BACKWARD = ("B", "BW")


def pipeline_bubble(trace: Trace, step: int) -> float | None:
    """Return the pipeline bubble of a step, from the first rank of each stage.

    Communication within a stage counts as work. The result is `None` if a stage has no pass.
    """
    events, stage = trace.events, coordinates(trace, (STAGES,))[:, 0]
    _, first = np.unique(stage, return_index=True)
    chosen = (events["step"] == step) & (events["microbatch"] >= 0) & ~overlapped(trace)
    chosen &= np.isin(events["rank"], first) & ~with_label(events, "category", ["copy"])
    rank, start, duration = (events[name][chosen] for name in ("rank", "t_start", "dur"))
    message = with_label(events, "op", MESSAGES)[chosen]
    costs, works = [], []
    for each in first.tolist():
        passes = (rank == each) & ~message
        if not passes.any():
            return None
        begin, end = start[passes].min(), (start + duration)[passes].max()
        waits = (rank == each) & message & (start >= begin) & (start < end)
        costs.append(end - begin)
        works.append(end - begin - duration[waits].sum())
    return float(1 - max(works) / max(costs)) if max(costs) else 0.0


def bubble_rows(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return the idle time of each stage in seconds: in total, and during three periods.

    A stage is idle while it runs no pass. Idle time is counted from the start of the first pass on
    any stage to the end of the last pass on any stage. warmup_s is the idle time before the stage
    starts its first backward pass. drain_s is the idle time after the stage has completed its last
    forward pass and started its first backward pass. steady_s is the remaining idle time.

    Parameters
    ----------
    rows
        Passes of each stage in one training step of a synchronous schedule, such as
        `StepPasses.measured` of pipeline_step.py or `timeline` of hpc3d.pipeline.timeline.
    """
    first = min(row[0][0] for row in rows if row)
    last = max(end for row in rows for _, end, _ in row)
    found = []
    for stage, row in enumerate(rows):
        filled = min((start for start, _, each in row if each.op in BACKWARD), default=last)
        forwards = [end for _, end, each in row if each.op == "F"]
        edges = np.array([first, filled, max([filled, *forwards]), last])
        passes = np.array([span[:2] for span in row], float).reshape(-1, 2).T
        idle = np.diff(edges - before(passes, edges)).tolist()
        found.append(
            {"stage": stage, "span_s": float(last - first), "idle_s": sum(idle)}
            | dict(zip(("warmup_s", "steady_s", "drain_s"), idle))
        )
    return found
