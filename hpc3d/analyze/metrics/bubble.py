"""Idle time of pipeline stages: warmup, steady phase and drain."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from hpc3d.analyze.metrics.intervals import before

if TYPE_CHECKING:
    from hpc3d.pipeline.timeline import Row

BACKWARD = ("B", "BW")


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
