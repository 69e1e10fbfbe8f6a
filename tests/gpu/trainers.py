"""Training runs of one rank, on the device and in NumPy."""

from dataclasses import fields, replace
from math import prod

import numpy as np

from hpc3d.arrays.pool import Pool, to_host
from hpc3d.comm.communicator import Self
from hpc3d.comm.mesh import Mesh
from hpc3d.config.input_file import Config
from hpc3d.config.resolve import resolve
from hpc3d.training.trainer import Trainer

SECTIONS = "mesh", "parallel", "model", "train"
# Mixtures of experts: one for each token, of which some are dropped; two, room for all.
SWITCH = {"experts": 4, "top_k": 1, "capacity": 1.0}
BIAS = {"balance_bias": 0.01}  # in float32
MIXTRAL = {"kind": "llama", "experts": 4, "top_k": 2, "capacity": 0.0, "shared_experts": 1}


def config_of(backend, **values):
    """Return a Config with these values of any section, for a mesh of their sizes."""
    config = Config(name="gpu-check")
    for key, value in {**values, "backend": backend}.items():
        section = next(s for s in SECTIONS if key in keys_of(getattr(config, s)))
        changed = replace(getattr(config, section), **{key: value})
        config = replace(config, **{section: changed})
    return resolve(config, prod(config.sizes().values()))


def keys_of(section):
    return {field.name for field in fields(section)}


class Noise:
    """Random batches."""

    def __init__(self, config):
        self.shape = 2, config.train.batch, config.model.sequence
        self.vocabulary = config.model.vocabulary

    def batch(self, step):
        draw = np.random.default_rng(step)
        return draw.integers(0, self.vocabulary, self.shape, np.int32)


def on_numpy():
    """Return the mesh of one rank on a host."""
    return Mesh({}, {}, {}, Self(Pool()))


def on(device):
    """Return the mesh of one rank on a device."""
    return Mesh({}, {}, {}, Self(Pool()), pool=device.pool())


def trainer_of(device, kind=Trainer, /, batches=None, **values):
    """Return a trainer on the device, or on NumPy if the device is None."""
    config = config_of("numpy" if device is None else "cupy", **values)
    mesh = on_numpy() if device is None else on(device)
    return kind(mesh, config, config.model.vocabulary, batches or Noise(config))


class Watching(Trainer):
    """Trainer that copies the gradients of its last step to the host."""

    def update(self):
        self.gradients = {item.name: host(item.grad) for item in self.parameters}
        super().update()


def values_of(trainer):
    return {item.name: host(item.value) for item in trainer.parameters}


def host(array):
    """Return a copy on the host, in float32 or wider."""
    copy = np.array(to_host(array))
    return copy.astype(np.promote_types(copy.dtype, np.float32))
