"""Measure the overhead of the checks for silent data corruption ([guard] in the configuration).

A run alternates between steps with the checks and steps without them.
"""

from __future__ import annotations

import tempfile
from math import ceil
from typing import TYPE_CHECKING, Any

import numpy as np

from hpc3d import trace
from hpc3d.analyze.metrics.step import step_seconds
from hpc3d.benchmarks import harness
from hpc3d.config.package_data import shipped

if TYPE_CHECKING:
    from argparse import Namespace

    from hpc3d.trace.reader import Trace

_RUNS = {1: "gpt-serial.toml", 8: "gpt-3d-8.toml", 64: "gpt-3d-64.toml"}
_SHARE = 0.03  # maximum acceptable overhead of the checks, as a fraction of the step time
_EVERY = 100  # number of steps between comparisons of replicas (guard.replicas_every)


def guards(options: Namespace) -> dict[str, Any]:
    """Measure, print and return the overhead of the checks in CPU time, summed over ranks."""
    results = {}
    for ranks, name in _RUNS.items():
        found = results[f"{name}, {ranks} ranks"] = _measured(ranks, name, options.rounds or 10)
        step, low, high = found["theirs_s"], found["ratio_min"], found["ratio_max"]
        cost, replicas = found["ratio"] - 1, found["replicas_s"]
        every = max(1, ceil(cost / _SHARE))
        print(f"{name}, {ranks} ranks: {step:.2f} s of CPU time per step")
        spread = f"{1 + cost:.3f} ({low:.3f} to {high:.3f})"
        print(f"    ratio of step times with and without checks of GEMMs and messages: {spread}")
        print(f"    guard.abft_every = {every}: {cost / every:.1%} of a step")
        print(f"    guard.replicas_every = {_EVERY}: {replicas / _EVERY / step:.2%} of a step")
    return results


def _measured(ranks: int, name: str, rounds: int) -> dict[str, Any]:
    """Measure the time of a step with and without checks, and of a replica comparison."""
    how = ["--guard.abft_every", "2", "--guard.replicas_every", "2", "--trace.clock", "cpu"]
    with tempfile.TemporaryDirectory() as folder:
        done = harness.run(ranks, [str(shipped(name)), *how], folder, steps=2 * rounds + 2)
        with trace.open(done["folder"] / "trace.h5") as recorded:
            steps = np.bincount(recorded.steps["step"], step_seconds(recorded))
            replicas = _seconds_of_replicas(recorded)
    return {**harness.ratios(steps[2::2], steps[3::2]), "replicas_s": replicas}


def _seconds_of_replicas(recorded: Trace) -> float:
    """Return the mean CPU time of one replica comparison in seconds, summed over ranks."""
    names, events = np.array(recorded.strings), recorded.events
    here = names[events["name"]] == "hashes of replicas"
    count = max(1, int((here & (events["rank"] == 0)).sum()))
    return float(events["dur"][here].sum()) * 1e-9 / count
