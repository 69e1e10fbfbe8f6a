"""Events of a trace in the form that all export formats use."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Events:
    """Events of some steps, sorted by rank and start.

    Attributes
    ----------
    columns
        COLUMNS of hpc3d.analyze.export.formats, and the times `start`, `end`, `posted` and `wait`
        in ns since the first start on any rank.
    names
        {code: name} of each column that holds codes.
    links
        Pairs of rows, [links, 2]: a send and its receive, or a call and a call that waited for it.
    one_time
        True if the ranks share a clock. With CPU time, there are no links, and `wait` is 0.
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
