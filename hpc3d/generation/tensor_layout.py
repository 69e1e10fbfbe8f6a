"""How the ranks that continue a text share the model: tensor axes alone, whatever it was trained
on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from hpc3d.comm.grid import AXES
from hpc3d.config import deprecated_keys
from hpc3d.config.backend_rules import untrainable
from hpc3d.config.input_file import Config, MeshConfig, ModelConfig, ParallelConfig, TrainConfig
from hpc3d.config.load import options, override, to_toml, validate
from hpc3d.config.rules import refuse, resolve, unknown_values
from hpc3d.console import small_files
from hpc3d.model.decoder import sequences_for

_SIZES = {f"mesh.{axis}" for axis in AXES}


def laid_out(trained: Config, words: Sequence[str], ranks: int, samples: int) -> Config:
    """The configuration of a model on so many ranks, settled; `train.batch` are the sequences that
    `samples` need there.

    The mesh is the one that `words`, options `--section.key value`, give; without these that of
    the run, if it is one of tensor axes for as many ranks, or the best cuboid for a token a pass.
    ValueError with a line for every rule that is broken.
    """
    tree = small_files.toml(to_toml(_base(trained, words, ranks)))
    deprecated_keys.warn(override(tree, words))
    config = validate(tree)
    refuse([*unknown_values(config), *_other_axes(config.mesh)])
    one_token = replace(config.model, sequence=1)
    every = ranks * config.mesh.grid().size  # sequences that divide over every mesh
    batch = -(-samples // every) * every
    train = replace(config.train, batch=batch)
    config = resolve(replace(config, model=one_token, train=train), ranks)
    refuse([*untrainable(config)])
    split, mixes = config.splits["dense"], config.model.experts > 0
    sequences = sequences_for(config.mesh.sizes(), split, samples, mixes)
    return replace(
        config,
        model=replace(config.model, sequence=trained.model.sequence),
        train=replace(config.train, batch=sequences),
    )


def _base(trained: Config, words: Sequence[str], ranks: int) -> Config:
    """What holds without being asked for: the scheme of the run, and float64."""
    given = {option.removeprefix("--") for option, _ in options(words)}
    scheme = trained.parallel.scheme
    split = trained.parallel.split if "parallel.scheme" not in given else None
    changed = [key for key in given if key in _SIZES or key.startswith("parallel.")]
    own = trained.mesh.grid().size == ranks and not changed and not [*_other_axes(trained.mesh)]
    return Config(
        name=trained.name,
        mesh=trained.mesh if own else MeshConfig(order=trained.mesh.order),
        parallel=ParallelConfig(scheme=scheme, split=split),
        model=_undisturbed(trained.model),
        train=TrainConfig(dtype="float64"),
    )


def _undisturbed(model: ModelConfig) -> ModelConfig:
    """A model that drops nothing: no feature, and no token of an expert that has many; for who
    finds a slot depends on tokens that do not follow yet."""
    roomy = replace(model, capacity=0.0) if model.experts else model
    return replace(roomy, dropout=0.0)


def _other_axes(mesh: MeshConfig) -> Iterator[str]:
    """A line for each axis that is no tensor axis."""
    for axis in AXES:
        if axis not in "xyz" and getattr(mesh, axis) > 1:
            yield (
                f"mesh.{axis} = {getattr(mesh, axis)}: a text is continued on tensor axes only: "
                f"give --mesh.{axis} 1, and the ranks to x, y and z"
            )
