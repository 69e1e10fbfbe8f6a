"""Validate a configuration, and fill in the values that an input file leaves unset."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

from hpc3d.config.cuboid import enlarged_default, with_cuboid
from hpc3d.config.input_file import Config, ModelConfig, TrainConfig
from hpc3d.config.parallel_rules import (
    wrong_compression,
    wrong_context,
    wrong_experts,
    wrong_offload,
)
from hpc3d.config.pipeline_rules import wrong_pipeline
from hpc3d.config.rules import not_there_yet, unknown_schedule, unknown_values
from hpc3d.config.size_rules import violations, wrong_parts
from hpc3d.config.wrong_values import WRONG, WrongValueUsed, mark_wrong, reported
from hpc3d.console.sanitize import Problems
from hpc3d.model.families import with_epsilon
from hpc3d.pipeline.schedule import find, usual


def resolve(config: Config, ranks: int | None, default: bool = False) -> Config:
    """Validate a configuration and fill in its mesh, its schedule and other unset values.

    If `ranks` is `None`, the number of ranks is the product of the sizes in [mesh]. If `default`
    is true, the default model may be enlarged to fit the ranks. Raises ValueError with one line
    per violated rule; each line names the key and a fix.
    """
    config, problems = _resolved(config, ranks, default)
    refuse(problems)
    return with_family_defaults(config)


def with_family_defaults(config: Config) -> Config:
    """Fill in the keys whose defaults depend on the model family: `name` and `norm_epsilon`."""
    name = config.name
    if name == Config().name and config.model.kind != ModelConfig().kind:
        name = config.model.kind
    return replace(config, name=name, model=with_epsilon(config.model))


def violated(config: Config, ranks: int | None, default: bool = False) -> list[str]:
    """Return the error messages that `resolve` would raise for a configuration."""
    return _resolved(config, ranks, default)[1]


def _resolved(config: Config, ranks: int | None, default: bool) -> tuple[Config, list[str]]:
    """Fill in the mesh and the schedule of `config`, and check all rules.

    A rule is skipped if it needs a value for which an error has already been reported. Returns the
    configuration and the error messages.
    """
    problems = [*unknown_values(config)]
    config = mark_wrong(config, problems)
    problems += reported(not_there_yet(config), unknown_schedule(config))
    config = _with_schedule(mark_wrong(config, problems))
    sizes = wrong_context(config), wrong_experts(config), wrong_parts(config)
    others = wrong_pipeline(config), wrong_compression(config), wrong_offload(config)
    problems += reported(*sizes, *others)
    config = mark_wrong(config, problems)
    try:
        ranks = ranks or config.mesh.grid().size
        if default and (config.model, config.train.batch) == (ModelConfig(), TrainConfig().batch):
            config = enlarged_default(config, ranks)
        config = with_cuboid(config, ranks)
        problems += violations(config, ranks)
    except WrongValueUsed:
        pass
    except Problems as error:  # of any sizes of x, y and z
        problems += error.lines
    except ValueError as error:  # no sizes of x, y and z divide the model and batch sizes
        problems.append(str(error))
    return config, problems


def refuse(problems: Sequence[str]) -> None:
    if problems:
        raise Problems(problems)


def _with_schedule(config: Config) -> Config:
    """Fill in the pipeline schedule and the number of model chunks, if they are unset."""
    name = wanted = WRONG
    with suppress(WrongValueUsed):
        name = config.parallel.schedule or usual(config.mesh.p)
        wanted = find(name).chunks or 2
    chunks = wanted if config.parallel.chunks is None else config.parallel.chunks
    return replace(config, parallel=replace(config.parallel, schedule=name, chunks=chunks))
