"""Import a model from Hugging Face `transformers` files (see hf_families).

The files are untrusted, and config.json might contradict the weights. Model sizes are therefore
derived from the shapes of the stored arrays wherever possible.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from hpc3d.checkpoints.hf_export import INDEX, WEIGHTS
from hpc3d.checkpoints.hf_families import PUBLISHED, PublishedFamily
from hpc3d.checkpoints.hf_settings import CONFIG
from hpc3d.checkpoints.inspect import shapes_of
from hpc3d.checkpoints.manifest import narrowed
from hpc3d.checkpoints.resume import TRAINING_KEYS
from hpc3d.checkpoints.safetensors import Entry, Weights
from hpc3d.config import deprecated_keys
from hpc3d.config.backend_rules import untrainable
from hpc3d.config.input_file import Config, ModelConfig
from hpc3d.config.load import override, validate
from hpc3d.config.package_data import input_of
from hpc3d.config.resolve import refuse, resolve, with_family_defaults
from hpc3d.console.sanitize import as_written
from hpc3d.data.tokenizer_files import object_in, refuse_cache

ADAPTER = "adapter_config.json"  # configuration of an adapter of the library PEFT, such as LoRA
_FILE = re.compile(r"[\w-][\w.-]*\.safetensors")
_HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?(?<!\.safetensors)(?<!\.pt)")
# Names of ignored arrays: buffers stored by older versions of `transformers`, and BERT layers for
# tasks that hpc3d does not support.
_IGNORED = re.compile(
    r"h\.\d+\.attn\.(masked_)?bias|layers\.\d+\.self_attn\.rotary_emb\.inv_freq"
    r"|layers\.\d+\.attention\.((masked_)?bias|rotary_emb\.inv_freq)"
    r"|embeddings\.position_ids|pooler\.dense\.\w+|cls\.seq_relationship\.\w+"
)
# Names of `transformers` classes with a head for a task other than language modeling.
_TASK = re.compile(r"\w+For\w*(Classification|Answering|Choice|Prediction)")
_FUSED = ".experts.gate_up_proj"
_LEARNING_RATE = 2e-5  # default for pretrained models
# TensorFlow names of LayerNorm parameters, as in the original BERT checkpoints.
_OLD_NAMES = {"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"}


class Pretrained:
    """Pretrained model in a folder or a weights file.

    `model` holds the known keys of the `[model]` section, and `settings` the content of
    config.json. `undecided` contains each key that the user must set, with an explanation. Raises
    ValueError, with a one-line message, if hpc3d cannot train the model. Unless `allow_nonfinite`
    is true, reading an array with NaN or infinite values also raises ValueError.
    """

    def __init__(self, path: Path, allow_nonfinite: bool = False) -> None:
        self.path, self.allow_nonfinite = Path(path), allow_nonfinite
        files = _weight_files(self.path)
        told = (self.path if self.path.is_dir() else self.path.parent) / CONFIG
        self.settings = settings = object_in(told)
        try:
            self.family = _family_of(settings, files)
            _refuse_task(settings, self.family)
            self.locations = _locations(files, self.family.prefix)
            self.rows: dict[str, tuple[str, slice]] = {}  # array -> fused array, and its rows
            measured = _measured(self.entries, self.family)
            self.model = {"experts": 0, **self.family.settings.model(settings, measured)}
            self.model |= {"kind": self.family.family.kind, "tied": self.tied()}
            self.undecided = self._undecided()
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None

    @property
    def entries(self) -> dict[str, Entry]:
        return {name: file.entries[stored] for name, (file, stored) in self.locations.items()}

    @property
    def dtype(self) -> str:
        """Data type of the model: float64 if any stored array is float64, otherwise float32."""
        stored = {entry.dtype for entry in self.entries.values()}
        return "float64" if "F64" in stored else "float32"

    def read(self, name: str) -> np.ndarray:
        file, stored = self.locations[name]
        value = file.read(stored)
        odd = value.size - np.count_nonzero(np.isfinite(value))
        if odd and not self.allow_nonfinite:
            raise ValueError(
                f"{stored}: {odd} of {value.size} values are NaN or infinite; use an earlier "
                "checkpoint, or accept these values with python -m hpc3d.checkpoint import "
                f"{self.path} -o RUN_DIR --allow-nonfinite"
            )
        return value

    def tied(self) -> bool:
        """Determine whether the head is tied to the token embedding, and drop duplicate arrays."""
        settings = self.settings
        head, table = (self.family.ends[name] for name in ("head.table", "embedding.token"))
        same = head not in self.locations or np.array_equal(
            self.read(head), self.read(table), equal_nan=True
        )
        tied = settings.get("tie_word_embeddings", self.family.tied if settings else same)
        if tied and not same:
            raise ValueError(
                f"{head} differs from {table}, but {CONFIG} ties them; set tie_word_embeddings "
                "to false"
            )
        if tied:
            self.locations.pop(head, None)
        for copy, name in self.family.copies.items():
            location = self.locations.pop(copy, None)
            if location and not tied:  # the array stores the weights of an untied head
                self.locations[name] = location
        return tied

    def parameter(self, ours: str, config: Config) -> np.ndarray:
        """Return the parameter whose name in hpc3d is `ours`.

        Position embeddings are truncated to the sequence length of the run. Raises ValueError if a
        value exceeds the range of the run's data type.
        """

        def read(name):
            stored, rows = self.rows.get(name, (name, slice(None)))
            value = self.read(stored)[rows]
            narrowed(self.locations[stored][1], value, np.dtype(config.train.dtype))
            return value

        value = self.family.taken(ours, read, config.model)
        rows = self.family.family.unused_positions + config.model.sequence
        return value[:rows] if ours == "embedding.position" else value

    def check(self, model: ModelConfig) -> None:
        """Raise ValueError if the names or shapes of the stored arrays do not match `model`.

        Position embeddings must have the sequence length of the pretrained model, not of `model`.
        """
        shapes: dict[str, tuple[int, ...]] = {}
        model = replace(model, sequence=self.model["sequence"])
        for ours, shape in shapes_of(model).items():
            shapes |= self.family.shapes_of(ours, shape, model)
        self._fuse(shapes)
        entries = self.entries
        if lacking := [name for name in shapes if name not in entries]:
            bare = all(name.startswith(self.family.bare) for name in lacking)
            fix = f"; save the model with its head, as a {self.family.architecture}" * bare
            raise ValueError(f"{self.path} lacks {_listed(lacking)}{fix}")
        if surplus := [name for name in entries if name not in shapes]:
            what = self.family.architecture
            raise ValueError(f"{self.path}: {what} has no {_listed(surplus)}")
        for name, shape in shapes.items():
            if entries[name].shape != shape:
                found, wanted = list(entries[name].shape), list(shape)
                raise ValueError(f"{self.path}: {name} is {found}, but should be {wanted}")

    def _fuse(self, shapes: dict[str, tuple[int, ...]]) -> None:
        """Replace the arrays in `shapes` that are rows of a fused array by this array."""
        for fused, parts in self.family.fused_arrays([*shapes]).items():
            count = 0
            for part in parts:
                rows, *others = shapes.pop(part)
                self.rows[part] = fused, slice(count, count + rows)
                count += rows
            shapes[fused] = (count, *others)

    def _undecided(self) -> dict[str, str]:
        """Return the [model] keys that the user must set, as a dict from key to reason."""
        reasons, settings = {}, self.settings
        if "heads" not in self.model:
            theirs = {ours: key for key, ours in self.family.settings.sizes.items()}
            reasons["heads"] = f"{CONFIG} is missing or does not contain {theirs['heads']}"
        if self.family.settings.rates(settings) and "dropout" not in self.model:
            keys = (key for key in self.family.settings.dropouts if key in settings)
            rates = ", ".join(f"{key} = {as_written(settings[key])}" for key in keys)
            reasons["dropout"] = f"{CONFIG} has {rates}, but hpc3d supports only one dropout rate"
        return reasons


def refuse_hub_name(path: Path) -> None:
    """Raise ValueError if `path` does not exist and may be the name of a model of the hub."""
    name = str(path)
    local = path.exists() or ("/" in name and path.parent.is_dir())
    if _HUB_NAME.fullmatch(name) and not local:
        raise ValueError(
            f"{name}: no such file or folder, and models are not downloaded. For a model of the "
            f"Hugging Face hub, run hf download {name} --local-dir {path.name}, then use "
            f"{path.name}"
        )


def _weight_files(path: Path) -> list[Weights]:
    refuse_hub_name(path)
    if not path.exists():
        raise ValueError(f"{path}: no such file or folder")
    refuse_cache(path)
    if (path / INDEX).exists() and not (path / WEIGHTS).exists():
        names = object_in(path / INDEX).get("weight_map")
        names = sorted({*map(str, names.values())}) if isinstance(names, dict) else []
        if not names or not all(map(_FILE.fullmatch, names)):
            raise ValueError(
                f"{path / INDEX}: weight_map must contain names of .safetensors files in the same "
                "folder"
            )
        return [Weights(path / name) for name in names]
    file = path / WEIGHTS if path.is_dir() else path
    if (file.parent / ADAPTER).is_file() and not (file.parent / WEIGHTS).is_file():
        raise ValueError(
            f"{path}: this is an adapter, not a model; merge it into its model with "
            "merge_and_unload() of PEFT, and save the result with save_pretrained(FOLDER)"
        )
    if file.suffix != ".safetensors" or not file.is_file():
        _refuse_own(path)
        raise ValueError(
            f"{path} has no {WEIGHTS}. hpc3d does not read pickle files, such as "
            "pytorch_model.bin, because they can run code; convert them with "
            "model.save_pretrained(FOLDER) in transformers. docs/hugging-face.md shows how to "
            "convert ckpt.pt of nanoGPT"
        )
    return [Weights(file)]


def _refuse_own(path: Path) -> None:
    """Raise ValueError if `path` is a run or a checkpoint of hpc3d."""
    is_checkpoint = (path / "manifest.json").is_file()
    if is_checkpoint or input_of(path) != path:
        what, run = ("checkpoint", path.absolute().parents[1]) if is_checkpoint else ("run", path)
        raise ValueError(
            f"{path}: a {what} of hpc3d, which needs no import; continue the run with "
            f"python -m hpc3d.train --resume {run}"
        )


def _refuse_task(settings: Mapping[str, Any], family: PublishedFamily) -> None:
    """Raise ValueError if config.json names a class with a head for another task."""
    names = settings.get("architectures")
    name = str(names[0]) if isinstance(names, list) and names else ""
    if _TASK.fullmatch(name):
        raise ValueError(
            f"{CONFIG}: {name} has a head for another task, but hpc3d supports only language "
            f"models; save the language model with transformers: {family.architecture}"
            '.from_pretrained("MODEL").save_pretrained("FOLDER"), and import FOLDER (weights '
            "that MODEL lacks are random)"
        )


def _family_of(settings: Mapping[str, Any], files: Sequence[Weights]) -> PublishedFamily:
    """Return the family named in config.json, or identify it by its token embedding's name."""
    known = {each: family for family in PUBLISHED.values() for each in family.types}
    if (kind := settings.get("model_type")) is not None:
        text = settings.get("text_config")
        inner = str(text.get("model_type")) if isinstance(text, dict) else ""
        if str(kind) not in known and inner in known:
            raise ValueError(
                f"{CONFIG}: model_type = {as_written(kind)} is not supported; save its text "
                f"model, {inner}, with transformers: AutoModelForImageTextToText"
                '.from_pretrained("MODEL").model.language_model.save_pretrained("FOLDER")'
            )
        if str(kind) not in known:
            raise ValueError(
                f"{CONFIG}: model_type = {as_written(kind)} is not supported; the supported types "
                f"are {', '.join(known)}"
            )
        return known[str(kind)]
    stored = {name for file in files for name in file.entries}
    for family in PUBLISHED.values():
        table = family.ends["embedding.token"]
        if {table, family.prefix + table} & stored:
            return family
    kinds = ", ".join(family.architecture for family in PUBLISHED.values())
    raise ValueError(
        f"no token embedding of a supported model was found; supported models: {kinds}"
    )


def _locations(files: Sequence[Weights], prefix: str) -> dict[str, tuple[Weights, str]]:
    """Return a dict from array name, without `prefix`, to the array's file and stored name.

    Arrays that contain no parameters of the model are skipped.
    """
    found = {}
    for file in files:
        for stored in file.entries:
            name = stored.removeprefix(prefix)
            if name.endswith(_FUSED):
                raise ValueError(
                    f"{stored} stores all experts in one array; use transformers to save one "
                    "array per expert: model.save_pretrained(FOLDER, save_original_format=True)"
                )
            for old, new in _OLD_NAMES.items():
                name = name.replace(old, new)
            if name in found:
                raise ValueError(f"{file.path}: {name!r} occurs twice")
            if not _IGNORED.fullmatch(name):
                found[name] = file, stored
    return found


def _measured(entries: Mapping[str, Entry], family: PublishedFamily) -> dict[str, int]:
    sizes, block = {}, f"{family.block}."
    if "experts" in family.measured and not any(".experts." in name for name in entries):
        raise ValueError(
            f"the weights contain no experts, unlike those of a {family.architecture}; if the "
            f'model has none, set model_type to "{family.family.kind}" in {CONFIG}, and remove '
            "its keys for experts"
        )
    for ours, (name, dim) in family.measured.items():
        first = next(iter(fnmatch.filter(entries, name)), None)
        if first is None or len(entries[first].shape) != 2:
            raise ValueError(
                f"the matrix {name} is missing, so the weights do not belong to a "
                f"{family.architecture}"
            )
        sizes[ours] = entries[first].shape[dim]
    if "sequence" in sizes:
        sizes["sequence"] -= family.family.unused_positions
    return sizes | {
        "layers": len(
            {name.removeprefix(block).split(".")[0] for name in entries if name.startswith(block)}
        )
    }


def _listed(names: Sequence[str]) -> str:
    """Format the first three names, followed by the count of the others, such as "and 2 more"."""
    rest = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(map(repr, names[:3])) + rest


def configured(pretrained: Pretrained, words: Sequence[str]) -> Config:
    """Return the configuration for training a pretrained model, with command-line options applied.

    The options may set undecided keys, keys that only affect training, and a shorter sequence.
    Other model keys cannot be changed. The default learning rate is lower than that for training
    from scratch, which would damage pretrained weights.
    """
    train = {"dtype": pretrained.dtype, "learning_rate": _LEARNING_RATE}
    tree = {"model": {**pretrained.model}, "train": train}
    deprecated_keys.warn(override(tree, words))
    config = validate(tree)
    for key, reason in pretrained.undecided.items():
        if key not in tree["model"]:
            raise ValueError(f"{pretrained.path}: {reason}; set --model.{key}")
    for key, known in pretrained.model.items():
        asked = getattr(config.model, key)
        shorter = key == "sequence" and asked < known
        if asked != known and key not in TRAINING_KEYS and not shorter:
            raise ValueError(
                f"--model.{key} {as_written(asked)}: the model in {pretrained.path} has "
                f"{as_written(known)}; remove this option"
            )
    resolve(config, None)
    refuse([*untrainable(config)])
    pretrained.check(config.model)
    return with_family_defaults(config)
