"""Calibrate and validate a performance model of this machine with runs on up to 8 ranks."""

from __future__ import annotations

import os
import platform
import tempfile
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import hpc3d.trace
from hpc3d.benchmarks import harness
from hpc3d.config.package_data import MACHINE, MEASURED, new_path
from hpc3d.console.sanitize import counted
from hpc3d.console.small_files import naming
from hpc3d.predict.calibration.align_trace import TimedWork, works
from hpc3d.predict.calibration.calibrate import machine_of, step_seconds, with_wakeup
from hpc3d.predict.calibration.calibration_runs import CALIBRATE, CHECK, config_of, settings
from hpc3d.predict.machine.machine_file import dumps
from hpc3d.predict.simulation.simulator import simulate

if TYPE_CHECKING:
    from argparse import Namespace

    from hpc3d.predict.machine.machine import Machine
    from hpc3d.trace.reader import Trace

# Maximum number of ranks per calibration run, and number of ranks per node in the machine file.
_RANKS, _ONE_NODE = 8, 4096


def calibrate(options: Namespace) -> dict[str, Any]:
    how, out = (
        {"transport": options.transport},
        Path(options.machine or new_path(MEASURED, MACHINE)),
    )
    if not out.parent.is_dir():
        raise ValueError(
            f"--machine {out}: folder {out.parent} does not exist; create it or choose an "
            "existing folder"
        )
    with tempfile.TemporaryDirectory() as folder:
        told = []
        for number, line in enumerate(CALIBRATE, 1):
            print(f"calibrate: {number} of {len(CALIBRATE)}: {line}", flush=True)
            told += _works_of(line, folder, how)
        machine = machine_of(told, **_this_machine(options.transport))
        free = [line for line in CALIBRATE if 1 < settings(line)[0] <= machine.cores]
        print(
            f"calibrate: repeating {counted(len(free), 'run')} to measure wall-clock time",
            flush=True,
        )
        timed = [(config_of(line, **how), min(_steps_of(line, folder, how))) for line in free]
        machine = with_wakeup(machine, timed)
        with naming(out):
            out.write_text(dumps(machine))
        print(f"written to {out}")
        rows = [*_check(machine, folder, how, options.rounds or 1)] if options.check else []
    return {"machine": str(out), "check": rows}


def _check(
    machine: Machine, folder: str, how: dict[str, str], repeats: int
) -> Iterator[dict[str, Any]]:
    errors = []
    print(f"{'measured':>10} {'predicted':>10} {'error':>8}  run")
    for line in CHECK:
        config = config_of(line, **how)
        measured = median(time for _ in range(repeats) for time in _steps_of(line, folder, how))
        predicted = step_seconds(simulate(config, config.model.vocabulary, machine))
        errors.append(predicted / measured - 1)
        times = f"{measured * 1e3:7.1f} ms {predicted * 1e3:7.1f} ms"
        print(f"{times} {errors[-1]:+8.1%}  {line}", flush=True)
        yield {"run": line, "measured_s": measured, "predicted_s": predicted}
    sizes = [*map(abs, errors)]
    print(f"error: median {median(sizes):.1%}, maximum {max(sizes):.1%}")


def _works_of(line: str, folder: str, how: dict[str, str]) -> list[TimedWork]:
    """Execute a calibration run, and return each rank's operations with their CPU times."""
    with _trained(line, folder, {**how, "clock": "cpu"}) as trace:
        return works(trace)


def _steps_of(line: str, folder: str, how: dict[str, str]) -> list[float]:
    """Execute a run, and return its wall-clock step times in s, excluding the first two steps."""
    with _trained(line, folder, how) as trace:
        return harness.wall_times(trace, first=2).tolist()


def _trained(line: str, folder: str, how: dict[str, str]) -> Trace:
    return hpc3d.trace.open(harness.run(*settings(line, **how), folder, steps=10)["folder"])


def _this_machine(transport: str) -> dict[str, Any]:
    """Return the `Machine` fields that are not calibrated, such as cores and memory per rank."""
    cores = len(os.sched_getaffinity(0))
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "name": MEASURED,
        "source": f"python -m hpc3d.bench calibrate on {date.today()}: {_processor()}, {cores} "
        f"cores, one thread per rank, mesh.transport {transport}",
        "ranks_per_node": _ONE_NODE,
        "cores": cores,
        "memory_gb": round(memory / _RANKS / 1e9, 3),
    }


def _processor() -> str:
    """Return the name of the CPU, or the architecture if the system does not report the name."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
