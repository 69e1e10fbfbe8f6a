"""Simulate one training step, with default values for most configuration keys."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

from hpc3d.config.input_file import Config, MeshConfig, ModelConfig, ParallelConfig, TrainConfig
from hpc3d.config.resolve import resolve
from hpc3d.predict.machine.machine import Machine
from hpc3d.predict.simulation.simulator import BYTE_VOCABULARY, StageRun, simulate
from hpc3d.predict.simulation.summary import summary


def dtype_of(machine: Machine) -> str:
    """Return the training dtype: float16 if the machine has GEMM rates for it, else float32."""
    return "float16" if "float16" in machine.gemm else "float32"


def resolved_config(
    machine: Machine,
    mesh: dict[str, int],
    batch: int,
    parallel: Mapping[str, Any] | None = None,
    **model: Any,
) -> Config:
    """Return the resolved configuration of an experiment, with 64 features per attention head."""
    hidden = model["hidden"]
    return resolve(
        Config(
            name="findings",
            mesh=MeshConfig(**{"x": 1, "y": 1, "z": 1} | mesh),
            parallel=ParallelConfig(**parallel or {}),
            model=ModelConfig(
                **{"vocabulary": BYTE_VOCABULARY, "heads": max(1, hidden // 64)} | model
            ),
            train=TrainConfig(batch=batch, dtype=dtype_of(machine)),
        ),
        prod(mesh.values()),
    )


def step(machine: Machine, config: Config) -> tuple[list[StageRun], dict[str, Any]]:
    """Simulate a training step; return the simulated run of each stage, and a summary."""
    runs = simulate(config, config.model.vocabulary, machine)
    return runs, summary(runs, config, machine)
