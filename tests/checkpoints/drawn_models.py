"""Checkpoints of models with random weights, and the results of these models."""

from dataclasses import replace
from zlib import crc32

import numpy as np

from hpc3d.checkpoints import sharded
from hpc3d.checkpoints.inspect import config_of
from hpc3d.checkpoints.sharded import Checkpoint, Snapshot, restore
from hpc3d.comm.threads import run
from hpc3d.config.load import to_toml
from hpc3d.model.families import family_of
from hpc3d.model.microbatch import Microbatch
from hpc3d.tensor.split import Split
from hpc3d.training.optimizers.optimizer import SGD
from tests.model.whole import Model
from tests.pipeline.mixes import config_of as mix
from tests.pipeline.mixes import trainer_of


def saved(folder, line, step=0):
    """Save a checkpoint of the mix `line` (see tests.pipeline.mixes) in a run folder."""
    config = mix(line)
    header = {"run_id": folder.name, "config": to_toml(config), "position": None}
    header |= {"step": step, "updates": step}
    begun = folder / "checkpoints" / f"step-{step:08d}.tmp"
    begun.mkdir(parents=True)

    def rank(mesh):
        trainer = trainer_of(mesh, config)
        for item in trainer.parameters:
            draw(item, mesh)
        trainer.optimizer.states["first"] += 7
        sharded.write_shard(begun, mesh.rank, Snapshot(trainer.parameters, trainer.optimizer))
        if mesh.rank == 0:
            sharded.complete(begun, mesh.ranks, header, keep=9)

    run(config.sizes(), rank)
    return begun.with_suffix("")


def draw(item, mesh):
    """Set a parameter to random numbers that depend only on its name, except the padding."""
    shape = (item.rows or item.shape[0], *item.shape[1:])
    whole = np.random.default_rng(crc32(item.name.encode())).normal(0, 0.2, shape)
    part = whole[item.layout.slices(item.shape, mesh)]
    item.value[: len(part)] = part


def model_of(folder):
    """Return the model of a checkpoint on one rank, without dropout."""
    opened = Checkpoint(folder)
    config = config_of(opened)
    family = family_of(config.model)

    def rank(mesh):
        shape = replace(family.sizes(config.model, config.model.vocabulary), dropout=0.0)
        model = Model(mesh, shape, Split(), config.train.dtype, family=family)
        restore(opened, model.parameters, SGD(model.parameters, 0.0))
        return model

    return run({}, rank)[0]


def logits(folder, tokens):
    """Return the logits of a checkpoint's model, [sequences, T, vocabulary]."""
    stage = model_of(folder).stage
    micro = Microbatch(0, 0, tokens, tokens, 1.0)
    x, _ = stage.embeddings.forward(micro)
    for block in stage.blocks:
        x, _ = block.forward(x, micro)
    found, _ = stage.head.logits(x)
    return found.reshape(*tokens.shape, -1)


def tokens_of(vocabulary, sequence, sequences=3):
    """Return random tokens, [sequences, T]."""
    return np.random.default_rng(8).integers(0, vocabulary, (sequences, sequence))


def stored(folder):
    """Return {(name, kind): array} of a checkpoint, read from the slices in its files."""
    return {
        key: np.concatenate([array.ravel() for array, _ in parts])
        for key, parts in Checkpoint(folder).sources.items()
    }
