"""Layouts found by the planner, for use in a notebook."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpc3d.console.command_line import readable_time
from hpc3d.library.step_prediction import frame_of
from hpc3d.predict.planning.planned_layouts import (
    PlannedLayouts,
    ResortedLayouts,
    gigabytes,
    input_with,
)
from hpc3d.predict.planning.ranked_layouts import as_plain
from hpc3d.predict.planning.ranking import RankedLayout, shown_layout

if TYPE_CHECKING:
    import pandas as pd

    from hpc3d.config.input_file import Config

_COLUMNS = "step_time_s", "simulated", "bubble", "communication", "axis", "peak_bytes", "stage"


class FoundLayouts(list[dict[str, Any]]):
    """Layouts in the format of `python -m hpc3d.plan --json`, fastest first.

    Each item is a dict with the keys `layout` (sections of an input file), `step_time_s`
    (estimated, or simulated if `simulated` is true), `bubble` and `communication` (fractions of
    the step time), `axis` (the axis with the longest waits) and `peak_bytes` (peak memory of the
    rank with the highest peak, in B). `str` returns the table that `plan` prints.

    Attributes
    ----------
    technique : str or None
        Memory-saving setting of all layouts, such as "train.optimizer=adafactor", or None if
        layouts without such a setting fit in memory.
    """

    def __init__(
        self, planned: PlannedLayouts, resorted: ResortedLayouts | None, top: int
    ) -> None:
        self._planned, self._rows = planned, planned.best[:top]
        self.technique = resorted.fit.resort.text if resorted else None
        super().__init__(map(as_plain, self._rows))

    def frame(self) -> pd.DataFrame:
        """Return the layouts as a DataFrame.

        Returns
        -------
        pandas.DataFrame
            One row per layout; times in s, memory in B.
        """
        return frame_of(map(_row, self._rows))

    def losers(self) -> pd.DataFrame:
        """Return the slower layouts, grouped by the reason why they are slower.

        Returns
        -------
        pandas.DataFrame
            One row per `reason`, with the `count` of layouts, and the columns of `frame` for the
            fastest layout that fits in memory. If none of them fits, the columns describe the
            layout with the lowest peak memory.
        """
        losers = self._planned.ranking.losers(self._rows[0])
        return frame_of(
            {"reason": reason, "count": count, **_row(nearest)}
            for reason, count, nearest in losers
        )

    def config(self, place: int = 0) -> Config:
        """Return the configuration of a layout.

        Parameters
        ----------
        place
            Index of the layout.

        Returns
        -------
        Config
            The resolved configuration.
        """
        return self._rows[place].config

    def write(self, path: Path | str, place: int = 0) -> Path:
        """Write an input file with the settings of a layout.

        Parameters
        ----------
        path
            Path of the new file.
        place
            Index of the layout.

        Returns
        -------
        Path
            Path of the file.

        Raises
        ------
        OSError
            If the file cannot be written.
        """
        text = input_with(self._planned.config, self._rows[place].config)
        Path(path).write_text(text, encoding="utf-8")
        return Path(path)

    def __str__(self) -> str:
        technique = [f"All layouts use {self.technique}."] if self.technique else []
        return "\n".join([*technique, *table(self._rows)])

    def _repr_html_(self) -> str:
        return self.frame().to_html(index=False)


def table(rows: Sequence[RankedLayout], mark: str = " ") -> Iterator[str]:
    """Yield the lines of a text table of layouts; `mark` precedes each layout."""
    yield "         step    memory  bubble  comm.  axis  layout"
    for number, row in enumerate(rows, 1):
        yield f"{number:3d}{mark}{line(row)}"


def line(row: RankedLayout) -> str:
    """Format a layout as a table row."""
    about = "" if row.simulated else "~"
    bubble = f"{row.bubble:.1%}" if row.config.mesh.p > 1 else "-"  # no bubble without stages
    return (
        f"{about + readable_time(row.seconds):>10s} {gigabytes(row.peak):>9s} {bubble:>6s} "
        f"{row.communication:6.1%}  {row.axis:5s} {shown_layout(row.config)}".rstrip()
    )


def _row(row: RankedLayout) -> dict[str, Any]:
    values = as_plain(row)
    return {"layout": shown_layout(row.config), **{key: values[key] for key in _COLUMNS}}
