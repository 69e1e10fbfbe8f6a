"""A step of an experiment on a machine: few sizes, the rest as it usually is."""

from math import prod

from hpc3d.config.input_file import Config, MeshConfig, ModelConfig, ParallelConfig, TrainConfig
from hpc3d.config.rules import settle
from hpc3d.predict.simulation.simulator import BYTES, simulate
from hpc3d.predict.simulation.summary import summary


def dtype_of(machine):
    """What is trained in: 16-bit values where the machine has rates of them."""
    return "float16" if "float16" in machine.gemm else "float32"


def settled(machine, mesh, batch, parallel=None, **model):
    """The Config of an experiment, with heads of 64."""
    hidden = model["hidden"]
    return settle(
        Config(
            name="findings",
            mesh=MeshConfig(**{"x": 1, "y": 1, "z": 1} | mesh),
            parallel=ParallelConfig(**parallel or {}),
            model=ModelConfig(**{"vocabulary": BYTES, "heads": max(1, hidden // 64)} | model),
            train=TrainConfig(batch=batch, dtype=dtype_of(machine)),
        ),
        prod(mesh.values()),
    )


def step(machine, config):
    """The StageRuns of a step and what they come to."""
    runs = simulate(config, config.model.vocabulary, machine)
    return runs, summary(runs, config, machine)
