"""Export weights in the format of Hugging Face `transformers` (see hf_families).

An export to a folder writes all weights to model.safetensors. Folders from other programs may
instead contain several weight files with an index.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hpc3d.checkpoints import safetensors
from hpc3d.checkpoints.block_slices import whole_of
from hpc3d.checkpoints.hf_families import PublishedFamily, published
from hpc3d.checkpoints.hf_settings import CONFIG, GENERATION, TOKENIZER_FILES
from hpc3d.checkpoints.inspect import config_of, shapes_in
from hpc3d.checkpoints.manifest import narrowed
from hpc3d.checkpoints.sharded import Checkpoint
from hpc3d.config.input_file import ModelConfig
from hpc3d.model.families import with_epsilon
from hpc3d.training.run_folder import write_text

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


def _written_by(target: Path) -> list[Path]:
    """Return the paths of the files written by `export`, starting with the weights.

    Raises ValueError if `target` is an existing file with a suffix other than .safetensors.
    """
    if target.suffix == ".safetensors":
        return [target]
    if target.is_file():
        raise ValueError(f"{target} is a file; specify a folder or a file NAME.safetensors")
    return [target / WEIGHTS, target / CONFIG]


def refuse_to_replace(target: Path) -> None:
    """Raise ValueError if an export to `target` would overwrite a file."""
    written = _written_by(target)
    with_it = [target / name for name in TOKENIZER_FILES] if len(written) > 1 else []
    for path in (*written, *with_it):
        if path.exists():
            raise ValueError(
                f"{path} already exists; use another path, or overwrite it with --force"
            )


def earlier_files(target: Path) -> list[Path]:
    """Return the files that an earlier export wrote to a folder.

    The list is empty if the folder has no model.safetensors, because every export to a folder
    writes this file.
    """
    if not (target / WEIGHTS).is_file():
        return []
    paths = [target / name for name in (WEIGHTS, CONFIG, GENERATION, *TOKENIZER_FILES)]
    return [path for path in paths if path.is_file()]


def export(
    opened: Checkpoint,
    target: Path,
    special: Mapping[str, int | None] | None = None,
    dtype: str | None = None,
) -> dict[str, np.ndarray]:
    """Export the parameters of a checkpoint to a folder that `from_pretrained` can load.

    If `target` ends in .safetensors, only that file is written. For a torch module, only the
    weights are written, under the module's parameter names. `special` maps keys of config.json to
    the token ids of a tokenizer. The values are rounded to the type named `dtype`; the default
    is the type of the stored parameters. Returns a dict from name to array, without duplicates.
    """
    weights, *settings = _written_by(target)
    if config_of(opened).torch.factory:
        weights.parent.mkdir(parents=True, exist_ok=True)
        return _export_module(opened, weights, dtype)
    shapes, model = shapes_in(opened), with_epsilon(config_of(opened).model)
    family, arrays = published(model), {}
    stored = opened.sources["embedding.token", opened.exact("embedding.token")][0][0].dtype
    told = _settings_of(family, model, dtype or stored.name) | (special or {}) if settings else {}
    weights.parent.mkdir(parents=True, exist_ok=True)
    for name, shape in shapes.items():
        value = _array_of(opened, name, opened.exact(name), shape, stored)
        given = family.given(name, value, model)
        arrays |= {family.full_name_of(theirs): array for theirs, array in given.items()}
    family.join(arrays)
    arrays, copies = _rounded(arrays, dtype), {} if model.tied else family.copies
    copied = {copy: arrays[name].copy() for copy, name in copies.items()}
    safetensors.write(weights, arrays | copied)
    for path in settings:
        write_text(path, json.dumps(told, indent=2) + "\n")
    return arrays


def notes(opened: Checkpoint) -> list[str]:
    """Return a line for each difference in behavior between a model and the exported model."""
    model = config_of(opened).model
    if not (model.experts and model.capacity):
        return []
    return [
        f"model.capacity = {model.capacity}: {published(model).architecture} has no capacity "
        "limit and drops no tokens"
    ]


def _rounded(arrays: dict[str, np.ndarray], dtype: str | None) -> dict[str, np.ndarray]:
    """Round all float32 and float64 values to `dtype`; by default, return `arrays` unchanged.

    Raises ValueError if a value exceeds the range of `dtype`.
    """
    if dtype is None:
        return arrays
    import ml_dtypes  # noqa: F401  registers bfloat16 with NumPy

    floats = {name: value for name, value in arrays.items() if value.dtype.kind == "f"}
    return arrays | {
        name: narrowed(name, value, np.dtype(dtype), "--dtype") for name, value in floats.items()
    }


def _export_module(opened: Checkpoint, weights: Path, dtype: str | None) -> dict[str, np.ndarray]:
    """Export the weights of a torch module in a form that `load_state_dict` accepts.

    A tensor with several names is stored under each of its names.
    """
    module, arrays = opened.header["module"], {}
    (first, *_) = (parts[0][0].dtype for parts in opened.sources.values())
    for name, stored in shapes_in(opened).items():
        sources = opened.sources.get((name, "value"))  # none for a tensor without elements
        kind = sources[0][0].dtype if sources else first
        value = _array_of(opened, name, "value", stored, kind) if sources else np.empty(0, kind)
        arrays[name] = value.reshape(module["shapes"][name])
    arrays |= {other: arrays[name].copy() for other, name in module["aliases"].items()}
    arrays = _rounded(arrays, dtype)
    safetensors.write(weights, arrays)
    return arrays


def _array_of(
    opened: Checkpoint, name: str, kind: str, shape: Sequence[int], dtype: np.dtype
) -> np.ndarray:
    array, box = np.empty(shape, dtype), whole_of(shape)
    opened.fill(array.reshape(box.shape), name, kind, box)
    return array


def _settings_of(family: PublishedFamily, model: ModelConfig, dtype: str) -> dict[str, Any]:
    return {
        "model_type": family.types[0],
        "architectures": [family.architecture],
        "pad_token_id": None,  # the default of transformers may be outside the vocabulary
        **family.settings.of(model),
        "tie_word_embeddings": model.tied,
        "bos_token_id": None,
        "eos_token_id": None,
        "dtype": dtype,
    }
