"""A GPT-2 in the files of `transformers`: what model it is, and its arrays.

The files are not trusted: sizes come from arrays that are there, not from what config.json says.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hpc3d import files, renamed
from hpc3d.checkpoints.hf_export import (
    CONFIG,
    DROPOUTS,
    FIXED,
    GELU,
    INDEX,
    SIZES,
    WEIGHTS,
    exchanged,
)
from hpc3d.checkpoints.inspect import shapes_of
from hpc3d.checkpoints.safetensors import Weights
from hpc3d.config.backend_rules import untrainable
from hpc3d.config.input_file import ModelConfig
from hpc3d.config.load import override, validate
from hpc3d.config.rules import refuse, resolve
from hpc3d.model.families import GPT2

if TYPE_CHECKING:
    from hpc3d.checkpoints.safetensors import Entry
    from hpc3d.config.input_file import Config

_NAMES = GPT2.names
_TABLE, _POSITIONS, _HEAD = map(
    _NAMES.name_of, ("embedding.token", "embedding.position", "head.table")
)
_FILE = re.compile(r"[\w-][\w.-]*\.safetensors")
_MASKS = re.compile(r"h\.\d+\.attn\.(masked_)?bias")  # of older versions: no parameters
_ACTIVATIONS = {
    **{theirs: ours for ours, theirs in GELU.items()},
    "gelu_pytorch_tanh": "tanh",
    "gelu_fast": "tanh",
    "gelu_python": "exact",
}


class Pretrained:
    """The model in a folder or a file.

    `model` has the keys of the section [model] that are known of it, `_undecided` those that must
    be given, each with the reason.  ValueError, in one line, if it cannot be trained here.
    """

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        self.places = _places(_weight_files(self.path))
        told = (self.path if self.path.is_dir() else self.path.parent) / CONFIG
        settings = _read_json(told) if told.exists() else {}
        try:
            self.model = _measured(self.entries) | told_by(settings)
            self.model["tied"] = self.tied(settings)
            self.undecided = _undecided(settings, self.model)
            _check(self.entries, settings, self.model)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None

    @property
    def entries(self) -> dict[str, Entry]:
        return {name: file.entries[stored] for name, (file, stored) in self.places.items()}

    @property
    def dtype(self) -> str:
        """float64 if any array is so, else float32: shorter numbers are widened."""
        stored = {entry.dtype for entry in self.entries.values()}
        return "float64" if "F64" in stored else "float32"

    def read(self, name: str) -> np.ndarray:
        file, stored = self.places[name]
        return file.read(stored)

    def tied(self, settings: Mapping[str, Any]) -> bool:
        """Whether the head is the token table; a copy of that is dropped."""
        same = _HEAD not in self.places or np.array_equal(self.read(_HEAD), self.read(_TABLE))
        tied = settings.get("tie_word_embeddings", True if settings else same)
        if tied and not same:
            raise ValueError(
                f"{_HEAD} is not {_TABLE}, but {CONFIG} ties them: set tie_word_embeddings to"
                " false"
            )
        if tied:
            self.places.pop(_HEAD, None)
        return tied

    def parameter(self, ours: str, model: ModelConfig) -> np.ndarray:
        """A parameter by our name, as the `ModelConfig` that was made of this wants it."""
        value = self.read(_NAMES.name_of(ours))
        if ours == "embedding.position":
            return value[: model.sequence]
        return exchanged(value, (3, model.heads)) if ".qkv." in ours else value


def _weight_files(path: Path) -> list[Weights]:
    """The files with the weights of a folder; or that one file."""
    if not path.exists():
        raise ValueError(f"{path}: there is no such file or folder")
    if (path / INDEX).exists() and not (path / WEIGHTS).exists():
        names = _read_json(path / INDEX).get("weight_map")
        names = sorted({*map(str, names.values())}) if isinstance(names, dict) else []
        if not names or not all(map(_FILE.fullmatch, names)):
            raise ValueError(f"{path / INDEX}: its weight_map does not name files beside it")
        return [Weights(path / name) for name in names]
    file = path / WEIGHTS if path.is_dir() else path
    if file.suffix != ".safetensors" or not file.is_file():
        raise ValueError(
            f"{path}: there is no {WEIGHTS}; other files, such as pytorch_model.bin, are pickles, "
            "which can run code: write it with model.save_pretrained(FOLDER) of transformers"
        )
    return [Weights(file)]


def _places(files: Sequence[Weights]) -> dict[str, tuple[Weights, str]]:
    """{GPT-2's name without prefix: (file, name in it)} of all arrays but masks."""
    found = {}
    for file in files:
        for stored in file.entries:
            name = stored.removeprefix(_NAMES.prefix)
            if name in found:
                raise ValueError(f"{file.path}: {name!r} is there twice")
            if not _MASKS.fullmatch(name):
                found[name] = file, stored
    return found


def _read_json(path: Path) -> dict[str, Any]:
    """A JSON object; ValueError if a file has none."""
    try:
        found = json.loads(files.read(path, files.MOST_JSON))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: no JSON: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path}: no JSON object")
    return found


def _measured(entries: Mapping[str, Entry]) -> dict[str, int]:
    """The sizes of a model, from the shapes of its arrays."""
    for name in (_TABLE, _POSITIONS):
        if name not in entries or len(entries[name].shape) != 2:
            raise ValueError(f"it has no matrix {name}: it is no GPT-2")
    vocabulary, hidden = entries[_TABLE].shape
    return {
        "layers": len({name.split(".")[1] for name in entries if name.startswith("h.")}),
        "hidden": hidden,
        "sequence": entries[_POSITIONS].shape[0],
        "vocabulary": vocabulary,
    }


def told_by(settings: Mapping[str, Any]) -> dict[str, Any]:
    """What config.json tells of a model besides its sizes; ValueError for what is not here."""
    name = str(settings.get("activation_function", GELU["tanh"]))
    if name not in _ACTIVATIONS:
        raise ValueError(
            f"{CONFIG}: activation_function = {name!r}: known here: {', '.join(_ACTIVATIONS)}"
        )
    for key, value in FIXED.items():
        if settings.get(key, value) != value:
            raise ValueError(f"{CONFIG}: {key} = {settings[key]!r}: here it can be {value!r} only")
    heads = settings.get("n_head", settings.get("num_attention_heads"))
    rates = _dropouts(settings)
    return {
        "gelu": _ACTIVATIONS[name],
        **({} if heads is None else {"heads": heads}),
        **({"dropout": rates[0]} if rates and rates == rates[:1] * len(rates) else {}),
    }


def _dropouts(settings: Mapping[str, Any]) -> list[float]:
    return [settings[key] for key in DROPOUTS if key in settings]


def _undecided(settings: Mapping[str, Any], model: Mapping[str, Any]) -> dict[str, str]:
    """The keys of [model] that a user must give, each with the reason."""
    reasons = {}
    if "heads" not in model:
        reasons["heads"] = f"there is no {CONFIG} that tells n_head"
    if _dropouts(settings) and "dropout" not in model:
        rates = ", ".join(f"{key} = {settings[key]!r}" for key in DROPOUTS if key in settings)
        reasons["dropout"] = f"{CONFIG} has {rates}, and there is one rate here"
    return reasons


def _check(
    entries: Mapping[str, Entry], settings: Mapping[str, Any], model: Mapping[str, Any]
) -> None:
    """ValueError where config.json says other sizes, or the arrays are not those of a GPT-2."""
    for theirs, ours in SIZES.items():
        if settings.get(theirs, model[ours]) != model[ours]:
            raise ValueError(f"{CONFIG}: {theirs} = {settings[theirs]!r}, but it is {model[ours]}")
    if settings.get("n_inner") not in (None, 4 * model["hidden"]):
        raise ValueError(f"{CONFIG}: n_inner = {settings['n_inner']!r}: here it is 4 n_embd only")
    sizes = {key: model[key] for key in SIZES.values()}
    shapes = shapes_of(ModelConfig(**sizes, tied=bool(model["tied"])))
    shapes = {_NAMES.name_of(ours): shape for ours, shape in shapes.items()}
    if lacking := [name for name in shapes if name not in entries]:
        raise ValueError(f"it lacks {_listed(lacking)}")
    if surplus := [name for name in entries if name not in shapes]:
        raise ValueError(f"{_listed(surplus)}: no part of a GPT-2")
    for name, shape in shapes.items():
        if entries[name].shape != shape:
            found = list(entries[name].shape)
            raise ValueError(f"{name} is {found}: it should be {list(shape)}")


def _listed(names: Sequence[str]) -> str:
    """The first of some names, and how many more there are."""
    rest = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(map(repr, names[:3])) + rest


def configured(pretrained: Pretrained, words: Sequence[str]) -> Config:
    """The configuration of a run with this model; `words` are options `--section.key value`.

    The model is as it is: given may be what is undecided, the dropout, and a shorter sequence.
    """
    tree = {"model": {**pretrained.model}, "train": {"dtype": pretrained.dtype}}
    renamed.warn(override(tree, words))
    config = validate(tree)
    for key, reason in pretrained.undecided.items():
        if key not in tree["model"]:
            raise ValueError(f"{pretrained.path}: {reason}: give --model.{key}")
    for key, known in pretrained.model.items():
        asked = getattr(config.model, key)
        shorter = key == "sequence" and asked < known
        if asked != known and key != "dropout" and not shorter:
            raise ValueError(f"--model.{key} {asked}: it is {known} in {pretrained.path}")
    resolve(config, config.mesh.grid().size)
    refuse([*untrainable(config)])
    return config
