"""Search for a pipeline schedule for the layout of an input file, with a memory limit.

The pass times and the saved bytes of each stage are those of an estimate of the layout. A
simulation of the full step verifies the peak memory of the schedule.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from hpc3d.config.input_file import Config
from hpc3d.pipeline.csv_schedule import to_csv
from hpc3d.pipeline.schedule_bound import StageMemory, Workload
from hpc3d.pipeline.schedule_search import FoundSchedule, find_schedule
from hpc3d.pipeline.step_model import in_flight
from hpc3d.predict.machine.machine import Machine
from hpc3d.predict.planning.estimate import Estimator
from hpc3d.predict.planning.peak import contents, stage_memory
from hpc3d.predict.planning.planned_layouts import gigabytes
from hpc3d.predict.simulation.simulator import load_resolved, simulate
from hpc3d.predict.simulation.summary import summary

log = logging.getLogger(__name__)
_SPLIT = "zb-h1"  # schedule whose passes are those of a searched schedule
_ATTEMPTS = 4  # maximum number of searches until the simulated peak fits in memory


class ScheduledStep(NamedTuple):
    """Simulated training step with one schedule.

    `seconds` is the step time, and `peaks` lists the peak memory of each stage in bytes per rank.
    """

    seconds: float
    peaks: list[int]


class PlannedSchedule(NamedTuple):
    """Schedule found for the layout `config`, and the step with it.

    `before` is the step with the schedule in `config`.
    """

    config: Config
    found: FoundSchedule
    step: ScheduledStep
    before: ScheduledStep

    def plain(self) -> dict[str, Any]:
        """Return a JSON-serializable dict for `--json`."""
        peaks = [in_flight(stream) for stream in self.found.streams]
        return {
            "makespan_s": self.found.seconds,
            "bound_s": self.found.bound,
            "gap": self.found.gap,
            "in_flight": [peak.activations for peak in peaks],
            "weight_inputs": [peak.weight_inputs for peak in peaks],
            "step_time_s": self.step.seconds,
            "peak_bytes": self.step.peaks,
            "input": {
                "schedule": self.config.parallel.schedule,
                "step_time_s": self.before.seconds,
                "peak_bytes": self.before.peaks,
            },
        }


def plan_schedule(
    source: Path | str, overrides: Sequence[str], ranks: int, machine: Machine, memory: float
) -> PlannedSchedule:
    """Search for a schedule for the layout of an input on `ranks` ranks with `memory` bytes each.

    Raises ValueError if the input is invalid or has several model chunks per stage, or if no
    schedule fits in memory.
    """
    config = load_resolved(source, overrides, ranks)
    if config.mesh.p == 1:
        raise ValueError("mesh.p = 1: --schedule search requires pipeline stages; set mesh.p")
    if config.parallel.chunks > 1:
        raise ValueError(
            f"parallel.chunks = {config.parallel.chunks}: --schedule search requires 1; "
            "use --parallel.chunks 1 --parallel.schedule 1f1b"
        )
    work = _workload(config, machine, memory)
    for attempt in range(1, _ATTEMPTS + 1):
        _refuse_excess(work, memory)
        found = find_schedule(work)
        log.info("simulating a step with the schedule, attempt %d of %d", attempt, _ATTEMPTS)
        with TemporaryDirectory() as folder:
            path = f"{folder}/schedule.csv"
            to_csv(path, found.streams, found.placement)
            step = _step(_with_schedule(config, f"csv:{path}"), machine)
        if max(step.peaks) <= memory:
            return PlannedSchedule(config, found, step, _step(config, machine))
        work = work._replace(memory=_tightened(work, found, step.peaks, memory))
    raise ValueError(_refusal(step.peaks.index(max(step.peaks)), max(step.peaks), memory))


def _with_schedule(config: Config, name: str) -> Config:
    """Return a Config with another schedule."""
    return replace(config, parallel=replace(config.parallel, schedule=name))


def _workload(config: Config, machine: Machine, memory: float) -> Workload:
    config = _with_schedule(config, _SPLIT)
    assert config.model.vocabulary
    estimator = Estimator(config.model.vocabulary, machine)
    parts = estimator.costs.parts(config)
    sample = estimator.costs.sample(config, config.parallel.zero)
    limits = [
        stage_memory(sample, config, parts, stage, memory)
        for stage, _ in enumerate(contents(config))
    ]
    return Workload(config.parallel.microbatches, estimator.part_costs(config, parts), limits)


def _tightened(
    work: Workload, found: FoundSchedule, peaks: Sequence[int], memory: float
) -> list[StageMemory]:
    """Lower the limits of stages whose simulated peak exceeds the memory."""
    limits = []
    for each, stream, peak in zip(work.memory, found.streams, peaks, strict=True):
        saved = each.peak(op for op, *_ in stream)
        limits.append(each._replace(limit=saved - (peak - memory)) if peak > memory else each)
    return limits


def _refuse_excess(work: Workload, memory: float) -> None:
    for stage, (saved, inputs, limit) in enumerate(work.memory):
        if max(saved, inputs) > limit:
            raise ValueError(_refusal(stage, memory - limit + max(saved, inputs), memory))


def _refusal(stage: int, nbytes: float, memory: float) -> str:
    return (
        f"--memory: no schedule with a split backward pass fits in {gigabytes(memory)} per rank, "
        f"because stage {stage} needs about {gigabytes(nbytes)}; increase --memory or use "
        "--parallel.recompute full"
    )


def _step(config: Config, machine: Machine) -> ScheduledStep:
    assert config.model.vocabulary
    runs = simulate(config, config.model.vocabulary, machine)
    return ScheduledStep(
        summary(runs, config, machine)["step_time_s"], [run.peak["all"] for run in runs]
    )
