"""Exclusion of the first recorded step from averages.

During the first step, memory is touched for the first time, connections are opened and caches are
cold. Therefore, the first step takes longer than other steps and is not representative.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from hpc3d.trace.reader import Trace
    from hpc3d.trace.table import Table


class Steady:
    """View of an open trace whose step table excludes the first step if there are other steps."""

    def __init__(self, trace: Trace) -> None:
        step = trace.steps["step"]
        chosen = step > step.min() if np.ptp(step) else np.ones(len(step), bool)
        self.trace, self.steps = trace, Rows(trace.steps, np.flatnonzero(chosen))

    def __getattr__(self, name):
        return getattr(self.trace, name)


class Rows:
    """View of a table that is limited to the given row indices."""

    def __init__(self, table: Table, rows: np.ndarray) -> None:
        self.table, self.rows = table, rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, name):
        return self.table[name][self.rows]


def averaged(steady: Steady) -> str:
    """Return a phrase that states which steps are included in averages."""
    recorded, steps = (
        np.unique(table["step"]).tolist() for table in (steady.trace.steps, steady.steps)
    )
    if steady.attrs.get("kind") == "simulated":
        return "of the simulated step"
    if len(recorded) == 1:
        return f"only the warmup step {steps[0]}; train for more steps to exclude it"
    span = f"steps {steps[0]} to {steps[-1]}" if len(steps) > 1 else f"step {steps[0]}"
    return f"over {span}, without the warmup step {recorded[0]}"
