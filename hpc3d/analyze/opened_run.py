"""Python interface to a run. Losses, tables and figures are computed when they are accessed."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from hpc3d import trace
from hpc3d.analyze.attempts import trace_with
from hpc3d.analyze.report.palette import default_style
from hpc3d.analyze.report.run_analysis import RunAnalysis, analyze_run
from hpc3d.analyze.report.verdict import verdict
from hpc3d.config.load import stored
from hpc3d.console.small_files import naming
from hpc3d.runtime import metrics_file
from hpc3d.runtime.optional_packages import need
from hpc3d.trace.locate import trace_of

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

    from hpc3d.config.input_file import Config


class Drawing(NamedTuple):
    """Matplotlib figure with a title. Notebooks display the figure inline."""

    figure: Figure
    title: str

    def save(self, path: Path | str) -> None:
        """Write the figure.

        Parameters
        ----------
        path
            Path of the file. The extension .png, .svg or .pdf selects the format.
        """
        with default_style():
            self.figure.savefig(path)

    def _repr_png_(self) -> bytes:
        from hpc3d.analyze.report.plot_matplotlib import as_png

        return as_png(self.figure)


class OpenedRun:
    """Measured or simulated run.

    The losses, the evaluations and the step times cover all attempts of a resumed run. Times are
    in seconds and sizes in bytes. The analysis of a step is slow, so its result is cached.

    Parameters
    ----------
    path
        Run folder or trace file.

    Raises
    ------
    ValueError
        If `path` is neither a run folder nor a trace file.
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
        """Name of the run."""
        return self._of(None).run_id

    @cached_property
    def config(self) -> Config:
        """Return the resolved configuration of the run. Example: `run.config.mesh.x`."""
        return stored(self._of(None).config)

    @cached_property
    def metrics(self) -> list[dict[str, Any]]:
        """Return the records of metrics.jsonl, which are described in docs/watching.md."""
        return metrics_file.read(self.folder)

    @property
    def losses(self) -> list[float | None]:
        """Return the loss of each step of all attempts in nats per token."""
        return [row["loss"] for row in self._of(None).tables["loss"]]

    @property
    def verdict(self) -> str:
        """Return a short summary of the step time breakdown, the largest cost and stragglers."""
        return " ".join(verdict(self._of(None).tables))

    @property
    def tables(self) -> list[str]:
        """Return the names of the nonempty tables, which are valid arguments of `table`."""
        return [name for name, rows in self._of(None).tables.items() if rows]

    def table(self, name: str) -> pd.DataFrame:
        """Return a table of the report.

        Parameters
        ----------
        name
            One of the names in `tables`.

        Returns
        -------
        pandas.DataFrame
            The table in SI units.

        Raises
        ------
        ValueError
            If the name is not in `tables`.
        """
        from pandas import DataFrame

        if name not in self.tables:
            raise ValueError(f"{name}: no such table; use one of {', '.join(self.tables)}")
        return DataFrame(self._of(None).tables[name])

    def events(self, columns: list[str] | None = None) -> pd.DataFrame:
        """Return the events of all ranks.

        Parameters
        ----------
        columns
            Column names, as listed in docs/trace.md. The default is all columns.

        Returns
        -------
        pandas.DataFrame
            One row per event. Times are in ns.
        """
        with trace.open(self._trace) as opened:
            return opened.events.frame(columns)

    def timeline(self, step: int | None = None) -> Drawing:
        """Return the timeline of all ranks in a step, with the critical path of the step.

        Parameters
        ----------
        step
            Step number. The default is the step of the newest attempt with the median duration.
            If several attempts completed the step, the newest of them is shown.

        Returns
        -------
        Drawing
            Figure with one row per rank.

        Raises
        ------
        ValueError
            If the step does not exist, or the ranks have no common clock.
        """
        run = self._of(step)
        if run.timeline is None:
            raise ValueError(
                f"{self.path}: no timeline is available, because each rank measured its own"
                ' CPU time; train with trace.clock = "wall"'
            )
        return self._drawn("timeline", step)

    def pipeline(self, step: int | None = None) -> Drawing:
        """Draw the measured passes of each pipeline stage in a step, above the ideal schedule.

        Parameters
        ----------
        step
            Step number. The default is the step with the median duration.

        Returns
        -------
        Drawing
            Figure with one row per stage.

        Raises
        ------
        ValueError
            If the run has a single stage.
        """
        return self._drawn("pipeline", step)

    def figure(self, name: str) -> Drawing:
        """Return a figure of the report.

        Parameters
        ----------
        name
            Name of the figure, such as ranks, phases, path, waits, traffic or memory.

        Returns
        -------
        Drawing
            The figure.

        Raises
        ------
        ValueError
            If the run has no such figure.
        """
        return self._drawn(name, None)

    def report(self, out: Path | str | None = None) -> Path:
        """Write the same report as `python -m hpc3d.report`.

        Parameters
        ----------
        out
            Folder of the report. The default is the subfolder `report` of the run's folder.

        Returns
        -------
        Path
            Path of the HTML page.
        """
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
                f"{name}: this run has no such figure; use one of {', '.join(pictures)}"
            )
        return Drawing(plot_matplotlib.draw(pictures[name].chart), pictures[name].title)

    def _of(self, step: int | None) -> RunAnalysis:
        if step not in self._steps:
            path = self._trace if step is None else trace_with(self._trace, step)
            with trace.open(path) as opened:
                self._steps[step] = analyze_run(opened, step=step)
        return self._steps[step]
