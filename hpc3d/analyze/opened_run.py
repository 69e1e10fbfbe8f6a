"""A run from Python: its losses, tables and figures, read when they are asked for."""

from __future__ import annotations

from functools import cached_property
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from hpc3d import trace
from hpc3d.analyze.report.palette import default_style
from hpc3d.analyze.report.run_analysis import RunAnalysis, analyze_run
from hpc3d.analyze.report.verdict import verdict
from hpc3d.config.load import stored
from hpc3d.extras import need
from hpc3d.runtime import metrics_file
from hpc3d.trace.locate import trace_of
from hpc3d.trace.segment import naming

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

    from hpc3d.config.input_file import Config


class Drawing(NamedTuple):
    """A figure that a notebook shows."""

    figure: Figure
    title: str

    def save(self, path: Path | str) -> None:
        """Write it; the ending says as what: .png, .svg, .pdf."""
        with default_style():
            self.figure.savefig(path)

    def _repr_png_(self) -> bytes:
        data = BytesIO()
        with default_style():
            self.figure.savefig(data, format="png", dpi=110)
        return data.getvalue()


class OpenedRun:
    """A run in a `folder`, or a simulated one, or a trace; ValueError for any other path.

    Times are seconds, sizes bytes.  What is slow, the analysis of a step, is done once a step.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.folder = self.path if self.path.is_dir() else self.path.parent
        self._trace = trace_of(self.path) if self.path.is_dir() else self.path
        self._steps: dict[int | None, RunAnalysis] = {}
        self._of(None)

    def __repr__(self) -> str:
        return f"<hpc3d run {self.name}: {self._of(None).label}>"

    @property
    def name(self) -> str:
        return self._of(None).run_id

    @cached_property
    def config(self) -> Config:
        """The configuration of the run, settled: `run.config.mesh.x`."""
        return stored(self._of(None).config)

    @cached_property
    def metrics(self) -> list[dict[str, Any]]:
        """The records of metrics.jsonl (docs/watching.md)."""
        return metrics_file.read(self.folder)

    @property
    def losses(self) -> list[float | None]:
        """The loss of each step, nat a token."""
        return [row["loss"] for row in self._of(None).tables["loss"]]

    @property
    def verdict(self) -> str:
        """What a step is made of, the largest lever, who is late, in a few sentences."""
        return " ".join(verdict(self._of(None).tables))

    @property
    def tables(self) -> list[str]:
        """The names of the tables that have rows, for `table`."""
        return [name for name, rows in self._of(None).tables.items() if rows]

    def table(self, name: str) -> pd.DataFrame:
        """A table of the report, in SI units; ValueError for a name that is not in `tables`."""
        from pandas import DataFrame

        if name not in self.tables:
            raise ValueError(f"{name}: no such table; there are {', '.join(self.tables)}")
        return DataFrame(self._of(None).tables[name])

    def events(self, columns: list[str] | None = None) -> pd.DataFrame:
        """Every event of every rank, or some of its columns (docs/trace.md); times are in ns."""
        with trace.open(self._trace) as opened:
            return opened.events.frame(columns)

    def timeline(self, step: int | None = None) -> Drawing:
        """What every rank does in a step (None: one that took the median time), with the critical
        path; ValueError where there is no such step or ranks have no common time."""
        run = self._of(step)
        if run.timeline is None:
            raise ValueError(f"{self.path}: ranks counted their own time; there is no timeline")
        return self._drawn("timeline", step)

    def pipeline(self, step: int | None = None) -> Drawing:
        """The passes of each stage in a step, above their schedule on an ideal clock; ValueError
        for a run of one stage."""
        return self._drawn("pipeline", step)

    def figure(self, name: str) -> Drawing:
        """A figure of the report: ranks, phases, path, waits, traffic, memory, ..."""
        return self._drawn(name, None)

    def report(self, out: Path | str | None = None) -> Path:
        """Write what `python -m hpc3d.report` does, to a folder (None: `report` in the run's); the
        path of its page."""
        from hpc3d.analyze.report.run_analysis import compare
        from hpc3d.analyze.report.write import clear, write

        need("a report", "matplotlib", "jinja2", "bokeh")
        out = self.folder / "report" if out is None else Path(out)
        with naming(out), trace.open(self._trace) as opened:
            clear(out)
            write(compare([opened], [self._of(None)]), out)
        return out / "report.html"

    def _drawn(self, name: str, step: int | None) -> Drawing:
        from hpc3d.analyze.report import figure_list, plot_matplotlib

        pictures = {each.name: each for each in figure_list.of_run(self._of(step))}
        if name not in pictures:
            raise ValueError(
                f"{name}: no such figure of this run; there are {', '.join(pictures)}"
            )
        return Drawing(plot_matplotlib.draw(pictures[name].chart), pictures[name].title)

    def _of(self, step: int | None) -> RunAnalysis:
        if step not in self._steps:
            with trace.open(self._trace) as opened:
                self._steps[step] = analyze_run(opened, step=step)
        return self._steps[step]
