"""Measure small runs that show the findings of arXiv:2407.02081, and compare predictions."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np

import hpc3d.trace
from hpc3d.benchmarks import harness
from hpc3d.config.package_data import MACHINE, MEASURED, find
from hpc3d.predict.calibration.calibration_runs import FINDINGS, config_of, settings
from hpc3d.predict.machine.machine_file import load
from hpc3d.predict.simulation.simulator import simulate
from hpc3d.predict.simulation.summary import summary
from hpc3d.trace.schema import MEMORY_KIND

if TYPE_CHECKING:
    from argparse import Namespace

    from hpc3d.predict.machine.machine import Machine

_VALUES = "measured", "predicted"
_STEPS, _WARM = 8, 2  # number of steps per run, and number of warm-up steps among them


def findings(options: Namespace) -> dict[str, Any]:
    """Run the small layouts of each finding, and print their measured and predicted values.

    The predictions are for the machine file of this machine, unless options.machine names
    another one. Raises ValueError if this machine has not been calibrated.
    """
    machine = load(options.machine or _measured_machine())
    print("      step time,                  error  memory of all ranks,           run")
    print("      measured      predicted            measured      predicted")
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for finding, lines in FINDINGS.items():
            print(finding)
            rows += [row | {"finding": finding} for row in _rows(machine, lines, folder, options)]
    return {"machine": machine.name, "measured": rows}


def _measured_machine() -> Path:
    try:
        return find(MEASURED, MACHINE)
    except ValueError:
        remedy = "run python -m hpc3d.bench calibrate, or set --machine"
        raise ValueError(f"findings --measure: this machine is not measured; {remedy}") from None


def _rows(
    machine: Machine, lines: list[str], folder: str, options: Namespace
) -> Iterator[dict[str, Any]]:
    for line in lines:
        found = [_measured(line, folder) for _ in range(options.rounds or 1)]
        config = config_of(line)
        step = summary(simulate(config, config.model.vocabulary, machine), config, machine)
        row = {
            "run": line,
            "measured_s": median(seconds for seconds, _ in found),
            "predicted_s": step["step_time_s"],
            "measured_bytes": found[0][1],
            "predicted_bytes": step["memory"]["total"],
        }
        error = row["predicted_s"] / row["measured_s"] - 1
        times = [f"{row[f'{which}_s'] * 1e3:11.1f} ms" for which in _VALUES]
        sizes = [f"{row[f'{which}_bytes'] / 1e6:11.1f} MB" for which in _VALUES]
        print(*times, f"{error:+8.1%}", *sizes, "", line, flush=True)
        yield row


def _measured(line: str, folder: str) -> tuple[float, int]:
    """Execute a run; return its median step time [s] and the peak memory of all ranks [B]."""
    where = harness.run(*settings(line), folder, steps=_STEPS)["folder"]
    with hpc3d.trace.open(where) as opened:
        memory = opened.memory
        total = memory["kind"] == MEMORY_KIND.index("all")
        last = total & (memory["step"] == _STEPS - 1)
        seconds = harness.wall_times(opened, first=_WARM)
        return float(np.median(seconds)), int(memory["peak"][last].sum())
