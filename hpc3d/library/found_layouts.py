"""Which layouts are fastest on so many ranks, from Python."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpc3d.library.records import Records
from hpc3d.library.sections import options_of
from hpc3d.predict.machine.machine_file import load
from hpc3d.predict.planning.planned_layouts import (
    TOP,
    input_with,
    plan_layouts,
    values_of,
)
from hpc3d.predict.planning.ranking import shown_layout

if TYPE_CHECKING:
    from hpc3d.config.input_file import Config
    from hpc3d.predict.planning.planned_layouts import PlannedLayouts
    from hpc3d.predict.planning.ranking import RankedLayout

_HIDDEN = ("layout", "waits_s", "memory")  # of a row: tables within the table


def find_layouts(
    input: Path | str,
    ranks: int,
    machine: Path | str = "h100",
    memory: float | None = None,
    top: int = TOP,
    **sections: Any,
) -> FoundLayouts:
    """Search for the layouts with the shortest step on so many ranks (docs/planning.md).

    `input`, `machine` and the values by section are as in `predict_step`; what a layout is, the
    mesh and the parallelism, is found.  `memory` is that of a rank in bytes, by default the
    machine's.  ValueError, with the lines of the command, for what it refuses, and if no layout
    fits with any technique.
    """
    for name, value in {"ranks": ranks, "top": top}.items():
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} = {value!r}: must be a whole number, 1 or more")
    more = max(top, TOP)  # what is first does not depend on how much is shown
    options = options_of(sections)
    planned, resorted = plan_layouts(input, options, ranks, load(machine), memory, more)
    technique = resorted.fit.resort.text if resorted else None
    return FoundLayouts(planned, planned.best[:top], technique)


class FoundLayouts:
    """What a search has found.

    `best` are the layouts, the fastest first: `layout` in words, `step_time_s` (where not
    `simulated` it is an estimate), the `bubble` and `communication` as shares of it, the `axis`
    that is waited for most, and the `peak_bytes` of the fullest rank, which is on `stage`.
    `losers` says why others are slower, how many they are, and which of them is nearest.
    `technique` is what all layouts are with where nothing fits as it is, else None.
    """

    def __init__(
        self, planned: PlannedLayouts, best: list[RankedLayout], technique: str | None
    ) -> None:
        self._planned, self._rows, self.technique = planned, best, technique
        self.best = Records(map(_row, best))

    @property
    def losers(self) -> Records:
        """Why others lose: `reason`, `count`, and the columns of `best` of the nearest."""
        losers = self._planned.ranking.losers(self._rows[0])
        return Records(
            {"reason": reason, "count": count, **_row(nearest)}
            for reason, count, nearest in losers
        )

    def config(self, place: int = 0) -> Config:
        """The configuration with the layout at this place of `best`, settled."""
        return self._rows[place].config

    def write(self, path: Path | str, place: int = 0) -> Path:
        """Write the input file with the layout at this place of `best`; its path.

        OSError where nothing can be written.
        """
        text = input_with(self._planned.config, self._rows[place].config)
        Path(path).write_text(text, encoding="utf-8")
        return Path(path)

    def __repr__(self) -> str:
        return "\n".join(
            f"{row['step_time_s']:.4g} s  {row['peak_bytes'] / 1e9:.3g} GB  {row['layout']}"
            for row in self.best
        )

    def _repr_html_(self) -> str:
        return self.best._repr_html_()


def _row(row: RankedLayout) -> dict[str, Any]:
    """A layout in words, and its numbers."""
    values = {key: value for key, value in values_of(row).items() if key not in _HIDDEN}
    return {"layout": shown_layout(row.config), **values}
