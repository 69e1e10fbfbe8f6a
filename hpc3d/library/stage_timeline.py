"""A pipeline schedule that was simulated, for a notebook."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpc3d.analyze.opened_run import Drawing
from hpc3d.pipeline.draw import draw

if TYPE_CHECKING:
    from hpc3d.pipeline.ideal_run import IdealRun


class StageTimeline:
    """The stages of a schedule over time.

    `makespan` [s] from the first start to the last end; `bubble`, the share of its time that the
    worst stage waits, as arXiv:2401.10241, section 5.3, has it; and of each stage `in_flight`, the
    most microbatches (of a chunk) whose activations it holds at one time, and `weight_inputs`, the
    most whose W is still to come.  As text it is the diagram of papers.
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

        title = self._ideal.title
        return Drawing(gantt([(title, spans(self._ideal.rows))]), title)

    def __repr__(self) -> str:
        return f"{self._ideal.title}\n{draw(self._ideal.rows)}"
