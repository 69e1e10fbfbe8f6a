"""Trace segments of ranks that wait for each other."""

import numpy as np

from hpc3d.trace.schema import CATEGORY, CLOCK_SAMPLES, EVENTS, MEMORY, OP, STEPS, record_type
from hpc3d.trace.segment import segment_path, write_segment

MS = 10**6


def segment(run, rank, number, calls, step=0):
    """Write the segment of a 100 ms step with `calls` (operation, number, start, ms)."""
    events = np.zeros(len(calls), record_type(EVENTS))
    for row, (op, seq, start, dur) in zip(events, calls, strict=True):
        row["category"], row["op"], row["seq"] = CATEGORY.index("comm"), OP.index(op), seq
        row["t_start"] = row["posted"] = start * MS
        row["dur"], row["rank"], row["step"] = dur * MS, rank, step
    steps = np.zeros(1, record_type(STEPS))
    steps["rank"], steps["step"], steps["t_end"] = rank, step, 100 * MS
    header = {"rank": rank, "groups": [{"axis": "x", "members": [0, 1]}], "world_size": 2}
    none = np.zeros(0, record_type(MEMORY)), np.zeros(0, record_type(CLOCK_SAMPLES))
    write_segment(segment_path(run, rank, number), header, [""], events, steps, *none)
