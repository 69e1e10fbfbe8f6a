"""Why the stages of a pipeline are idle: they fill, they wait, they drain."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from hpc3d.analyze.metrics.intervals import before

if TYPE_CHECKING:
    from hpc3d.pipeline.timeline import Row

BACKWARD = ("B", "BW")


def bubble_rows(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """The idle time of each stage, in seconds, in three parts that add up to it.

    `rows` are those of one training step of a synchronous schedule, as `Passes.measured` of
    pipeline_step.py and pipeline/timeline.py give them.  A stage is idle when it is in no
    pass between the first start and the last end of all stages.  warmup_s is idle before its first
    backward pass begins, drain_s after that and after its last forward pass has ended, and
    steady_s the rest.
    """
    first = min(row[0][0] for row in rows if row)
    last = max(end for row in rows for _, end, _ in row)
    found = []
    for stage, row in enumerate(rows):
        filled = min((start for start, _, what in row if what.op in BACKWARD), default=last)
        forwards = [end for _, end, what in row if what.op == "F"]
        edges = np.array([first, filled, max([filled, *forwards]), last])
        passes = np.array([span[:2] for span in row], float).reshape(-1, 2).T
        idle = np.diff(edges - before(passes, edges)).tolist()
        found.append(
            {"stage": stage, "span_s": float(last - first), "idle_s": sum(idle)}
            | dict(zip(("warmup_s", "steady_s", "drain_s"), idle))
        )
    return found
