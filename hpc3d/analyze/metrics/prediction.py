"""What a model predicted of a run, beside what was measured."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from hpc3d.analyze.metrics.step import ratio, slowest_seconds
from hpc3d.trace.trace_config import one_time

if TYPE_CHECKING:
    from hpc3d.trace.reader import Trace

_COLUMNS = ("quantity", "stage", "rank", "step", "value")


def prediction_rows(trace: Trace) -> list[dict[str, Any]]:
    """The rows of /prediction that are of any step, with what was measured and the ratio
    predicted / measured.

    step_s is the median over steps of the slowest rank; peak_KIND_bytes is the highest peak of a
    kind of memory on the rank.  None where the trace does not tell: older ones are without the
    peak of all kinds together, and CPU time is not that of a step.
    """
    known = _peaks(trace)
    if one_time(trace):
        known["step_s", -1] = float(np.median(slowest_seconds(trace)))
    rows = zip(*(trace.prediction[key].tolist() for key in _COLUMNS))
    return [
        {"quantity": quantity, "stage": stage, "rank": rank, "predicted": value}
        | _beside(value, known.get((quantity, rank)))
        for quantity, stage, rank, step, value in rows
        if step == -1
    ]


def _peaks(trace):
    """{(quantity, rank): bytes} of the highest peak of each kind on each rank."""
    names, peaks = trace.memory.labels("kind"), {}
    columns = (trace.memory[key].tolist() for key in ("kind", "rank", "peak"))
    for kind, rank, peak in zip(*columns):
        key = f"peak_{names.get(kind)}_bytes", rank
        peaks[key] = max(peak, peaks.get(key, 0))
    return peaks


def _beside(predicted, measured):
    return {"measured": measured, "ratio": ratio(predicted, measured)}
