"""A pipeline schedule on an ideal clock, from Python."""

from __future__ import annotations

from hpc3d.library.drawing import Drawing
from hpc3d.pipeline.draw import draw
from hpc3d.pipeline.ideal_run import TIMES, IdealRun, Seconds, bounds_of_times, ideal_run, is_time


def simulate_schedule(
    name: str,
    stages: int,
    microbatches: int,
    chunks: int | None = None,
    steps: int = 1,
    **times: Seconds,
) -> ScheduleSimulation:
    """Run a pipeline schedule on a clock: a pass starts when the one before it on its stage has
    ended and its input has come; messages never wait for each other.

    `name` is one of `hpc3d.SCHEDULES`, or csv:FILE.  `times` are seconds of a microbatch on a
    stage: `forward`, `backward` (the part for the input) and `weight` (1 each), and `comm` of a
    message (0); or lists with one number for each part of the model, and for each border of
    `comm`.  ValueError, with the line of the command, for what a schedule forbids.
    """
    for key, value in times.items():
        if key not in TIMES:
            raise ValueError(f"{key}: no such time; there are {', '.join(TIMES)}")
        for each in value if isinstance(value, list | tuple) else [value]:
            if not (isinstance(each, int | float) and is_time(each)):
                raise ValueError(f"{key} = {each!r}: {bounds_of_times()}")
    return ScheduleSimulation(ideal_run(name, stages, microbatches, chunks, steps, times))


class ScheduleSimulation:
    """A schedule that was simulated.

    `makespan` [s] from the first start to the last end; `bubble`, the share of its time that the
    worst stage waits, as arXiv:2401.10241, section 5.3, has it; and of each stage `in_flight`, the
    most microbatches whose activations it holds at one time, and `weight_inputs`, the most whose
    W is still to come.  As text it is the diagram of papers.
    """

    def __init__(self, ideal: IdealRun) -> None:
        found = ideal.found()
        self._ideal = ideal
        self.makespan: float = found["makespan"]
        self.bubble: float = found["bubble"]
        self.in_flight: list[int] = found["in_flight"]
        self.weight_inputs: list[int] = found["weight_inputs"]

    def timeline(self) -> Drawing:
        """The diagram as a figure, a row for each stage."""
        from hpc3d.analyze.metrics.pass_spans import spans
        from hpc3d.analyze.report.gantt import gantt

        return Drawing(lambda: gantt([(self._ideal.title, spans(self._ideal.rows))]))

    def __repr__(self) -> str:
        return f"{self._ideal.title}\n{draw(self._ideal.rows)}"
