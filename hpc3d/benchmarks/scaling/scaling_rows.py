"""Predicted and measured rows of a scaling table.

Both kinds of rows have the same keys. The times are those of arXiv:2105.14450: the forward time
and the backward time of a step, and their sum divided by the batch size. The received bytes are
those of rank 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import exp
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from hpc3d import trace
from hpc3d.analyze.metrics.breakdown import memory_rows
from hpc3d.analyze.metrics.compare import relative_error
from hpc3d.analyze.metrics.steady import Steady
from hpc3d.analyze.metrics.step import means_of
from hpc3d.benchmarks.scaling.points import CUBOID, SCHEMES, Point, point_of
from hpc3d.config.cuboid import cuboids
from hpc3d.config.input_file import Config
from hpc3d.config.load import load
from hpc3d.config.resolve import resolve
from hpc3d.console.sanitize import Problems
from hpc3d.predict.machine.machine import Machine
from hpc3d.predict.simulation.count import COMM
from hpc3d.predict.simulation.simulator import StageRun, simulate
from hpc3d.predict.simulation.summary import moved, total_received
from hpc3d.trace.schema import STEPS

_Z95 = 1.96  # two-sided 95 % quantile of the normal distribution
_FORWARD, _BACKWARD = (
    [column.name for column in STEPS].index(name) for name in ("forward_s", "backward_s")
)


def with_mesh(point: Point, config: Config, machine: Machine | None) -> Point:
    """Return a copy of the point with a mesh that can shard its model.

    The mesh of a cuboid is the fastest one on `machine`. Without a machine, it is the mesh with
    the lowest communication volume. Raises ValueError if the model cannot be sharded.
    """
    if point.scheme != CUBOID or machine is None:
        mesh = resolve(point.configured(config), point.ranks).mesh
        return point._replace(mesh=(mesh.x, mesh.y, mesh.z))
    found = {}
    for mesh in cuboids(point.ranks):
        here = point._replace(mesh=mesh)
        try:
            found[here] = _seconds(_simulated(here, config, machine))
        except ValueError:  # a model size is not divisible by the mesh size
            continue
    if not found:
        raise ValueError("no mesh divides the sizes of the model and the batch")
    return min(found, key=found.get)


def _simulated(point: Point, config: Config, machine: Machine) -> StageRun:
    config = resolve(point.configured(config), point.ranks)
    (run,) = simulate(config, config.model.vocabulary, machine)
    return run


def _seconds(run: StageRun) -> float:
    return run.step[_FORWARD] + run.step[_BACKWARD]


def predicted(point: Point, config: Config, machine: Machine) -> dict[str, Any]:
    """Return the predicted row of a point that has a mesh."""
    run = _simulated(point, config, machine)
    times = run.step[_FORWARD], run.step[_BACKWARD]
    return _row(point, "predicted", times, total_received(moved(run)), run.peak["all"])


def _row(point: Point, kind: str, times: Sequence[float], received: float, peak: int):
    forward, backward = times
    return {
        "kind": kind,
        "scheme": point.scheme,
        "ranks": point.ranks,
        "mesh": " x ".join(map(str, point.mesh)),
        "hidden": point.hidden,
        "batch": point.batch,
        "heads": point.heads,
        "layers": point.layers,
        "forward_s": forward,
        "backward_s": backward,
        "sequence_s": (forward + backward) / point.batch,
        "received_bytes": received,
        "peak_bytes": peak,
    }


def measured(point: Point, folders: Sequence[Path]) -> dict[str, Any]:
    """Return the measured row of a point from the folders of its repeated runs.

    The times are medians over the runs. Each run contributes the median over its steps, in which
    the times are averaged over ranks.
    """
    runs = [_run(folder) for folder in folders]
    forward, backward = (median(run[key] for run in runs) for key in ("forward_s", "backward_s"))
    received, peak = (max(run[key] for run in runs) for key in ("received_bytes", "peak"))
    row = _row(point, "measured", (forward, backward), received, peak)
    error = relative_error([run["forward_s"] + run["backward_s"] for run in runs])
    if error is not None:
        factor = exp(_Z95 * error)
        row |= {"low_s": row["sequence_s"] / factor, "high_s": row["sequence_s"] * factor}
    return row | {"runs": len(runs)}


def recorded(folder: Path) -> list[dict[str, Any]]:
    """Return the measured rows of the runs in the subfolders of `folder`.

    Runs with the same model and mesh are repetitions. Raises Problems if there are no runs.
    """
    runs: dict[Point, list[Path]] = {}
    for path in sorted(folder.glob("*/trace.h5")):
        config = load(path.parent / "config.toml", [], of_run=True)
        runs.setdefault(point_of(resolve(config, None)), []).append(path.parent)
    if not runs:
        raise Problems([f"--runs {folder}: no subfolder contains a trace.h5"])
    cube = next((point for point in runs if (point.scheme, point.ranks) == ("3d", 1)), None)
    if cube and any(point.scheme == CUBOID for point in runs):  # one rank is the same mesh
        runs[cube._replace(scheme=CUBOID)] = runs[cube]
    order = sorted(runs, key=lambda point: (SCHEMES.index(point.scheme), point.ranks))
    return [measured(point, runs[point]) for point in order]


def _run(folder: Path) -> dict[str, float]:
    with trace.open(folder / "trace.h5") as recorded:
        steady = Steady(recorded)
        steps, step = np.unique(steady.steps["step"], return_inverse=True)
        times = {
            key: float(np.median(means_of(step, steady.steps[key])))
            for key in ("forward_s", "backward_s")
        }
        events = recorded.events
        calls = (events["category"] == COMM) & (events["rank"] == 0)
        calls &= np.isin(events["step"], steps)
        received = float(events["bytes"][calls].sum()) / len(steps)
        *rows, _ = memory_rows(recorded)
        return {**times, "received_bytes": received, "peak": max(row["all"] for row in rows)}
