"""Wait and transfer times of calls in a simulated step, based on one rank of each stage.

As in wait_states.py, the blocking time of a call consists of the wait time, which ends when the
last member enters the call, and the transfer time after that. Ranks along a tensor or data axis
enter a call simultaneously, so ranks wait only in calls between stages. A send never waits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from statistics import fmean
from typing import Any

import numpy as np

from hpc3d.predict.machine.machine import Machine
from hpc3d.predict.simulation.count import COMM
from hpc3d.predict.simulation.simulator import StageRun
from hpc3d.studies.pp_vs_dp.experiment import resolved_config, step
from hpc3d.trace.schema import MESSAGE_CODES

_SEND, _RECV = MESSAGE_CODES
_BETWEEN = ("p", "world")
_UNEVEN = ((4, 4, 4, 4), (5, 4, 4, 3), (6, 4, 3, 3), (8, 3, 3, 2), (10, 2, 2, 2))


def waiting(
    machine: Machine,
    hidden: int = 2048,
    microbatches: int = 16,
    uneven: Sequence[Sequence[int]] = _UNEVEN,
) -> list[dict[str, Any]]:
    """Return the wait and transfer times by mesh axis for each layer partition in `uneven`.

    Times are per step in seconds, averaged over ranks.
    """
    mesh = {"p": len(uneven[0]), "d": 2, "x": 2}
    model = {"hidden": hidden, "layers": sum(uneven[0]), "sequence": 512}
    rows = []
    for stages in uneven:
        parallel = {"microbatches": microbatches, "layers_per_stage": stages, "scheme": "1d"}
        config = resolved_config(machine, mesh, 2 * microbatches, parallel, **model)
        runs, found = step(machine, config)
        blocked = by_axis(runs)
        rows.append(
            {
                "stages": [*stages],
                "imbalance": max(stages) / fmean(stages) - 1,
                "step_s": found["step_time_s"],
                "wait_s": {axis: wait for axis, (wait, _) in blocked.items()},
                "transfer_s": {axis: transfer for axis, (_, transfer) in blocked.items()},
            }
        )
    return rows


def by_axis(runs: Sequence[StageRun]) -> dict[str, tuple[float, float]]:
    """Return a dict from mesh axis to (wait time, transfer time) in s, averaged over ranks."""
    waits, transfers, last = Counter(), Counter(), _arrivals(runs)
    for run in runs:
        for row in calls(run):
            axis = run.axes[row["group"]]
            until = 0 if row["op"] == _SEND else last[_call_instance(run, row)]
            start, length = int(row["t_start"]), int(row["dur"])
            wait = max(0, min(start + length, until) - start)
            waits[axis] += wait
            transfers[axis] += length - wait
    per = 1e-9 / len(runs)
    return {axis: (waits[axis] * per, transfers[axis] * per) for axis in sorted(transfers)}


def calls(run: StageRun) -> np.ndarray:
    return run.rows[run.rows["category"] == COMM]


def _arrivals(runs: Sequence[StageRun]) -> dict[tuple, int]:
    """Map each call (`_call_instance`) to the time in ns at which the last member enters it."""
    last = {}
    for run in runs:
        for row in calls(run):
            key = _call_instance(run, row)
            last[key] = max(last.get(key, 0), int(row["posted"]))
    return last


def _call_instance(run: StageRun, row: np.void) -> tuple:
    """Return a key that identifies a collective or message on all simulated ranks.

    Along axes within a stage, one simulated rank represents all members. In this case, the key
    contains the index of this rank.
    """
    axis, rank, peer = run.axes[row["group"]], run.rank, int(row["peer"])
    ends = {_SEND: (rank, peer), _RECV: (peer, rank)}.get(int(row["op"]), ())
    here = () if axis in _BETWEEN else (rank,)
    return axis, *here, *ends, int(row["seq"])
