"""Validation rules for single values, names, the learning-rate decay and `parallel.split`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from math import inf

from hpc3d.comm.grid import AXES
from hpc3d.config.backend_rules import wrong_backend
from hpc3d.config.constraints import invalid_keys, out_of_bounds
from hpc3d.config.input_file import Config, DataConfig, ModelConfig, TrainConfig
from hpc3d.config.load import flat
from hpc3d.config.wrong_values import mark_wrong, reported
from hpc3d.console.sanitize import abbreviated, counted
from hpc3d.ops.rotary import SCALINGS, Rotation
from hpc3d.pipeline.schedule import find
from hpc3d.tensor.split import LOOPS, STORAGE, misplaced

_MOST_WEIGHT = 1000  # limits the length of a round of a mixture
_LEAST_CAP, _MOST_CAP = 1e-6, 1e6  # range of soft caps other than 0


def unknown_values(config: Config) -> Iterator[str]:
    """Report numbers that are out of range, and names that are unknown or not supported."""
    outside = [*out_of_bounds(config)]
    yield from outside
    config = mark_wrong(config, outside)
    train = _wrong_decay(config.train), _without_validation(config)
    names = _wrong_name(config.name), _nul_characters(config), _wrong_order(config.mesh.order)
    rules = invalid_keys(config), _wrong_scaling(config.model), wrong_backend(config)
    yield from reported(
        *rules,
        _wrong_caps(config.model),
        *train,
        *names,
        _wrong_weights(config.data),
        _unknown_letters(config.parallel.split),
    )


def _without_validation(config: Config) -> Iterator[str]:
    every = config.train.eval_every
    if every > 0 and config.torch.factory:
        if not config.torch.validation:
            remedy = "set it to MODULE:FUNCTION, which returns the inputs of a validation batch"
            yield f"train.eval_every = {every} requires torch.validation; {remedy}"
        if config.train.eval_batches == 0:
            yield "train.eval_batches = 0: set the number of batches of torch.validation"
    elif every > 0 and config.data.validation in (None, "", ()):
        remedy = "set it to the path of a validation text, or to a fraction such as 0.05"
        yield f"train.eval_every = {every} requires data.validation; {remedy}"
    elif "" in config.data.validation_texts():
        yield "data.validation must contain no empty path; set it to the paths of texts"


def _wrong_weights(data: DataConfig) -> Iterator[str]:
    """Report a mixture without parts, and weights that do not match its parts."""
    if not (paths := data.paths()) or "" in paths:
        yield "data.path must name at least one text, and no empty path; set it to a path"
    elif data.weights is not None:
        key, parts = f"data.weights = {[*data.weights]}", counted(len(paths), "text")
        if len(data.weights) != len(paths):
            yield f"{key}: data.path has {parts}; set one weight per text"
        elif not all(0 < weight < inf for weight in data.weights):
            yield f"{key}: each weight must be a positive number"
        elif max(data.ratio()) > _MOST_WEIGHT:
            limit = f"integer weights with the same ratio exceed {_MOST_WEIGHT}"
            yield f"{key}: {limit}; use numbers with fewer digits"


def _wrong_name(name: str) -> Iterator[str]:
    if not re.fullmatch(r"[\w .+-]+", str(name)):
        given = abbreviated(repr(name))
        yield f"name = {given} is part of a folder name; use letters, digits and . _ + -"


def _nul_characters(config: Config) -> Iterator[str]:
    for key, value in flat(config).items():
        texts = value if isinstance(value, tuple) else (value,)
        if any(isinstance(text, str) and "\0" in text for text in texts):
            yield f"{key} = {abbreviated(repr(value))}: contains a NUL character; remove it"


def _wrong_order(order: str) -> Iterator[str]:
    if sorted(order.split()) != sorted(AXES):
        axes = " ".join(AXES)
        yield f"mesh.order = {order!r:.60}: must list each of {axes} once, separated by spaces"


def unknown_schedule(config: Config) -> Iterator[str]:
    """Report an unknown schedule, or a schedule file that is invalid."""
    try:
        find(config.parallel.schedule or "none")
    except ValueError as error:
        yield str(error)


def _wrong_scaling(model: ModelConfig) -> Iterator[str]:
    """Report an unknown type of RoPE scaling, and invalid parameters."""
    if model.rope_scaling is None:
        return
    given = {**model.rope_scaling}
    key = f"model.rope_scaling = {abbreviated(str(given))}"
    kind = given.pop("type", "llama3")
    if kind not in SCALINGS:
        yield f"{key}: unknown type {kind!r}; use {', '.join(SCALINGS)}"
        return
    needed, others = SCALINGS[kind].keys, SCALINGS[kind].others
    lists = [name for name in needed if name in ("short", "long")]
    wrong = [
        name
        for name, value in given.items()
        if isinstance(value, str) or isinstance(value, tuple) != (name in lists)
    ]
    if wrong or not {*needed} <= given.keys() <= {*needed, *others}:
        optional = f", and optionally {', '.join(others)}," if others else ""
        names = f"the keys {', '.join(needed)}{optional} and no others"
        form = f"{' and '.join(lists)} with a list, the others" if lists else "each"
        yield f"{key}: type {kind} must have {names}, {form} with a number"
    elif not 1 <= given["factor"] < inf:
        yield f"{key}: factor must be at least 1"
    elif not 1 <= given.get("original", 1) < inf:
        yield f"{key}: original, a number of tokens, must be at least 1"
    else:
        rotation = Rotation(model.rope_theta, **given, type=kind, share=model.rope_fraction)
        yield from _wrong_limits(key, rotation, model.head_width)


def _wrong_caps(model: ModelConfig) -> Iterator[str]:
    """Report a soft cap at which x / cap or cap * x could leave the range of float32."""
    for key in ("score_cap", "logit_cap"):
        cap = getattr(model, key)
        if cap and not _LEAST_CAP <= cap <= _MOST_CAP:
            bounds = f"from {_LEAST_CAP:g} to {_MOST_CAP:g}, or 0 to disable the cap"
            yield f"model.{key} = {cap}: must be {bounds}"


def _wrong_limits(key: str, rotation: Rotation, width: int) -> Iterator[str]:
    """Report RoPE frequency limits in the wrong order, and values that the type does not allow.

    `width` is the number of features of a head.
    """
    pairs, kind = rotation.rotated(width) // 2, rotation.type
    if not (0 < rotation.low < rotation.high < inf and 0 < rotation.slow < rotation.fast < inf):
        yield f"{key}: 0 < low < high and 0 < slow < fast must hold"
    elif rotation.original == 1 < rotation.factor and "long" in SCALINGS[kind].keys:
        yield f"{key}: type {kind} needs an original length of at least 2 tokens"
    elif not 0 < rotation.amplitude < inf:
        yield f"{key}: attention must be positive"
    elif SCALINGS[kind].attention and rotation.base == 1:
        yield f"{key}: type {kind} needs model.rope_theta above 1"
    for name in {"short", "long"}.intersection(SCALINGS[kind].keys):
        numbers = getattr(rotation, name)
        if len(numbers) != pairs or not all(0 < each < inf for each in numbers):
            what = f"{pairs} positive numbers, one for each pair of rotated features of a head"
            yield f"{key}: {name} must have {what}, not {abbreviated(str(numbers))}"


def _wrong_decay(train: TrainConfig) -> Iterator[str]:
    """Report decay settings that conflict with the learning rate, the warmup or the step count."""
    left = train.decaying() - train.warmup
    if train.min_learning_rate is not None and train.min_learning_rate > train.learning_rate:
        key, rate = f"train.min_learning_rate = {train.min_learning_rate}", train.learning_rate
        yield f"{key}: must be at most train.learning_rate = {rate}"
    if train.cooldown is not None and train.cooldown > left:
        yield (
            f"train.cooldown = {train.cooldown}: only {left} of "
            f"{counted(train.decaying(), 'step')} follow the warmup; use fewer"
        )
    if train.decay_steps is not None and 0 < train.decay_steps < train.warmup:
        key = f"train.decay_steps = {train.decay_steps}"
        yield f"{key} includes the warmup; use at least train.warmup = {train.warmup}"


def _unknown_letters(letters: Mapping[str, str] | None) -> Iterator[str]:
    """Report unknown keys, unknown axes and incompatible axes in `parallel.split`."""
    letters = letters or {}
    for key, axes in letters.items():
        if key not in LOOPS + STORAGE:
            yield f"parallel.split.{key}: unknown key; use {', '.join(LOOPS + STORAGE)}"
        for axis in sorted({*axes.split()} - {"x", "y", "z"}):
            given = abbreviated(repr(axis))
            yield f"parallel.split.{key}: unknown tensor axis {given}; use x, y and z"
    yield from misplaced(letters)


def not_there_yet(config: Config) -> Iterator[str]:
    """Report an error if the model is a PyTorch module, which only hpc3d.partition can train."""
    if config.torch.factory:
        name = f"torch.factory = {config.torch.factory!r:.80}"
        yield f"{name}: use python -m hpc3d.partition run to train a PyTorch module"
