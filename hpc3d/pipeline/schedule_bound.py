"""Lower bound on the makespan of pipeline schedules with one chunk per stage and a memory limit.

The bound counts passes.  In every schedule, the k-th F (or B) of a stage starts after certain
numbers of F, B and W passes have ended.  If another pass precedes it in every schedule, at least
the passes between the two run in between, one after the other.  Microbatches are identical, so
their order does not matter.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate
from math import inf
from typing import NamedTuple

import numpy as np

from hpc3d.pipeline.timeline import Cost

ROUNDING = 1e-9  # relative tolerance of memory limits and times


class StageMemory(NamedTuple):
    """Memory of the saved data of a stage, in bytes or another unit.

    `saved` is the size of the activations of a microbatch, from F to the end of B, and
    `weight_inputs` the size of the saved data of its W, from B to the end of W.  The total of all
    microbatches must not exceed `limit`.
    """

    saved: float
    weight_inputs: float
    limit: float = inf

    def peak(self, ops: Iterable[str]) -> float:
        """Return the peak size of the saved data during a stream of F, B and W."""
        inputs = self.weight_inputs
        changes = {"F": self.saved, "B": inputs - self.saved, "W": -inputs}
        return max(accumulate(changes[op] for op in ops))


class Workload(NamedTuple):
    """Passes of a training step with one chunk per stage, in any order.

    `costs` has one Cost per stage, whose `comm` is the time of a message to or from the next
    stage.  `memory` has one StageMemory per stage.
    """

    micros: int
    costs: Sequence[Cost]
    memory: Sequence[StageMemory]


def lower_bound(work: Workload) -> float:
    """Return a lower bound on the makespan of every schedule of a workload, in seconds."""
    stages = _stages(work)
    for micro in range(1, work.micros + 1):
        arrival = 0.0
        for stage in stages:
            arrival = stage.start("F", micro, arrival) + stage.cost.forward + stage.cost.comm
        arrival = 0.0
        for stage in reversed(stages):
            arrival = stage.start("B", micro, arrival + stage.cost.comm) + stage.cost.backward
    return float(max(max(stage.end(), stage.end_by_memory()) for stage in stages))


def _stages(work):
    """Return one _Stage per stage, with the times of the paths before, between and after its
    passes of a microbatch."""
    costs = [*work.costs[:-1], work.costs[-1]._replace(comm=0.0)]
    heads = accumulate((each.forward + each.comm for each in costs), initial=0.0)
    passes = [each.forward + each.backward for each in costs]
    trips = [
        sum(passes[stage + 1 :]) + 2 * sum(each.comm for each in costs[stage:])
        for stage in range(len(costs))
    ]
    tails, message = [0.0], 0.0
    for each in costs:
        tails.append(each.backward + max(each.weight, message + tails[-1]))
        message = each.comm
    paths = zip(heads, trips, tails[1:])
    return [_Stage(work.micros, *each) for each in zip(costs, work.memory, paths)]


class _Stage:
    """Lower bounds on the start times of the passes of a stage.

    `starts[op][k]` is the bound for the k-th F or B, for k from 1.  At least `least[op][k]` passes
    have ended before its start in every schedule, and at most `most[op][k]` passes have started.
    The counts are arrays of shape [k, (F, B, W)].  `slots` is the peak number of microbatches in
    flight.
    """

    def __init__(self, micros, cost, memory, paths):
        self.micros, self.cost, self.memory = micros, cost, memory
        self.head, self.trip, self.tail = paths
        saved, inputs, limit = memory.saved, memory.weight_inputs, memory.limit * (1 + ROUNDING)
        limited = saved > 0 and limit < inf
        self.slots = micros
        if limited:  # each of these microbatches runs a B, after which its W may be pending
            self.slots = min(micros, 1 + int((limit - max(saved, inputs)) // saved))
        count = np.arange(micros + 1)
        before, back, weights = count - 1, np.maximum(0, count - self.slots), 0 * count
        if limited and inputs:
            # Before the k-th F, n B have ended.  The W that must end are a linear function of n.
            needed = [n + (saved * (count - n) - limit) / inputs for n in (before, back)]
            weights = np.maximum(0, np.ceil(np.minimum(*needed))).astype(int)
        columns = np.column_stack
        self.least = {
            "F": columns([before, back, weights]),
            "B": columns([count, before, weights]),
        }
        ahead = np.minimum(micros, before + self.slots)
        self.most = {
            "F": columns([before, before, before]),
            "B": columns([ahead, before, before]),
        }
        self.starts = {op: np.zeros(micros + 1) for op in "FB"}

    def start(self, op: str, micro: int, arrival: float) -> float:
        """Set and return the bound for a pass whose input arrives at time `arrival`."""
        found = max(arrival, self._after(self.least[op][micro]))
        self.starts[op][micro] = found
        return found

    def _after(self, passes, drain=0.0):
        """Return a lower bound on the time at which these numbers of F, B and W have ended.

        `drain` is the idle time between the last F and the last B, if `passes` contains them.
        """
        first, found = np.arange(1, 1 + self.micros), 0.0
        # The memory limit requires that these passes start before the last F.
        early = {"F": first <= self.micros, "B": first <= self.micros - self.slots}
        for op, count in zip("FB", passes):
            earlier = slice(1, 1 + count)
            left = np.maximum(0, passes - self.most[op][earlier]) @ np.array(self.cost[:3])
            times = self.starts[op][earlier] + left + drain * early[op][:count]
            found = max(found, times.max(initial=0.0))
        return found

    def end(self) -> float:
        """Return a lower bound on the makespan from the number of passes of this stage."""
        saved, inputs, limit = self.memory
        _, backward, weight, _ = self.cost
        drain = 0.0
        if saved and limit < inf and (inputs or not weight):
            # While the last microbatch is on later stages, the stage only runs B and W for the
            # microbatches whose data fits next to the data of the last one.
            rate = max((backward + weight) / saved, weight / inputs if inputs else 0.0)
            drain = max(0.0, self.trip - rate * (limit * (1 + ROUNDING) - saved))
        passed = self._after(np.full(3, self.micros), drain)
        return max(passed, self.starts["B"][self.micros] + self.tail)

    def end_by_memory(self) -> float:
        """Return a lower bound on the makespan from the time for which data is saved."""
        saved, inputs, limit = self.memory
        flight = self.cost.forward + self.trip + self.cost.backward
        size = saved * flight + inputs * self.cost.weight
        return self.head + self.micros * size / limit if size else 0.0
