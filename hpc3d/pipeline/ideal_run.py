"""Simulation of a pipeline schedule with given pass and message times, without a model."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from hpc3d.console.sanitize import counted, sanitized
from hpc3d.pipeline.instruction import Instruction, Placement
from hpc3d.pipeline.schedule import DEFAULT, SCHEDULES, SEARCH, find, instruction_streams
from hpc3d.pipeline.timeline import Cost, Row, bubble, makespan, timeline

if TYPE_CHECKING:
    from hpc3d.pipeline.schedule_search import FoundSchedule

TIMES = {"forward": 1.0, "backward": 1.0, "weight": 1.0, "comm": 0.0}  # default times in s
MOST_SIMULATED = 1_000_000  # maximum number of forward passes in a simulation
_SHORTEST, _LONGEST = 1e-12, 1e9  # valid range in s; keeps sums and ratios of times finite

Seconds = float | list[float] | tuple[float, ...]


class IdealRun(NamedTuple):
    """Settings of a schedule simulation, and the simulated timeline.

    `chunks` is the number of model chunks per stage, `microbatches` the number of microbatches per
    step.  `times` contains the times of passes and messages in seconds, in the format of the
    `ideal_run` argument.  `passes` lists the passes of each stage, `placement` maps model chunks
    to stages, and `rows` lists (start, end, instruction) for each stage, with times in seconds.
    `bound` is a lower bound on the makespan of all schedules if the schedule was searched for.
    """

    name: str
    stages: int
    microbatches: int
    chunks: int
    steps: int
    times: Mapping[str, Seconds]
    passes: list[list[Instruction]]
    placement: Placement
    rows: list[Row]
    bound: float | None = None

    @property
    def title(self) -> str:
        """Title of a figure, such as "1f1b: 2 stages, 3 microbatches, 1 chunk, 1 step"."""
        sizes = {"stage": self.stages, "microbatch": self.microbatches}
        sizes |= {"chunk": self.chunks, "step": self.steps}
        words = [counted(number, what) for what, number in sizes.items()]
        return sanitized(f"{self.name}: {', '.join(words)}")

    def found(self) -> dict[str, Any]:
        """Return the results as a JSON-serializable dict.

        The dict contains the simulated sizes and times, the makespan in seconds, and the bubble
        rate as defined in arXiv:2401.10241.  For each stage, it also contains the peak number of
        microbatches in flight and the peak number of microbatches with a pending W.  The dict of
        a searched schedule also contains the lower bound in seconds and the proven gap.
        """
        # This module imports NumPy, which --help does not need.
        from hpc3d.pipeline.step_model import in_flight

        peaks = [in_flight(stream) for stream in self.passes]
        keys = ("name", "stages", "microbatches", "chunks", "steps")
        proven, seconds = {}, makespan(self.rows)
        if self.bound is not None:
            proven = {"bound": self.bound, "gap": max(0.0, seconds / self.bound - 1)}
        return {
            **{key: getattr(self, key) for key in keys},
            **self.times,
            "makespan": seconds,
            "bubble": bubble(self.rows),
            "in_flight": [peak.activations for peak in peaks],
            "weight_inputs": [peak.weight_inputs for peak in peaks],
            **proven,
        }


def ideal_run(
    name: str,
    stages: int,
    microbatches: int,
    chunks: int | None = None,
    steps: int = 1,
    times: Mapping[str, Seconds] | None = None,
    memory: int | None = None,
) -> IdealRun:
    """Simulate a pipeline schedule, or search for one if `name` is "search".

    `times` overrides the default times TIMES, in seconds.  The time of a pass is a number (the
    time per microbatch on a stage, summed over its chunks) or a list with one value per model
    chunk.  The time of a message is a number, or a list with one value per boundary between model
    chunks.  `chunks` defaults to the number that the schedule requires, or to 2 if it allows any
    number.  In a searched schedule, a stage has saved data of at most `memory` microbatches, from
    F to the end of W.  Raises ValueError if the schedule does not support the sizes, a time is
    invalid, or the simulation would have more than MOST_SIMULATED forward passes.
    """
    searched = name == SEARCH
    if memory is not None and not searched:
        raise ValueError(f"--memory: not supported by schedule {name}; use --name {SEARCH}")
    if chunks is None:
        chunks = 1 if searched else find(name).chunks or 2
    _refuse_large(stages, microbatches, chunks, steps)
    given = TIMES | dict(times or {})
    _refuse_times(given)
    cost = _costs(given, stages, chunks)
    if not any(any(each[:3]) for each in ([cost] if isinstance(cost, Cost) else cost)):
        raise ValueError("--forward, --backward and --weight are all 0; set at least one of them")
    bound = None
    if searched:
        found = _searched(stages, microbatches, chunks, steps, cost, memory)
        passes, placement, bound = found.streams, found.placement, found.bound
    else:
        passes, placement = instruction_streams(name, stages, microbatches, chunks, steps)
    rows = timeline(passes, placement, cost)
    return IdealRun(
        name, stages, microbatches, chunks, steps, given, passes, placement, rows, bound
    )


def _searched(
    stages: int,
    micros: int,
    chunks: int,
    steps: int,
    cost: Cost | list[Cost],
    memory: int | None,
) -> FoundSchedule:
    # These modules import NumPy, which --help does not need.
    from hpc3d.pipeline.schedule_bound import StageMemory, Workload
    from hpc3d.pipeline.schedule_search import find_schedule

    problem = SCHEDULES[DEFAULT]._replace(name=SEARCH).forbids(stages, micros, chunks)
    if problem or steps != 1:
        raise ValueError(problem or f"train.steps = {steps}: schedule {SEARCH} requires 1; use 1")
    costs = [cost] * stages if isinstance(cost, Cost) else cost
    limit = StageMemory(1, 1, micros if memory is None else memory)
    return find_schedule(Workload(micros, costs, [limit] * stages))


def _refuse_large(*sizes: int) -> None:
    if min(sizes) > 0 and math.prod(sizes) > MOST_SIMULATED:
        raise ValueError(
            f"--stages x --microbatches x --chunks x --steps = {math.prod(sizes)} forward passes "
            f"exceed the limit of {MOST_SIMULATED}; reduce one of these sizes"
        )


def _refuse_times(times: Mapping[str, Seconds]) -> None:
    for name, value in times.items():
        if name not in TIMES:
            raise ValueError(f"{name}: unknown time; use {', '.join(TIMES)}")
        for each in value if isinstance(value, list | tuple) else [value]:
            if not isinstance(each, int | float) or not is_time(each):
                raise ValueError(f"--{name} = {each!r}: {bounds_of_times()}")


def _costs(times: Mapping[str, Seconds], stages: int, chunks: int) -> Cost | list[Cost]:
    """Return one Cost for all stages, or one per model chunk if any of the times is a list."""
    if not any(isinstance(value, list | tuple) for value in times.values()):
        return Cost(**times)  # type: ignore[arg-type]  # all values are numbers
    parts, lists = stages * chunks, {}
    for name, value in times.items():
        count, what = (parts - 1, "boundaries") if name == "comm" else (parts, "model chunks")
        if not isinstance(value, list | tuple):
            lists[name] = [value if name == "comm" else value / chunks] * count
        elif len(value) == count:
            lists[name] = [*value]
        else:
            given = counted(len(value), "value")
            raise ValueError(f"--{name}: {given} for {count} {what}; use 1 or {count} values")
    lists["comm"].append(0.0)  # no message follows the last model chunk
    return [Cost(*each) for each in zip(*(lists[name] for name in TIMES), strict=True)]


def bounds_of_times() -> str:
    """Describe the valid range of times, for an error message."""
    return f"must be 0, or from {_SHORTEST:g} to {_LONGEST:g} seconds"


def is_time(value: float) -> bool:
    """Return True if `value` is a valid time in seconds: 0, or within the bounds."""
    return value == 0 or _SHORTEST <= value <= _LONGEST
