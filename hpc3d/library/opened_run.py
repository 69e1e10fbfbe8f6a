"""A run that is there, measured or simulated, to be looked at from Python.

run = hpc3d.open("results/RUN")
run.losses                         # [steps]
run.tables["waits"]                # a table of its report
run.timeline(step=3)               # who did what, as a figure
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Self

from hpc3d.library.drawing import Drawing
from hpc3d.library.records import Records
from hpc3d.plain import plain
from hpc3d.trace.locate import trace_of
from hpc3d.trace.reader import Trace

if TYPE_CHECKING:
    import numpy as np

    from hpc3d.analyze.report.run_analysis import RunAnalysis
    from hpc3d.config.input_file import Config
    from hpc3d.trace.table import Table

_NO_TIMELINE = "no common time of its ranks (trace.clock): there is no timeline"


def open_run(path: Path | str) -> Run:
    """The Run in a folder, or of a file trace.h5; segments of its ranks are merged if need be.

    ValueError if there is no run, or it has no trace yet, or a damaged one.
    """
    path = Path(path)
    if not path.exists():
        raise ValueError(f"{path}: no such file or folder; give a run, such as results/NAME-STAMP")
    return Run(trace_of(path) if path.is_dir() else path)


class Run:
    """A run by its trace.  What is asked for is read then, once; files stay open until `close`, or
    the end of a `with` block."""

    def __init__(self, trace: Path) -> None:
        self.trace = Trace(trace)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        attrs = self.trace.attrs
        steps = len(self.losses)
        sizes = [
            f"{count} {word}{'s'[: count != 1]}"
            for count, word in ((self.ranks, "rank"), (steps, "step"))
        ]
        return plain(f"Run({attrs['run_id']}): {attrs['kind']}, {', '.join(sizes)}")

    def close(self) -> None:
        """Close the file; what was read before stays."""
        self.trace.close()

    @property
    def folder(self) -> Path:
        """Where the run lies."""
        return self.trace.path.parent

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return self.trace.attrs["world_size"]

    @cached_property
    def config(self) -> Config:
        """The configuration of the run, settled: `run.config.mesh.x`."""
        from hpc3d.config.load import stored

        return stored(self.trace.attrs["config"])

    @cached_property
    def losses(self) -> np.ndarray:
        """The training loss of each completed step, [steps], in nat per token; not a number in
        a simulated run."""
        return self.steps["loss"][self.steps["rank"] == 0]

    @property
    def events(self) -> Table:
        """What the ranks did, by columns: `run.events["dur"]` [ns]; `.frame([...])` is a pandas
        DataFrame.  docs/trace.md has the columns."""
        return self.trace.events

    @property
    def steps(self) -> Table:
        """A row for each rank and completed step, by columns as `events`."""
        return self.trace.steps

    @property
    def memory(self) -> Table:
        """A row for each rank, step and kind of memory [B], by columns as `events`."""
        return self.trace.memory

    @cached_property
    def tables(self) -> Mapping[str, Records]:
        """The tables of the run's report by name, as docs/reports.md explains them; s and B."""
        return Tables(self._analysis(None).tables)

    def timeline(self, step: int | None = None) -> Drawing:
        """A step as a figure, a row for each rank: computation by phase, calls, and waits.

        Without `step` one that took the median time.  ValueError if the run does not have it, or
        ranks counted times of their own.
        """
        return drawing_of_step(self._analysis(step), self.trace.path)

    def report(self, out: Path | str | None = None) -> Path:
        """Write the report of the run, as `python -m hpc3d.report` does, to a folder (`report` in
        that of the run); the path of its page."""
        from hpc3d.analyze.report.run_analysis import compare
        from hpc3d.analyze.report.write import clear, write
        from hpc3d.extras import need
        from hpc3d.trace.segment import naming

        need("a report", "matplotlib", "jinja2", "bokeh")
        out = Path(out) if out is not None else self.folder / "report"
        with naming(out):
            clear(out)
            write(compare([self.trace], [self._analysis(None)]), out)
        return out / "report.html"

    @cached_property
    def _analysis(self):
        """What a report says of the run, by the step that it draws."""

        def analysis(step: int | None) -> RunAnalysis:
            from hpc3d.analyze.report.run_analysis import analyze_run

            return analyze_run(self.trace, step=step)

        return cache(analysis)


class Tables(Mapping[str, Records]):
    """Tables by name; ValueError, with the names, for one that there is not."""

    def __init__(self, found: Mapping[str, list]) -> None:
        self._found = {name: Records(rows) for name, rows in found.items()}

    def __getitem__(self, name: str) -> Records:
        if name not in self._found:
            raise ValueError(f"no table {name!r}; there are {', '.join(self._found)}")
        return self._found[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._found)

    def __len__(self) -> int:
        return len(self._found)

    def __repr__(self) -> str:
        return f"Tables: {', '.join(self._found)}"


def drawing_of_step(analysis: RunAnalysis, path: Path) -> Drawing:
    """The timeline of a step that was analysed."""
    from hpc3d.analyze.report.plot_matplotlib import draw

    chart = analysis.timeline
    if chart is None:
        raise ValueError(f"{path}: {_NO_TIMELINE}")
    return Drawing(lambda: draw(chart))
