"""Mesh for text generation, which uses only tensor parallelism.

The mesh may differ from that of the training run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from hpc3d.comm.grid import AXES
from hpc3d.config import deprecated_keys
from hpc3d.config.backend_rules import untrainable
from hpc3d.config.input_file import Config, MeshConfig, ModelConfig, ParallelConfig, TrainConfig
from hpc3d.config.load import options, override, to_toml, validate
from hpc3d.config.resolve import refuse, resolve
from hpc3d.config.rules import unknown_values
from hpc3d.config.wrong_values import reported
from hpc3d.console import small_files
from hpc3d.model.decoder import sequences_for

_SIZES = {f"mesh.{axis}" for axis in AXES}


def laid_out(trained: Config, words: Sequence[str], ranks: int, samples: int) -> Config:
    """Return the resolved configuration for text generation on `ranks` ranks.

    `words` are command-line options such as `--mesh.x 2`. The default mesh is that of the training
    run if it has `ranks` ranks and only the tensor-parallel axes x, y and z. Otherwise, it is the
    x by y by z grid of `ranks` ranks with the least communication per token. In the result,
    `train.batch` is the number of sequences required to generate `samples` samples. Raises
    ValueError with one line per violated rule.
    """
    tree = small_files.toml(to_toml(_base(trained, words, ranks)))
    deprecated_keys.warn(override(tree, words))
    config = validate(tree, _wrong_keys)
    refuse(_wrong_keys(config))
    one_token = replace(config.model, sequence=1)
    # Choose a batch size that can be sharded evenly on every possible mesh.
    every = ranks * config.mesh.grid().size
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


def _wrong_keys(config: Config) -> list[str]:
    return [*unknown_values(config), *reported(_other_axes(config.mesh))]


def _base(trained: Config, words: Sequence[str], ranks: int) -> Config:
    """Return the default configuration for generation.

    It uses the parallel scheme of the training run, and the data type float64.
    """
    given = {option.removeprefix("--") for option, _ in options(words)}
    scheme = trained.parallel.scheme
    split = trained.parallel.split if "parallel.scheme" not in given else None
    changed = [key for key in given if key in _SIZES or key.startswith("parallel.")]
    own = trained.mesh.grid().size == ranks and not changed and not [*_other_axes(trained.mesh)]
    return Config(
        name=trained.name,
        mesh=trained.mesh if own else MeshConfig(order=trained.mesh.order),
        parallel=ParallelConfig(scheme=scheme, split=split),
        model=undisturbed(trained.model),
        train=TrainConfig(dtype="float64"),
    )


def undisturbed(model: ModelConfig) -> ModelConfig:
    """Return the model configuration without dropout and with unlimited expert capacity.

    With a limited capacity, the tokens dropped by experts would depend on the other tokens of a
    sequence, and on the layout. In generation, later tokens are not known yet.
    """
    roomy = replace(model, capacity=0.0) if model.experts else model
    return replace(roomy, dropout=0.0)


def described(config: Config) -> str:
    """Describe a model and its layout, such as "gpt2 on x=2 y=2, scheme 2d, float64"."""
    sizes = [f"{axis}={size}" for axis, size in config.mesh.sizes().items() if size > 1]
    how = f"{' '.join(sizes)}, {config.parallel.way}" if sizes else "one rank"
    return f"{config.model.kind} on {how}, {config.train.dtype}"


def _other_axes(mesh: MeshConfig) -> Iterator[str]:
    """Yield an error message for each mesh axis other than x, y and z with more than one rank."""
    for axis in AXES:
        if axis not in "xyz" and getattr(mesh, axis) > 1:
            yield (
                f"mesh.{axis} = {getattr(mesh, axis)}: generation supports only tensor "
                f"parallelism; give --mesh.{axis} 1 and distribute the ranks over x, y and z"
            )
