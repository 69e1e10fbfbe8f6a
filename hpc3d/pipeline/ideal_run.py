"""A schedule by itself on an ideal clock: its passes, when they run, and what it costs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from hpc3d.pipeline.instruction import Instruction, Placement
from hpc3d.pipeline.schedule import find, instruction_streams
from hpc3d.pipeline.timeline import Cost, Row, bubble, makespan, timeline
from hpc3d.plain import counted, plain

TIMES = {"forward": 1.0, "backward": 1.0, "weight": 1.0, "comm": 0.0}  # seconds, the defaults
MOST_SIMULATED = 1_000_000  # forward passes of one simulation
_SHORTEST, _LONGEST = 1e-12, 1e9  # seconds of a pass, so that sums and shares of them are numbers

Seconds = float | list[float] | tuple[float, ...]


class IdealRun(NamedTuple):
    """`chunks` of each of so many `stages`, `microbatches` of each of so many `steps`; `times` as
    in `ideal_run`; the `passes` of each stage, where the parts lie, and (start, end, instruction)
    of each stage in seconds, `rows`."""

    name: str
    stages: int
    microbatches: int
    chunks: int
    steps: int
    times: Mapping[str, Seconds]
    passes: list[list[Instruction]]
    placement: Placement
    rows: list[Row]

    @property
    def title(self) -> str:
        """Its name and sizes, as 1f1b: 2 stages, 3 microbatches, 1 chunk, 1 step."""
        sizes = {"stage": self.stages, "microbatch": self.microbatches}
        sizes |= {"chunk": self.chunks, "step": self.steps}
        words = [counted(number, what) for what, number in sizes.items()]
        return plain(f"{self.name}: {', '.join(words)}")

    def found(self) -> dict[str, Any]:
        """Plain values: what is simulated, the makespan [s], the bubble as arXiv:2401.10241 has
        it, and of each stage the most microbatches in flight and the most that wait for W."""
        from hpc3d.pipeline.step_model import in_flight  # needs NumPy, unlike --help

        peaks = [in_flight(stream) for stream in self.passes]
        keys = ("name", "stages", "microbatches", "chunks", "steps")
        return {
            **{key: getattr(self, key) for key in keys},
            **self.times,
            "makespan": makespan(self.rows),
            "bubble": bubble(self.rows),
            "in_flight": [peak.activations for peak in peaks],
            "weight_inputs": [peak.weight_inputs for peak in peaks],
        }


def ideal_run(
    name: str,
    stages: int,
    microbatches: int,
    chunks: int | None = None,
    steps: int = 1,
    times: Mapping[str, Seconds] | None = None,
) -> IdealRun:
    """The IdealRun of a schedule.

    `times` are those of TIMES that have other values: seconds of a microbatch on a stage, all
    chunks together, or a list with those of each part of the model, and of a message, or of one
    over each border between parts.  No `chunks`: the only number that the schedule has, or 2.
    ValueError for what the schedule forbids, and for more than MOST_SIMULATED.
    """
    chunks = chunks if chunks is not None else find(name).chunks or 2
    _refuse_large(stages, microbatches, chunks, steps)
    given = TIMES | dict(times or {})
    _refuse_times(given)
    cost = _costs(given, stages, chunks)
    if not any(any(each[:3]) for each in ([cost] if isinstance(cost, Cost) else cost)):
        raise ValueError("--forward, --backward and --weight are all 0: give one of them a time")
    passes, placement = instruction_streams(name, stages, microbatches, chunks, steps)
    rows = timeline(passes, placement, cost)
    return IdealRun(name, stages, microbatches, chunks, steps, given, passes, placement, rows)


def _refuse_large(*sizes: int) -> None:
    if min(sizes) > 0 and math.prod(sizes) > MOST_SIMULATED:
        raise ValueError(
            f"--stages x --microbatches x --chunks x --steps = {math.prod(sizes)} forward passes: "
            f"at most {MOST_SIMULATED} are simulated"
        )


def _refuse_times(times: Mapping[str, Seconds]) -> None:
    for name, value in times.items():
        if name not in TIMES:
            raise ValueError(f"{name}: no such time; there are {', '.join(TIMES)}")
        for each in value if isinstance(value, list | tuple) else [value]:
            if not isinstance(each, int | float) or not is_time(each):
                raise ValueError(f"--{name} = {each!r}: {bounds_of_times()}")


def _costs(times: Mapping[str, Seconds], stages: int, chunks: int) -> Cost | list[Cost]:
    """The Cost of all stages, or where a list is given the Costs of the parts."""
    if not any(isinstance(value, list | tuple) for value in times.values()):
        return Cost(**times)  # type: ignore[arg-type]  # no lists are among them
    parts, lists = stages * chunks, {}
    for name, value in times.items():
        count, what = (parts - 1, "borders") if name == "comm" else (parts, "parts")
        if not isinstance(value, list | tuple):
            lists[name] = [value if name == "comm" else value / chunks] * count
        elif len(value) == count:
            lists[name] = [*value]
        else:
            raise ValueError(
                f"--{name}: {len(value)} numbers for {count} {what}: give one for each, or one"
            )
    lists["comm"].append(0.0)  # nothing behind the last part
    return [Cost(*each) for each in zip(*(lists[name] for name in TIMES), strict=True)]


def bounds_of_times() -> str:
    """What a time may be, in words."""
    return f"must be 0 or more seconds, of {_SHORTEST:g} to {_LONGEST:g}"


def is_time(value: float) -> bool:
    """Whether a number of seconds is within these bounds."""
    return value == 0 or _SHORTEST <= value <= _LONGEST
