"""Common in-memory representation of trace events, used by all export formats."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Events:
    """Events of a range of steps, sorted by rank and start time.

    Attributes
    ----------
    columns
        Dict from column name to an array with one value per event. The columns are the COLUMNS
        of hpc3d.analyze.export.formats, the times `start`, `end` and `posted` in ns since the
        start of the first event on any rank, and the wait time `wait` in ns.
    names
        For each column that contains codes, a dict from code to name.
    links
        Pairs of row indices, shape [links, 2]. A pair connects a send to its receive, or the last
        call posted in a collective to another call that waited for it.
    one_time
        True if the ranks share a clock. If the trace contains CPU times, `one_time` is False,
        there are no links, and `wait` is 0.
    steps
        Tuples (rank, step, start, end) with times in ns since the start of the first event.
    rows
        For each rank, the slice of event indices that contains its events.
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
