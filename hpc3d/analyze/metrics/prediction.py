"""Predicted and measured step time and memory of a run."""

from __future__ import annotations

from typing import Any

import numpy as np

from hpc3d.analyze.metrics.step import ratio, slowest_seconds
from hpc3d.trace.reader import Trace
from hpc3d.trace.trace_config import one_time

_COLUMNS = ("quantity", "stage", "rank", "step", "value")


def prediction_rows(trace: Trace) -> list[dict[str, Any]]:
    """Return the predicted and measured values of a run, and the ratio predicted / measured.

    Only predictions that apply to all steps are included. Measured values are those of the steps
    in `trace.steps`, which a report limits to `Steady`. step_s is the median step time of the
    slowest rank. peak_KIND_bytes is the highest peak of one kind of memory on a rank. Unknown
    values are `None`: older traces contain neither the name of the predicted machine nor the peak
    of the total memory, and traces with CPU times do not contain the step time.
    """
    known = _peaks(trace)
    if one_time(trace):
        known["step_s", -1] = float(np.median(slowest_seconds(trace)))
    machine = trace.prediction.attrs.get("machine")
    rows = []
    for quantity, stage, rank, step, value in zip(
        *(trace.prediction[key].tolist() for key in _COLUMNS)
    ):
        if step == -1:
            measured = known.get((quantity, rank))
            row = {"machine": machine, "quantity": quantity, "stage": stage, "rank": rank}
            row |= {"predicted": value, "measured": measured, "ratio": ratio(value, measured)}
            rows.append(row)
    return rows


def _peaks(trace):
    """Return a dict that maps tuples ("peak_KIND_bytes", rank) to the peak memory in bytes.

    Other steps may have another peak: an asynchronous pipeline is empty before its first step.
    """
    names, peaks = trace.memory.labels("kind"), {}
    chosen = np.isin(trace.memory["step"], trace.steps["step"])
    columns = (trace.memory[key][chosen].tolist() for key in ("kind", "rank", "peak"))
    for kind, rank, peak in zip(*columns):
        key = f"peak_{names.get(kind)}_bytes", rank
        peaks[key] = max(peak, peaks.get(key, 0))
    return peaks
