"""Predicted cost of a training step, for use in a notebook."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from hpc3d.analyze.opened_run import Drawing, OpenedRun
from hpc3d.console.command_line import readable_time
from hpc3d.console.sanitize import counted
from hpc3d.runtime.optional_packages import need

if TYPE_CHECKING:
    import pandas as pd

    from hpc3d.predict.predicted_step import PredictedStep


class StepPrediction(dict[str, Any]):
    """Predicted step: a dict with the values of `python -m hpc3d.simulate --json`.

    The keys are: `step_time_s` [s]; `tokens_per_s`; `bubble`, the fraction of the step time that
    the busiest stage spends waiting for messages; `communication`, the fraction of exposed
    communication on this stage, without waiting for other stages; `flop`, summed over all ranks;
    `mfu` and `hfu` (arXiv:2205.05198), as fractions of the machine's peak; `memory` [B], a dict
    with the peaks of all `stages`, the peak of the `worst` stage, the `total`, and `fits`, which
    is true if the model fits in memory; and `bytes`, the calls and received bytes of a rank in
    stage 0 by axis and operation. If the machine file lists the errors of published steps with
    a similar layout, `interval` contains the kind of `layout`, the number of `steps`, and `low_s`
    and `high_s` [s]. The attribute `config` is the resolved configuration.
    """

    def __init__(self, step: PredictedStep) -> None:
        super().__init__(step.summary)
        self._step, self.config = step, step.config

    def __repr__(self) -> str:
        ranks, worst = self["ranks"], self["memory"]["worst"]["all"]
        fits = "fits" if self["memory"]["fits"] else "does not fit"
        return (
            f"{self.config.name} on {counted(ranks, 'rank')} of {self['machine']}: "
            f"{readable_time(self['step_time_s'])} per step, MFU {self['mfu']:.1%}, "
            f"bubble {self['bubble']:.1%}, {worst / 1e9:.3g} GB per rank, which {fits}"
        )

    @property
    def memory(self) -> pd.DataFrame:
        """Peak memory per rank in B: one row per stage, one column per kind of memory.

        The column `all` contains the peak of the total over all kinds.
        """
        return frame_of({"stage": n, **row} for n, row in enumerate(self["memory"]["stages"]))

    @property
    def received(self) -> pd.DataFrame:
        """Communication per step of a rank in stage 0, with one row per mesh axis and operation.

        The columns are the number of calls and the received bytes.
        """
        return frame_of(
            {"axis": axis, "op": op, **each}
            for axis, ops in self["bytes"].items()
            for op, each in ops.items()
        )

    def keep(self, folder: Path | str) -> OpenedRun:
        """Write the predicted step of all ranks as a trace, and open the trace as a run.

        Parameters
        ----------
        folder
            Path of the run folder to create.

        Returns
        -------
        OpenedRun
            The simulated run.

        Raises
        ------
        ValueError
            If the folder exists, or the trace would be too large.
        """
        folder = Path(folder)
        if folder.exists():
            raise ValueError(f"{folder} already exists; choose a new folder")
        return OpenedRun(self._step.keep(folder).parent)

    def timeline(self) -> Drawing:
        """Draw the timeline of the predicted step.

        Returns
        -------
        Drawing
            Figure with one row per rank.
        """
        with TemporaryDirectory() as folder:
            return self.keep(Path(folder, "step")).timeline()


def frame_of(rows: Iterable[dict[str, Any]]) -> pd.DataFrame:
    """Return a DataFrame with the given rows; raise ValueError if pandas is not installed."""
    need("a DataFrame", "pandas")
    from pandas import DataFrame

    return DataFrame(list(rows))
