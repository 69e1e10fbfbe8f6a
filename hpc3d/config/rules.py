"""An input file made whole, or refused: what values may be.  The other rules are in size_rules,
pipeline_rules, context_rules, expert_rules, compression_rules, evaluation_rules and
backend_rules."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import inf

from hpc3d.config.backend_rules import wrong_backend
from hpc3d.config.compression_rules import wrong_compression
from hpc3d.config.constraints import out_of_bounds
from hpc3d.config.context_rules import wrong_context
from hpc3d.config.cuboid import enlarged_default, with_cuboid
from hpc3d.config.evaluation_rules import wrong_evaluation
from hpc3d.config.expert_rules import wrong_experts
from hpc3d.config.input_file import (
    AXES,
    CONSTANTS,
    OPTIMIZER_KEYS,
    Config,
    ModelConfig,
    TrainConfig,
)
from hpc3d.config.load import flat
from hpc3d.config.offload_rules import wrong_offload
from hpc3d.config.pipeline_rules import wrong_pipeline
from hpc3d.config.size_rules import violations, wrong_parts
from hpc3d.model.families import FAMILIES, family_of, with_epsilon
from hpc3d.pipeline.schedule import find, usual
from hpc3d.plain import Problems
from hpc3d.tensor.split import LOOPS, STORAGE, misplaced


def resolve(config: Config, ranks: int, default: bool = False) -> Config:
    """`config` with its mesh settled for `ranks`; a `default` model may grow to fit them.

    Raises ValueError with one line for every rule that is broken, each with key and remedy.
    """
    refuse([*unknown_values(config), *not_there_yet(config)])
    config = _with_schedule(config)
    refuse(
        [
            *wrong_context(config),
            *wrong_experts(config),
            *wrong_parts(config),
            *wrong_pipeline(config),
            *wrong_compression(config),
            *wrong_offload(config),
        ]
    )
    if default and (config.model, config.train.batch) == (ModelConfig(), TrainConfig().batch):
        config = enlarged_default(config, ranks)
    config = with_cuboid(config, ranks)
    refuse(violations(config, ranks))
    name = config.name
    if name == Config().name and config.model.kind != ModelConfig().kind:
        name = config.model.kind
    return replace(config, name=name, model=with_epsilon(config.model))


def refuse(problems: Sequence[str]) -> None:
    if problems:
        raise Problems(problems)


def _with_schedule(config: Config) -> Config:
    """`config` with its schedule and the number of chunks settled."""
    name = config.parallel.schedule or usual(config.mesh.p)
    wanted = find(name).chunks or 2
    chunks = wanted if config.parallel.chunks is None else config.parallel.chunks
    return replace(config, parallel=replace(config.parallel, schedule=name, chunks=chunks))


def unknown_values(config: Config) -> Iterator[str]:
    """Numbers out of range, names that do not exist, or not here."""
    yield from out_of_bounds(config)
    yield from _wrong_family(config.model)
    yield from wrong_backend(config)
    yield from _wrong_decay(config.train)
    yield from _wrong_constants(config.train)
    yield from wrong_evaluation(config)
    if not re.fullmatch(r"[\w .+-]+", config.name):
        yield f"name = {config.name!r}: names a folder; use letters, digits and . _ + - only"
    yield from _not_of_names(config)
    order = config.mesh.order
    if sorted(order.split()) != sorted(AXES):
        yield f"mesh.order = {order!r:.60}: must name each of {' '.join(AXES)} once"
    yield from _unknown_letters(config.parallel.split or {})


def _not_of_names(config: Config) -> Iterator[str]:
    """Texts with the one character that no file can have in its name."""
    for key, value in flat(config).items():
        if isinstance(value, str) and "\0" in value:
            yield f"{key} = {value!r}: holds a NUL character; take it out"


_SCALING = "factor", "low", "high", "original"


def _wrong_family(model: ModelConfig) -> Iterator[str]:
    """Keys of another family, and rotary positions that are not known."""
    usual, own = with_epsilon(ModelConfig(kind=model.kind)), family_of(model).keys
    model = with_epsilon(model)
    for key in dict.fromkeys(key for family in FAMILIES.values() for key in family.keys):
        if key not in own and (value := getattr(model, key)) != getattr(usual, key):
            kinds = " or ".join(kind for kind, family in FAMILIES.items() if key in family.keys)
            yield f"model.{key} = {value}: of model.kind = {kinds} alone; leave it out"
    scaling = model.rope_scaling
    if scaling is None:
        return
    if {*scaling} != {*_SCALING} or any(isinstance(value, str) for value in scaling.values()):
        yield (
            f"model.rope_scaling = {scaling}: the form llama3 alone is known; it must have the "
            f"numbers {', '.join(_SCALING)} and nothing else"
        )
    elif not (1 <= scaling["factor"] < inf and 0 < scaling["low"] < scaling["high"] < inf):
        yield f"model.rope_scaling = {scaling}: factor must be at least 1, and 0 < low < high"
    elif not 1 <= scaling["original"] < inf:
        yield f"model.rope_scaling = {scaling}: original must be at least 1, a number of tokens"


def _wrong_decay(train: TrainConfig) -> Iterator[str]:
    if train.min_learning_rate is not None and train.min_learning_rate > train.learning_rate:
        yield (
            f"train.min_learning_rate = {train.min_learning_rate}: must be at most "
            f"train.learning_rate = {train.learning_rate}"
        )
    if train.cooldown is not None and not train.cools_down():
        yield (
            f"train.cooldown = {train.cooldown}: of train.decay = wsd or wsd-linear alone; leave "
            "it out"
        )
    elif train.cooldown is not None and train.cooldown > train.decaying() - train.warmup:
        yield (
            f"train.cooldown = {train.cooldown}: after a warm-up of {train.warmup} there are "
            f"{train.decaying() - train.warmup} of {train.decaying()} steps left; use fewer"
        )
    if train.decay_steps is not None and 0 < train.decay_steps < train.warmup:
        yield (
            f"train.decay_steps = {train.decay_steps}: the warm-up is part of them; use at least "
            f"train.warmup = {train.warmup}"
        )


def _wrong_constants(train: TrainConfig) -> Iterator[str]:
    """Keys that the optimiser has no use for."""
    if train.orthogonalize != "in-turn" and train.optimizer != "muon":
        yield (
            f"train.orthogonalize = {train.orthogonalize}: of train.optimizer = muon alone; leave "
            "it out"
        )
    if train.product_scale != "block" and train.product_dtype is None:
        yield (
            f"train.product_scale = {train.product_scale}: of train.product_dtype = float8 alone; "
            "leave it out"
        )
    for key in OPTIMIZER_KEYS:
        value = getattr(train, key)
        if value is not None and key not in CONSTANTS[train.optimizer]:
            users = " or ".join(each for each, keys in CONSTANTS.items() if key in keys)
            yield f"train.{key} = {value}: of train.optimizer = {users} alone; leave it out"


def _unknown_letters(letters: Mapping[str, str]) -> Iterator[str]:
    """Keys of parallel.split that are no part of a split, axes that do not exist or do not go
    together."""
    for key, axes in letters.items():
        if key not in LOOPS + STORAGE:
            yield f"parallel.split.{key}: unknown key; known here: {', '.join(LOOPS + STORAGE)}"
        for axis in sorted({*axes.split()} - {"x", "y", "z"}):
            yield f"parallel.split.{key}: no tensor axis {axis!r}; there are x, y and z"
    yield from misplaced(letters)


def not_there_yet(config: Config) -> Iterator[str]:
    """Values of the input format that this version does not run."""
    if config.torch.factory:
        name = f"torch.factory = {config.torch.factory!r:.80}"
        yield f"{name}: python -m hpc3d.partition run trains it"
