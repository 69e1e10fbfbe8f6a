"""Results of the points of a sweep: simulate a point, find its run, and read its metrics.

The folder of a sweep contains the input file of each point (points/NAME.toml), the prediction of
each simulated point (points/NAME.json), and the run folders (runs/NAME-STAMP).
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpc3d import trace
from hpc3d.analyze.metrics.breakdown import memory_rows
from hpc3d.analyze.metrics.compare import interval, relative_error
from hpc3d.analyze.metrics.steady import Steady
from hpc3d.analyze.metrics.step import (
    evaluation_rows,
    loss_rows,
    slowest_seconds,
    step_row,
    time_rows,
)
from hpc3d.config.load import to_toml
from hpc3d.console import small_files
from hpc3d.predict.predicted_step import predicted_step
from hpc3d.predict.simulation.summary import received_per_rank
from hpc3d.runtime.metrics_file import VALIDATION_LOSS_OF

if TYPE_CHECKING:
    from hpc3d.studies.sweep_points import SweepPoint


def write_input(point: SweepPoint, folder: Path) -> Path:
    """Write the input file of a point, and return its path."""
    path = _file(point, folder, "toml")
    path.parent.mkdir(parents=True, exist_ok=True)
    run = replace(point.config.run, out=str(folder / "runs"), label=point.label)
    with small_files.replacing(path) as temporary:
        temporary.write_text(
            to_toml(replace(point.config, name=point.name, run=run)), encoding="utf-8"
        )
    return path


def _file(point: SweepPoint, folder: Path, kind: str) -> Path:
    return folder / "points" / f"{point.name}.{kind}"


def simulate(point: SweepPoint, folder: Path) -> None:
    """Simulate a step of a point, and write its metrics to a JSON file."""
    step = predicted_step(write_input(point, folder), [], point.machine, point.ranks)
    measures = {
        "step_s": step.summary["step_time_s"],
        "tokens_per_s": step.summary["tokens_per_s"],
        "received_bytes": received_per_rank(step.runs, step.config),
        "peak_bytes": step.summary["memory"]["worst"]["all"],
    }
    with small_files.replacing(_file(point, folder, "json")) as temporary:
        temporary.write_text(json.dumps(measures), encoding="utf-8")


def finished(point: SweepPoint, folder: Path) -> Path | None:
    """Return the prediction of a point, or the trace of a complete run; None if neither exists."""
    if point.machine is not None:
        return next(folder.glob(f"points/*-{point.key}.json"), None)
    for path in sorted(folder.glob(f"runs/*-{point.key}-*/trace.h5")):
        try:
            with trace.open(path) as recorded:
                if recorded.steps["step"].max(initial=-1) + 1 == point.config.train.steps:
                    return path
        except ValueError:  # a damaged trace
            continue
    return None


def interrupted(point: SweepPoint, folder: Path) -> Path | None:
    """Return the folder of the unfinished run with the latest checkpoint, or None."""
    newest: dict[Path, int] = {}
    for path in sorted(folder.glob(f"runs/*-{point.key}-*/checkpoints/step-????????")):
        newest[path.parents[1]] = int(path.name[-8:])
    left = [run for run, step in newest.items() if step < point.config.train.steps]
    return max(left, key=newest.get, default=None)


def row_of(point: SweepPoint, path: Path) -> dict[str, Any]:
    """Return the row of a finished point in the table of runs.

    Times are in s and sizes in bytes. `step_s` is the median step time on the slowest rank, with a
    95 % confidence interval over the steps. `received_bytes` is the mean over the ranks, per step.
    `peak_bytes` is the maximum peak memory over the ranks. Unknown values are `None`.
    """
    known = {"ranks": point.ranks, "seed": point.config.seed, "repetition": point.repetition}
    head = {"point": point.number, **point.settings, **point.values, **known}
    if point.machine is not None:
        return head | json.loads(small_files.read(path))
    return head | _measured(path)


def _measured(path: Path) -> dict[str, Any]:
    with trace.open(path) as recorded:
        steady = Steady(recorded)
        step, losses = step_row(steady, time_rows(steady)), loss_rows(recorded)
        error = relative_error(slowest_seconds(steady))
        evaluations = evaluation_rows(recorded)
        *ranks, _ = memory_rows(recorded)
    texts = evaluations[-1]["texts"] if evaluations else []
    return {
        "loss": losses[-1]["loss"],
        "validation_loss": evaluations[-1]["loss"] if evaluations else None,
        **{f"{VALIDATION_LOSS_OF}{each['text']}": each["loss"] for each in texts},
        "step_s": step["step_s_median"],
        **interval("step_s", step["step_s_median"], error),
        "tokens_per_s": step["tokens_per_s"],
        "received_bytes": step["communication_bytes"],
        "peak_bytes": max(row["all"] for row in ranks),
    }
