"""What a training step would cost on a machine, from Python."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from hpc3d.library.drawing import Drawing
from hpc3d.library.opened_run import Run, open_run
from hpc3d.library.records import Records
from hpc3d.library.sections import options_of
from hpc3d.predict.simulation.predicted_step import predicted_step

if TYPE_CHECKING:
    from hpc3d.config.input_file import Config
    from hpc3d.predict.simulation.predicted_step import PredictedStep


def predict_step(
    input: Path | str, machine: Path | str = "h100", ranks: int | None = None, **sections: Any
) -> StepPrediction:
    """Simulate a training step: the program itself runs on arrays without data, and a clock goes
    on by what the machine needs for every product, kernel and call (docs/prediction.md).

    `input` is an input file or a name, and values of it are given by section, as in
    `train_model`; `machine` is a machine file or a name, such as "a100-selene"; `ranks`, by
    default the product of [mesh], may be any number.  ValueError, with the lines of the command,
    for what it refuses.
    """
    return StepPrediction(predicted_step(input, options_of(sections), machine, ranks))


class StepPrediction:
    """A predicted step.

    `step_time_s` [s]; `tokens_per_s`; `bubble`, the share of its time in which the busiest stage
    waits for messages; `communication`, the share of the step that it waits for other calls;
    `flop` of all ranks; `mfu` and `hfu` (arXiv:2205.05198), shares of the machine's peak; `fits`,
    whether the memory of a rank suffices; `total_bytes`, the peaks of all ranks together.
    """

    def __init__(self, step: PredictedStep) -> None:
        found = step.summary
        self._step = step
        self.config: Config = step.config
        self.machine: str = found["machine"]
        self.ranks: int = found["ranks"]
        self.step_time_s: float = found["step_time_s"]
        self.tokens_per_s: float = found["tokens_per_s"]
        self.bubble: float = found["bubble"]
        self.communication: float = found["communication"]
        self.flop: float = found["flop"]
        self.mfu: float = found["mfu"]
        self.hfu: float = found["hfu"]
        self.fits: bool = found["memory"]["fits"]
        self.total_bytes: int = found["memory"]["total"]

    @property
    def memory(self) -> Records:
        """The peaks [B] of a rank of each stage by kind; `all` is the peak of their sum."""
        peaks = self._step.summary["memory"]["stages"]
        return Records({"stage": stage, **each} for stage, each in enumerate(peaks))

    @property
    def peak_bytes(self) -> int:
        """The peak of the fullest rank [B]."""
        return self._step.summary["memory"]["worst"]["all"]

    @property
    def received(self) -> Records:
        """Calls, and bytes that a rank of stage 0 receives in the step, by axis and operation."""
        return Records(
            {"axis": axis, "op": op, **each}
            for axis, ops in self._step.summary["bytes"].items()
            for op, each in ops.items()
        )

    def keep(self, folder: Path | str) -> Run:
        """Write the step of all ranks as a trace to a new folder, and open it as a Run.

        ValueError if the folder is there, or the trace would be too large.
        """
        folder = Path(folder)
        if folder.exists():
            raise ValueError(f"{folder} exists: name a new folder")
        return open_run(self._step.keep(folder))

    def timeline(self) -> Drawing:
        """The step as a figure, as `Run.timeline` draws it."""
        with TemporaryDirectory() as folder, self.keep(Path(folder, "step")) as run:
            return run.timeline()

    def __repr__(self) -> str:
        fits = "fits" if self.fits else "does not fit"
        return (
            f"{self.config.name} on {self.ranks} rank{'s'[: self.ranks > 1]} of {self.machine}: "
            f"{self.step_time_s:.4g} s a step, MFU {self.mfu:.1%}, bubble {self.bubble:.1%}, "
            f"{self.peak_bytes / 1e9:.3g} GB a rank, which {fits}"
        )
