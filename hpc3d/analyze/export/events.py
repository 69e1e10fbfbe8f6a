"""Common representation of the events of a trace for all export formats."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Events:
    """Events of a range of steps, sorted by rank and start time.

    Attributes
    ----------
    columns
        COLUMNS of hpc3d.analyze.export.formats, the times `start`, `end` and `posted` in ns since
        the start of the first event on any rank, and the duration `wait` in ns.
    names
        Dict from code to name for each column that contains codes.
    links
        Pairs of row indices, [links, 2]: a send and its receive, or a call and a call that waited
        for it.
    one_time
        True if the ranks share a clock. If the trace contains CPU time, there are no links, and
        `wait` is 0.
    steps
        Tuples (rank, step, start, end).
    rows
        Slice of the events of each rank.
    coords
        Coordinates of each rank on `axes`.
    """

    columns: dict
    names: dict
    links: np.ndarray
    one_time: bool
    steps: list
    rows: list
    groups: list
    hosts: dict
    axes: list
    coords: list
