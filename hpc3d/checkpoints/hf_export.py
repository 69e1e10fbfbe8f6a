"""Weights as Hugging Face `transformers` has them: GPT-2's names, in safetensors.

    ours                          those of GPT2LMHeadModel
    embedding.token, .position    transformer.wte.weight, transformer.wpe.weight
    layers.N.norm1, .norm2        transformer.h.N.ln_1, .ln_2
    layers.N.qkv                  transformer.h.N.attn.c_attn, its columns [3, heads, D]
    layers.N.proj                 transformer.h.N.attn.c_proj
    layers.N.up, .down            transformer.h.N.mlp.c_fc, .c_proj
    head.norm                     transformer.ln_f
    head.table                    lm_head.weight; where head and embedding are tied, none

Its Conv1D keeps a weight as [in, out], as we do: nothing is transposed, only the columns of qkv,
[heads, 3, D] here, lie in another order.  A folder has config.json and model.safetensors, or
several such files and an index of them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hpc3d.checkpoints import safetensors
from hpc3d.checkpoints.block_slices import whole_of
from hpc3d.checkpoints.inspect import config_of, shapes_in
from hpc3d.model.families import GPT2
from hpc3d.model.layers import LayerNorm
from hpc3d.trace.segment import replacing

if TYPE_CHECKING:
    from hpc3d.checkpoints.sharded import Checkpoint
    from hpc3d.config.input_file import ModelConfig

WEIGHTS, INDEX, CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"
GELU = {"tanh": "gelu_new", "exact": "gelu"}
SIZES = {
    "n_layer": "layers",
    "n_embd": "hidden",
    "n_positions": "sequence",
    "vocab_size": "vocabulary",
}
DROPOUTS = ("resid_pdrop", "embd_pdrop", "attn_pdrop")
# What a config.json may not say otherwise, because the model here has no other.
FIXED = {
    "model_type": GPT2.names.model_type,
    "layer_norm_epsilon": LayerNorm.EPSILON,
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "add_cross_attention": False,
}


def exchanged(columns: np.ndarray, groups: tuple[int, int]) -> np.ndarray:
    """An array whose columns are [*groups, D], with the two groups the other way round."""
    parts = columns.reshape(*columns.shape[:-1], *groups, -1)
    return parts.swapaxes(-3, -2).reshape(columns.shape)


def _written_by(target: Path) -> list[Path]:
    """The files that `export` writes, the weights first; ValueError if there is no place."""
    if target.suffix == ".safetensors":
        return [target]
    if target.is_file():
        raise ValueError(f"{target} is a file: name a folder, or a file NAME.safetensors")
    return [target / WEIGHTS, target / CONFIG]


def refuse_to_replace(target: Path) -> None:
    """ValueError if `export` would write over a file."""
    for path in _written_by(target):
        if path.exists():
            raise ValueError(f"{path} exists: name another place, or replace it with --force")


def export(opened: Checkpoint, target: Path) -> dict[str, tuple[int, ...]]:
    """Write the parameters of a whole checkpoint as a folder that `from_pretrained` loads or,
    where `target` ends in .safetensors, as that file alone; their shapes by GPT-2's names.  Of a
    torch module there is the file with its own names.
    """
    weights, *settings = _written_by(target)
    model = config_of(opened).model
    if model.kind != GPT2.kind:
        raise ValueError(
            f"{opened.folder}: model.kind = {model.kind}: models of {GPT2.kind} alone are exported"
        )
    weights.parent.mkdir(parents=True, exist_ok=True)
    if config_of(opened).torch.factory:
        return _export_module(opened, weights)
    shapes = shapes_in(opened)
    dtype = opened.sources["embedding.token", opened.exact][0][0].dtype
    arrays = {
        GPT2.names.full_name_of(name): _value_of(opened, name, shape, dtype, model)
        for name, shape in shapes.items()
    }
    safetensors.write(weights, arrays)
    for path in settings:
        with replacing(path) as temporary:
            temporary.write_text(json.dumps(_settings_of(model, dtype), indent=2) + "\n")
    return {name: array.shape for name, array in arrays.items()}


def _export_module(opened: Checkpoint, weights: Path) -> dict[str, tuple[int, ...]]:
    """The state_dict of a torch module, as its `load_state_dict` takes it: tensors that it has by
    several names are there by all of them."""
    module, arrays = opened.header["module"], {}
    for name, stored in shapes_in(opened).items():
        whole, dims = whole_of(stored), module["shapes"][name]
        dtype = opened.sources[name, "value"][0][0].dtype
        arrays[name] = np.empty((whole.bottom, whole.right), dtype)
        opened.fill(arrays[name], name, "value", whole)
        arrays[name] = arrays[name].reshape(dims)
    arrays |= {other: arrays[name].copy() for other, name in module["aliases"].items()}
    safetensors.write(weights, arrays)
    return {name: array.shape for name, array in arrays.items()}


def _value_of(
    opened: Checkpoint, name: str, shape: Sequence[int], dtype: np.dtype, model: ModelConfig
) -> np.ndarray:
    """The whole of a parameter, as GPT-2 has it."""
    value, whole = np.empty(shape, dtype), whole_of(shape)
    opened.fill(value.reshape(whole.bottom, whole.right), name, opened.exact, whole)
    return exchanged(value, (model.heads, 3)) if ".qkv." in name else value


def _settings_of(model: ModelConfig, dtype: str) -> dict[str, Any]:
    """The config.json of a model.  Its tokenizer, and so the ids of its text's ends, are unknown
    to `transformers`."""
    return {
        **FIXED,
        "architectures": [GPT2.names.architecture],
        **{theirs: getattr(model, ours) for theirs, ours in SIZES.items()},
        "n_head": model.heads,
        "activation_function": GELU[model.gelu],
        **dict.fromkeys(DROPOUTS, model.dropout),
        "tie_word_embeddings": model.tied,
        "bos_token_id": None,
        "eos_token_id": None,
        "dtype": dtype.name,
    }
