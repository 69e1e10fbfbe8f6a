"""Timeline of a simulated pipeline schedule, for use in a notebook."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpc3d.analyze.opened_run import Drawing
from hpc3d.pipeline.draw import draw

if TYPE_CHECKING:
    from hpc3d.pipeline.ideal_run import IdealRun


_COLUMNS = 120  # maximum width of the text diagram


class StageTimeline:
    """Timeline of the pipeline stages under a schedule; `repr` returns a text diagram.

    Attributes
    ----------
    makespan : float
        Time from the start of the first pass to the end of the last [s].
    bubble : float
        Bubble rate, as defined in arXiv:2401.10241, section 5.3.
    in_flight : list of int
        For each stage, the peak number of (microbatch, chunk) pairs with saved activations.
    weight_inputs : list of int
        For each stage, the peak number of (microbatch, chunk) pairs whose W pass is pending.
    bound : float or None
        For a schedule search, a lower bound on the makespan of all schedules [s].
    """

    def __init__(self, ideal: IdealRun) -> None:
        found = ideal.found()
        self._ideal = ideal
        self.makespan: float = found["makespan"]
        self.bubble: float = found["bubble"]
        self.in_flight: list[int] = found["in_flight"]
        self.weight_inputs: list[int] = found["weight_inputs"]
        self.bound: float | None = ideal.bound

    def timeline(self) -> Drawing:
        """Draw the timeline of all pipeline stages.

        Returns
        -------
        Drawing
            Figure with one row per stage.
        """
        from hpc3d.analyze.metrics.pass_spans import spans
        from hpc3d.analyze.report.gantt import Panels
        from hpc3d.analyze.report.plot_matplotlib import draw as drawn

        title = self._ideal.title
        return Drawing(drawn(Panels([(title, spans(self._ideal.rows))])), title)

    def __repr__(self) -> str:
        return f"{self._ideal.title}\n{draw(self._ideal.rows, _COLUMNS)}"
