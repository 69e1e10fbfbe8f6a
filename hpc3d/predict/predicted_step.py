"""Predicted training step of an input file: the simulation and its summary."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from hpc3d.config.input_file import Config
from hpc3d.console.sanitize import all_results
from hpc3d.console.small_files import new_folder
from hpc3d.predict.assumptions import of_mixture
from hpc3d.predict.machine.machine import Machine
from hpc3d.predict.machine.machine_file import load
from hpc3d.predict.proof.layout_proof import prove
from hpc3d.predict.simulation.evaluated_batch import evaluated
from hpc3d.predict.simulation.simulator import StageRun, load_resolved, simulate
from hpc3d.predict.simulation.summary import summary
from hpc3d.predict.simulation.write_trace import write_trace
from hpc3d.training.graphed_step import graph_in_words


class PredictedStep(NamedTuple):
    """Simulated training step of a resolved `config` on a `machine`.

    `runs` contains one StageRun per stage. `summary` is a JSON-serializable dict, which also
    describes the evaluation and the mixture of experts if the input has them, and the CUDA graph
    of a step on GPUs.
    """

    config: Config
    machine: Machine
    runs: list[StageRun]
    summary: dict[str, Any]

    def keep(self, folder: Path) -> Path:
        """Create `folder`, write a simulated trace to it, and return the path of the trace.

        If the trace cannot be written, the folder is removed.
        """
        with new_folder(folder):
            return write_trace(folder, self.runs, self.config, self.machine)


def predicted_step(
    source: Path | str | None,
    overrides: Sequence[str],
    machine: Path | str,
    ranks: int | None = None,
    of_run: bool = False,
) -> PredictedStep:
    """Predict a training step of an input file on `ranks` ranks of a machine.

    Set `of_run` if the input file is the stored configuration of a run. Raises ValueError if the
    input is invalid, or the machine does not exist, with one line per problem.
    """
    config, known = all_results(
        lambda: load_resolved(source, overrides, ranks, of_run), lambda: load(machine)
    )
    prove(config, config.model.vocabulary)
    runs = simulate(config, config.model.vocabulary, known)
    found = summary(runs, config, known)
    if config.train.eval_every:
        batch = evaluated(config, config.model.vocabulary, known)
        found["evaluation_batch_s"] = batch.seconds
        found["evaluation_peak_bytes"] = batch.peak["all"]
    if mixture := of_mixture(config):
        found["mixture"] = mixture
    if config.train.backend == "cupy":
        found["cuda_graph"] = graph_in_words(config)
    return PredictedStep(config, known, runs, found)
