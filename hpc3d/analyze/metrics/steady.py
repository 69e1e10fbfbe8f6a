"""Which steps of a run its averages are over: all but the first one that was recorded.

In the first step memory is touched for the first time, connections are made and caches are cold:
it is longer than the others, and no part of what a long run costs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from hpc3d.trace.reader import Trace
    from hpc3d.trace.table import Table


class Steady:
    """An open trace whose table of steps is without the first one, where it has others; all else
    is that of the trace."""

    def __init__(self, trace: Trace) -> None:
        step = trace.steps["step"]
        chosen = step > step.min() if np.ptp(step) else np.ones(len(step), bool)
        self.trace, self.steps = trace, Rows(trace.steps, np.flatnonzero(chosen))

    def __getattr__(self, name):
        return getattr(self.trace, name)


class Rows:
    """Some `rows` of a table."""

    def __init__(self, table: Table, rows: np.ndarray) -> None:
        self.table, self.rows = table, rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, name):
        return self.table[name][self.rows]


def averaged(steady: Steady) -> str:
    """Over which steps averages are, in words."""
    whole, steps = (
        np.unique(table["step"]).tolist() for table in (steady.trace.steps, steady.steps)
    )
    if steady.attrs.get("kind") == "simulated":
        return "of the simulated step"
    if len(whole) == 1:
        return f"of step {steps[0]} alone, the first one, which warms up; train for more steps"
    span = f"steps {steps[0]} to {steps[-1]}" if len(steps) > 1 else f"step {steps[0]}"
    return f"over {span}; step {whole[0]}, the first one, warms up and is left out"
