"""What is exported of a trace, whatever the format."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Events:
    """The events of some steps, sorted by rank and start, and whose they are.

    `columns` are COLUMNS (hpc3d.analyze.export.formats) and the times `start`, `end`, `posted` and
    `wait`, in ns from the first start on any rank; `names` are {code: name} of the columns that
    hold codes.  `links` are pairs of rows, [links, 2]: a send and its receive, and a call that
    others waited for and each of those that did.  Where ranks have no time in common (`one_time`),
    because they counted their CPU time, there are no links, and wait is 0.  `steps` are (rank,
    step, begin, end), `rows` the slice of each rank, `coords` its
    coordinates on `axes`.
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
