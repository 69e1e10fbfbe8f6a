"""Table that maps optimizer names in the configuration to optimizer classes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpc3d.training.optimizers.adafactor import Adafactor
from hpc3d.training.optimizers.adamw_8bit import AdamW8bit
from hpc3d.training.optimizers.lion import Lion
from hpc3d.training.optimizers.muon import Muon
from hpc3d.training.optimizers.optimizer import MASTER, SGD, AdamW, Optimizer
from hpc3d.training.optimizers.sharded_muon import ShardedMuon

if TYPE_CHECKING:
    from hpc3d.config.input_file import Config

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


def state_kinds() -> tuple[str, ...]:
    """Return the names of all optimizer states that a checkpoint may contain."""
    specs = [spec for each in OPTIMIZERS.values() for spec in each.STATES]
    return (*dict.fromkeys(spec.name for spec in [MASTER, *specs]),)
