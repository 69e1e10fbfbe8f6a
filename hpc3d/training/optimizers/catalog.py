"""Table that maps optimizer names in the configuration to optimizer classes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpc3d.training.optimizers.adafactor import Adafactor
from hpc3d.training.optimizers.adamw_8bit import AdamW8bit
from hpc3d.training.optimizers.lion import Lion
from hpc3d.training.optimizers.muon import Muon
from hpc3d.training.optimizers.optimizer import MASTER, SGD, AdamW, Optimizer
from hpc3d.training.optimizers.outer import OUTER_STATES, outer_states
from hpc3d.training.optimizers.sharded_muon import ShardedMuon

if TYPE_CHECKING:
    from hpc3d.config.input_file import Config
    from hpc3d.model.parameters import Parameters
    from hpc3d.training.optimizers.optimizer import StateSpec

OPTIMIZERS: dict[str, type[Optimizer]] = {
    "adamw": AdamW,
    "adamw-8bit": AdamW8bit,
    "adafactor": Adafactor,
    "lion": Lion,
    "muon": Muon,
    "sgd": SGD,
}


def optimizer_of(config: Config) -> type[Optimizer]:
    """Return the optimizer class selected by a configuration."""
    if config.train.orthogonalize == "sharded":
        return ShardedMuon
    return OPTIMIZERS[config.train.optimizer]


def states_of(config: Config) -> tuple[StateSpec, ...]:
    """Return the states of a configuration's inner and outer optimizer, except master copies."""
    return (*optimizer_of(config).STATES, *outer_states(config.parallel))


def optimizer_for(config: Config, parameters: Parameters) -> Optimizer:
    """Create the optimizer of `parameters` that a configuration selects."""
    train, others = config.train, outer_states(config.parallel)
    return optimizer_of(config)(parameters, train.weight_decay, others, **train.constants())


def state_kinds() -> tuple[str, ...]:
    """Return the names of all optimizer states that a checkpoint may contain."""
    specs = [*(spec for each in OPTIMIZERS.values() for spec in each.STATES), *OUTER_STATES]
    return (*dict.fromkeys(spec.name for spec in [MASTER, *specs]),)
