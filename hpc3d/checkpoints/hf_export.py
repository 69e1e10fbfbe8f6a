"""Weights as Hugging Face `transformers` has them, in safetensors (see hf_families).

A folder has config.json and model.safetensors, or several such files and an index of them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hpc3d.checkpoints import safetensors
from hpc3d.checkpoints.block_slices import whole_of
from hpc3d.checkpoints.hf_families import PublishedFamily, published
from hpc3d.checkpoints.hf_settings import CONFIG, GENERATION, TOKENIZER_FILES
from hpc3d.checkpoints.inspect import config_of, shapes_in
from hpc3d.model.families import with_epsilon
from hpc3d.trace.segment import replacing

if TYPE_CHECKING:
    from hpc3d.checkpoints.sharded import Checkpoint
    from hpc3d.config.input_file import ModelConfig

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


def _written_by(target: Path) -> list[Path]:
    """The files that `export` writes, the weights first; ValueError if there is no place."""
    if target.suffix == ".safetensors":
        return [target]
    if target.is_file():
        raise ValueError(f"{target} is a file: name a folder, or a file NAME.safetensors")
    return [target / WEIGHTS, target / CONFIG]


def refuse_to_replace(target: Path) -> None:
    """ValueError if `export` would write over a file."""
    written = _written_by(target)
    with_it = [target / name for name in TOKENIZER_FILES] if len(written) > 1 else []
    for path in (*written, *with_it):
        if path.exists():
            raise ValueError(f"{path} exists: name another place, or replace it with --force")


def earlier_files(target: Path) -> list[Path]:
    """The files of an export that a folder has: those of names that exports write, where weights
    are among them; else whatever is there is not of an export."""
    if not (target / WEIGHTS).is_file():
        return []
    paths = [target / name for name in (WEIGHTS, CONFIG, GENERATION, *TOKENIZER_FILES)]
    return [path for path in paths if path.is_file()]


def export(
    opened: Checkpoint, target: Path, special: Mapping[str, int | None] | None = None
) -> dict[str, tuple[int, ...]]:
    """Write the parameters of a whole checkpoint as a folder that `from_pretrained` loads or,
    where `target` ends in .safetensors, as that file alone; their shapes by name.  Of a torch
    module there is the file with its own names.  `special` are ids of
    tokens that a tokenizer has for itself, by their names in config.json.
    """
    weights, *settings = _written_by(target)
    if config_of(opened).torch.factory:
        weights.parent.mkdir(parents=True, exist_ok=True)
        return _export_module(opened, weights)
    shapes, model = shapes_in(opened), with_epsilon(config_of(opened).model)
    family, arrays = published(model), {}
    weights.parent.mkdir(parents=True, exist_ok=True)
    dtype = opened.sources["embedding.token", opened.exact("embedding.token")][0][0].dtype
    for name, shape in shapes.items():
        given = family.given(name, _value_of(opened, name, shape, dtype), model)
        arrays |= {family.full_name_of(theirs): array for theirs, array in given.items()}
    if not model.tied:
        arrays |= {copy: arrays[name].copy() for copy, name in family.copies.items()}
    safetensors.write(weights, arrays)
    for path in settings:
        with replacing(path) as temporary:
            told = _settings_of(family, model, dtype) | (special or {})
            text = json.dumps(told, indent=2)
            temporary.write_text(text + "\n")
    return {name: array.shape for name, array in arrays.items()}


def notes(opened: Checkpoint) -> list[str]:
    """A line for each thing that a model does not do any more once it is exported."""
    model = config_of(opened).model
    if not (model.experts and model.capacity):
        return []
    return [f"model.capacity = {model.capacity}: a Mixtral has room for all, and drops no token"]


def _export_module(opened: Checkpoint, weights: Path) -> dict[str, tuple[int, ...]]:
    """The state_dict of a torch module, as its `load_state_dict` takes it: tensors that it has by
    several names are there by all of them."""
    module, arrays = opened.header["module"], {}
    for name, stored in shapes_in(opened).items():
        whole, dims = whole_of(stored), module["shapes"][name]
        dtype = opened.sources[name, "value"][0][0].dtype
        arrays[name] = np.empty(whole.shape, dtype)
        opened.fill(arrays[name], name, "value", whole)
        arrays[name] = arrays[name].reshape(dims)
    arrays |= {other: arrays[name].copy() for other, name in module["aliases"].items()}
    safetensors.write(weights, arrays)
    return {name: array.shape for name, array in arrays.items()}


def _value_of(opened: Checkpoint, name: str, shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
    """The whole of a parameter."""
    value, whole = np.empty(shape, dtype), whole_of(shape)
    opened.fill(value.reshape(whole.shape), name, opened.exact(name), whole)
    return value


def _settings_of(family: PublishedFamily, model: ModelConfig, dtype: np.dtype) -> dict[str, Any]:
    """The config.json of a model whose tokenizer is not known."""
    return {
        "model_type": family.types[0],
        "architectures": [family.architecture],
        **family.settings.of(model),
        "tie_word_embeddings": model.tied,
        "bos_token_id": None,
        "eos_token_id": None,
        "dtype": dtype.name,
    }
