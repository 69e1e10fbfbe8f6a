"""A step of an input file, predicted on a machine: what was simulated and its summary."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from hpc3d.predict.assumptions import of_mixture
from hpc3d.predict.machine.machine_file import load
from hpc3d.predict.simulation.evaluated_batch import seconds_of_batch
from hpc3d.predict.simulation.simulator import load_resolved, simulate
from hpc3d.predict.simulation.summary import summary
from hpc3d.predict.simulation.write_trace import write_trace

if TYPE_CHECKING:
    from hpc3d.config.input_file import Config
    from hpc3d.predict.machine.machine import Machine
    from hpc3d.predict.simulation.simulator import StageRun


class PredictedStep(NamedTuple):
    """A settled `config` on a `machine`: the StageRuns, and plain values of their `summary`, with
    those of evaluations and of a mixture of experts where there are any."""

    config: Config
    machine: Machine
    runs: list[StageRun]
    summary: dict[str, Any]

    def keep(self, folder: Path) -> Path:
        """Make the folder and write a simulated trace there; its path."""
        folder.mkdir(parents=True)
        return write_trace(folder, self.runs, self.config, self.machine)


def predicted_step(
    source: Path | str | None,
    overrides: Sequence[str],
    machine: Path | str,
    ranks: int | None = None,
    of_run: bool = False,
) -> PredictedStep:
    """The PredictedStep of an input for as many ranks; ValueError if it breaks a rule or there is
    no such machine.  `of_run` is that of hpc3d.config.load."""
    config = load_resolved(source, overrides, ranks, of_run)
    known = load(machine)
    runs = simulate(config, config.model.vocabulary, known)
    found = summary(runs, config, known)
    if config.train.eval_every:
        seconds = seconds_of_batch(config, config.model.vocabulary, known)
        found["evaluation_batch_s"] = seconds
    if mixture := of_mixture(config):
        found["mixture"] = mixture
    return PredictedStep(config, known, runs, found)
