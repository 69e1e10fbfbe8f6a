"""Names of model families and of their parameters in Hugging Face `transformers`.

    hpc3d                      GPT2LMHeadModel, transformer.*   LlamaForCausalLM, model.*
    embedding.token            wte.weight                       embed_tokens.weight
    embedding.position         wpe.weight                       none
    layers.N.norm1             h.N.ln_1                         layers.N.input_layernorm
    layers.N.qkv               h.N.attn.c_attn                  layers.N.self_attn.q_proj, k_, v_
    layers.N.q, k, v           none                             same, for grouped-query attention
    layers.N.proj              h.N.attn.c_proj                  layers.N.self_attn.o_proj
    layers.N.norm2             h.N.ln_2                         layers.N.post_attention_layernorm
    layers.N.up                h.N.mlp.c_fc                     layers.N.mlp.gate_proj, up_proj
    layers.N.down              h.N.mlp.c_proj                   layers.N.mlp.down_proj
    head.norm                  ln_f                             norm
    head.table                 lm_head.weight; none if head and embedding are tied

Gemma uses Llama's names. Qwen2 adds biases to q_proj, k_proj and v_proj. Phi-3 uses Llama's names,
but stores self_attn.q_proj, k_proj and v_proj in one array, self_attn.qkv_proj, and mlp.gate_proj
and up_proj in mlp.gate_up_proj. Mistral uses Llama's names; it is a Llama model with a sliding
window.

Qwen3 adds a norm for q and a norm for k to Llama:

    layers.N.q_norm, k_norm    layers.N.self_attn.q_norm, k_norm

    hpc3d                      GPTNeoXForCausalLM, gpt_neox.*
    embedding.token            embed_in.weight
    layers.N.norm1, norm2      layers.N.input_layernorm, post_attention_layernorm
    layers.N.qkv, proj         layers.N.attention.query_key_value, dense
    layers.N.up, down          layers.N.mlp.dense_h_to_4h, dense_4h_to_h
    head.norm, table           final_layer_norm, embed_out.weight

OLMo 2 has the names of Qwen3, except for its norms at the end of branches:

    layers.N.post_norm1        layers.N.post_attention_layernorm
    layers.N.post_norm2        layers.N.post_feedforward_layernorm

Gemma 2 has the names of Llama, except for the norms of its branches:

    layers.N.norm1, post_norm1 layers.N.input_layernorm, post_attention_layernorm
    layers.N.norm2, post_norm2 layers.N.pre_feedforward_layernorm, post_feedforward_layernorm

Gemma 3 has the names of Gemma 2, and those of Qwen3 for q_norm and k_norm.

    hpc3d                      MixtralForCausalLM, model.*; otherwise as Llama
    layers.N.router            layers.N.block_sparse_moe.gate
    layers.N.experts.up        layers.N.block_sparse_moe.experts.E.w1 (gate), w3 (up)
    layers.N.experts.down      layers.N.block_sparse_moe.experts.E.w2

    hpc3d                      Qwen3MoeForCausalLM, model.*; other arrays and dense layers as Qwen3
    layers.N.router            layers.N.mlp.gate
    layers.N.experts.up        layers.N.mlp.experts.E.gate_proj, up_proj
    layers.N.experts.down      layers.N.mlp.experts.E.down_proj

    hpc3d                      BertForMaskedLM, bert.*
    embedding.token, .position, .segment
                               embeddings.word_embeddings, position_, token_type_ .weight
    embedding.norm             embeddings.LayerNorm
    layers.N.qkv               encoder.layer.N.attention.self.query, key, value
    layers.N.proj, norm1       encoder.layer.N.attention.output.dense, LayerNorm
    layers.N.up                encoder.layer.N.intermediate.dense
    layers.N.down, norm2       encoder.layer.N.output.dense, LayerNorm
    head.dense, norm, bias     cls.predictions.transform.dense, LayerNorm, cls.predictions.bias
    head.table                 cls.predictions.decoder.weight; none if it is tied

RoBERTa has BERT's names, with roberta.* instead of bert.*, except for its head:

    head.dense, norm, bias     lm_head.dense, layer_norm, bias
    head.table                 lm_head.decoder.weight; none if it is tied

In hpc3d, the columns of qkv are [q | k | v] for each head; with grouped-query attention q, k and v
are separate arrays. The columns of a gated `up` matrix are [gate | up] for each MLP unit. GPT-2
stores all of q, all of k and all of v side by side, with weights [in, out] as in hpc3d. Llama has
a separate array for each of them, with weights [out, in]. hpc3d stores the weights of all experts
of a layer in one array [in, experts, out]; Mixtral stores each expert separately.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from hpc3d.checkpoints import hf_settings
from hpc3d.model.families import (
    BERT,
    GEMMA,
    GEMMA2,
    GEMMA3,
    GPT2,
    GPT_NEOX,
    LLAMA,
    OLMO2,
    PHI3,
    QWEN2,
    QWEN3,
    ROBERTA,
)

if TYPE_CHECKING:
    from hpc3d.config.input_file import ModelConfig
    from hpc3d.model.spec import Family

_PARTS = {"gamma": "weight", "beta": "bias"}


class PublishedFamily(NamedTuple):
    """Conversion between an hpc3d model family and its counterpart in `transformers`.

    types         model_type values; the first one is used for export
    architecture  name of the model class in `transformers`
    prefix        prefix of the array names
    bare          beginning of array names to which the prefix is not added
    block         text before the layer number in an array name
    ends          dict from each hpc3d parameter outside the layers to its array name
    layers        dict from each hpc3d layer to the names of its arrays; {} is the expert index
    transposed    True if layer weights have the shape [out, in]
    measured      dict from key of [model] to the (array name, dimension) that sets its value;
                  * stands for the index of any layer that has this array
    fused         dict from a layer whose array joins the rows of several layers to their names
    by_head       True if an array contains q, k and v of each head side by side, as qkv does
    copies        dict from duplicate array to its original, if head and embedding are untied
    tied          True if head and embedding are tied by default (config.json may override it)
    settings      conversion of the family's config.json
    """

    family: Family
    types: tuple[str, ...]
    architecture: str
    prefix: str
    bare: str
    block: str
    ends: Mapping[str, str]
    layers: Mapping[str, tuple[str, ...]]
    transposed: bool
    measured: Mapping[str, tuple[str, int]]
    copies: Mapping[str, str]
    tied: bool
    settings: hf_settings.Settings
    fused: Mapping[str, tuple[str, ...]] = {}
    by_head: bool = False

    def names_of(self, ours: str, expert: int) -> tuple[str, ...]:
        """Return the names, without prefix, of the arrays that store an hpc3d parameter.

        For stacked experts, only the arrays of expert number `expert` are returned.
        """
        if ours in self.ends:
            return (self.ends[ours],)
        _, number, *layer, part = ours.split(".")
        names = self.layers[".".join(layer)]
        part = _PARTS.get(part, part)
        return tuple(f"{self.block}.{number}.{name.format(expert)}.{part}" for name in names)

    def full_name_of(self, name: str) -> str:
        """Prepend the family's prefix to an array name, unless the name begins with `bare`."""
        return name if name.startswith(self.bare) else self.prefix + name

    def fused_arrays(self, names: Iterable[str]) -> dict[str, tuple[str, ...]]:
        """Return a dict from each fused array to the arrays in `names` whose rows it joins."""
        return {
            name.replace(first, fused): tuple(name.replace(first, each) for each in (first, *rest))
            for name in names
            for fused, (first, *rest) in self.fused.items()
            if f".{first}." in name
        }

    def join(self, arrays: dict[str, np.ndarray]) -> None:
        """Replace arrays that `transformers` fuses with one array that contains their rows."""
        for fused, parts in self.fused_arrays([*arrays]).items():
            arrays[fused] = np.concatenate([arrays.pop(part) for part in parts])

    def shapes_of(
        self, ours: str, shape: Sequence[int], model: ModelConfig
    ) -> dict[str, tuple[int, ...]]:
        """Return a dict from array name to shape for the arrays that store a parameter."""
        experts, shape = (shape[1], shape[::2]) if len(shape) > 2 else (1, shape)
        widths = self._widths(ours, shape[-1], model)
        columns = [shape[-1] // sum(widths) * width for width in widths]
        transposed = self._is_transposed(ours, len(shape))
        shapes = {}
        for expert in range(experts):
            names = self.names_of(ours, expert)
            for name, count in zip(names, columns if len(names) > 1 else shape[-1:], strict=True):
                each = *shape[:-1], count
                shapes[name] = each[::-1] if transposed else each
        return shapes

    def given(self, ours: str, value: np.ndarray, model: ModelConfig) -> dict[str, np.ndarray]:
        """Convert an hpc3d parameter to a dict from name to array in `transformers` format."""
        arrays = {}
        for expert, matrix in enumerate(value.swapaxes(0, 1) if value.ndim > 2 else [value]):
            names, widths = self.names_of(ours, expert), self._widths(ours, value.shape[-1], model)
            units = matrix.reshape(*matrix.shape[:-1], -1, sum(widths))
            blocks = np.split(units, np.cumsum(widths)[:-1], -1)
            blocks = [block.reshape(*matrix.shape[:-1], -1) for block in blocks]
            blocks = blocks if len(names) > 1 else [np.concatenate(blocks, -1)]
            transposed = self._is_transposed(ours, matrix.ndim)
            for name, block in zip(names, blocks, strict=True):
                arrays[name] = np.ascontiguousarray(block.T if transposed else block)
        return arrays

    def taken(
        self, ours: str, read: Callable[[str], np.ndarray], model: ModelConfig
    ) -> np.ndarray:
        """Assemble an hpc3d parameter from the `transformers` arrays returned by `read(name)`."""

        def matrix(expert):
            arrays = [read(name) for name in self.names_of(ours, expert)]
            joined = np.concatenate(
                [a.T if self._is_transposed(ours, a.ndim) else a for a in arrays], -1
            )
            widths = self._widths(ours, joined.shape[-1], model)
            units = joined.shape[-1] // sum(widths)
            blocks = np.split(joined, np.cumsum([units * width for width in widths])[:-1], -1)
            blocks = [block.reshape(*joined.shape[:-1], units, -1) for block in blocks]
            return np.concatenate(blocks, -1).reshape(joined.shape)

        if ".experts." not in ours:
            return matrix(0)
        return np.stack([matrix(expert) for expert in range(model.experts)], 1)

    def _widths(self, ours: str, columns: int, model: ModelConfig) -> tuple[int, ...]:
        """Return the width in columns of each component that is interleaved in a matrix.

        In qkv, blocks of q, k and v columns alternate, each as wide as a head. In a gated MLP,
        single gate and up columns alternate. Any other matrix has one component with all columns.
        """
        layer = ours.split(".")[-2]
        if layer == "qkv" and not self.by_head:
            return (model.head_width,) * 3
        return (1, 1) if layer == "up" and self.family.gated else (columns,)

    def _is_transposed(self, ours: str, dims: int) -> bool:
        return self.transposed and dims == 2 and ours.endswith(".weight")


_TRANSFORMERS_GPT2 = PublishedFamily(
    family=GPT2,
    types=("gpt2",),
    architecture="GPT2LMHeadModel",
    prefix="transformer.",
    bare="lm_head.",
    block="h",
    ends={
        "embedding.token": "wte.weight",
        "embedding.position": "wpe.weight",
        "head.norm.gamma": "ln_f.weight",
        "head.norm.beta": "ln_f.bias",
        "head.table": "lm_head.weight",
    },
    layers={
        "norm1": ("ln_1",),
        "qkv": ("attn.c_attn",),
        "proj": ("attn.c_proj",),
        "norm2": ("ln_2",),
        "up": ("mlp.c_fc",),
        "down": ("mlp.c_proj",),
    },
    transposed=False,
    measured={
        "vocabulary": ("wte.weight", 0),
        "hidden": ("wte.weight", 1),
        "sequence": ("wpe.weight", 0),
    },
    copies={},
    tied=True,
    settings=hf_settings.GPT2,
)

_TRANSFORMERS_LLAMA = PublishedFamily(
    family=LLAMA,
    types=("llama",),
    architecture="LlamaForCausalLM",
    prefix="model.",
    bare="lm_head.",
    block="layers",
    ends={
        "embedding.token": "embed_tokens.weight",
        "head.norm.gamma": "norm.weight",
        "head.table": "lm_head.weight",
    },
    layers={
        "norm1": ("input_layernorm",),
        "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "q": ("self_attn.q_proj",),
        "k": ("self_attn.k_proj",),
        "v": ("self_attn.v_proj",),
        "proj": ("self_attn.o_proj",),
        "norm2": ("post_attention_layernorm",),
        "up": ("mlp.gate_proj", "mlp.up_proj"),
        "down": ("mlp.down_proj",),
    },
    transposed=True,
    measured={
        "vocabulary": ("embed_tokens.weight", 0),
        "hidden": ("embed_tokens.weight", 1),
        "ffn": ("layers.0.mlp.gate_proj.weight", 0),
    },
    copies={},
    tied=False,
    settings=hf_settings.LLAMA,
)

_TRANSFORMERS_PHI3 = _TRANSFORMERS_LLAMA._replace(
    family=PHI3,
    types=("phi3",),
    architecture="Phi3ForCausalLM",
    measured={**_TRANSFORMERS_LLAMA.measured, "ffn": ("layers.0.mlp.down_proj.weight", 1)},
    settings=hf_settings.PHI3,
    fused={
        "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
    },
)

_TRANSFORMERS_QWEN2 = _TRANSFORMERS_LLAMA._replace(
    family=QWEN2,
    types=("qwen2",),
    architecture="Qwen2ForCausalLM",
    settings=hf_settings.QWEN2,
)

_TRANSFORMERS_MISTRAL = _TRANSFORMERS_LLAMA._replace(
    types=("mistral",),
    architecture="MistralForCausalLM",
    settings=hf_settings.MISTRAL,
)

_QUERY_NORMS = {"q_norm": ("self_attn.q_norm",), "k_norm": ("self_attn.k_norm",)}

_TRANSFORMERS_MIXTRAL = _TRANSFORMERS_LLAMA._replace(
    types=("mixtral",),
    architecture="MixtralForCausalLM",
    layers={
        **{
            ours: names
            for ours, names in _TRANSFORMERS_LLAMA.layers.items()
            if ours not in ("up", "down")
        },
        "router": ("block_sparse_moe.gate",),
        "experts.up": ("block_sparse_moe.experts.{}.w1", "block_sparse_moe.experts.{}.w3"),
        "experts.down": ("block_sparse_moe.experts.{}.w2",),
    },
    measured={
        **_TRANSFORMERS_LLAMA.measured,
        "ffn": ("layers.0.block_sparse_moe.experts.0.w1.weight", 0),
        "experts": ("layers.0.block_sparse_moe.gate.weight", 0),
    },
    settings=hf_settings.MIXTRAL,
)

_TRANSFORMERS_QWEN3 = _TRANSFORMERS_LLAMA._replace(
    family=QWEN3,
    types=("qwen3",),
    architecture="Qwen3ForCausalLM",
    layers={**_TRANSFORMERS_LLAMA.layers, **_QUERY_NORMS},
    settings=hf_settings.QWEN3,
)

_TRANSFORMERS_OLMO2 = _TRANSFORMERS_QWEN3._replace(
    family=OLMO2,
    types=("olmo2",),
    architecture="Olmo2ForCausalLM",
    layers={
        **{
            ours: names
            for ours, names in _TRANSFORMERS_QWEN3.layers.items()
            if ours not in ("norm1", "norm2")
        },
        "post_norm1": ("post_attention_layernorm",),
        "post_norm2": ("post_feedforward_layernorm",),
    },
    settings=hf_settings.OLMO2,
)

_TRANSFORMERS_GEMMA = _TRANSFORMERS_LLAMA._replace(
    family=GEMMA,
    types=("gemma",),
    architecture="GemmaForCausalLM",
    tied=True,
    settings=hf_settings.GEMMA,
)

_TRANSFORMERS_GEMMA2 = _TRANSFORMERS_GEMMA._replace(
    family=GEMMA2,
    types=("gemma2",),
    architecture="Gemma2ForCausalLM",
    layers={
        **_TRANSFORMERS_GEMMA.layers,
        "norm2": ("pre_feedforward_layernorm",),
        "post_norm1": ("post_attention_layernorm",),
        "post_norm2": ("post_feedforward_layernorm",),
    },
    settings=hf_settings.GEMMA2,
)

_TRANSFORMERS_GEMMA3 = _TRANSFORMERS_GEMMA2._replace(
    family=GEMMA3,
    types=("gemma3_text",),
    architecture="Gemma3ForCausalLM",
    layers={**_TRANSFORMERS_GEMMA2.layers, **_QUERY_NORMS},
    settings=hf_settings.GEMMA3,
)

_TRANSFORMERS_GPT_NEOX = PublishedFamily(
    family=GPT_NEOX,
    types=("gpt_neox",),
    architecture="GPTNeoXForCausalLM",
    prefix="gpt_neox.",
    bare="embed_out.",
    block="layers",
    ends={
        "embedding.token": "embed_in.weight",
        "head.norm.gamma": "final_layer_norm.weight",
        "head.norm.beta": "final_layer_norm.bias",
        "head.table": "embed_out.weight",
    },
    layers={
        "norm1": ("input_layernorm",),
        "qkv": ("attention.query_key_value",),
        "proj": ("attention.dense",),
        "norm2": ("post_attention_layernorm",),
        "up": ("mlp.dense_h_to_4h",),
        "down": ("mlp.dense_4h_to_h",),
    },
    transposed=True,
    measured={
        "vocabulary": ("embed_in.weight", 0),
        "hidden": ("embed_in.weight", 1),
        "ffn": ("layers.0.mlp.dense_h_to_4h.weight", 0),
    },
    copies={},
    tied=False,
    settings=hf_settings.GPT_NEOX,
    by_head=True,
)

_TRANSFORMERS_QWEN3_MOE = _TRANSFORMERS_MIXTRAL._replace(
    family=QWEN3,
    types=("qwen3_moe",),
    architecture="Qwen3MoeForCausalLM",
    layers={
        **_TRANSFORMERS_MIXTRAL.layers,
        **_QUERY_NORMS,
        "router": ("mlp.gate",),
        "up": ("mlp.gate_proj", "mlp.up_proj"),
        "down": ("mlp.down_proj",),
        "experts.up": ("mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj"),
        "experts.down": ("mlp.experts.{}.down_proj",),
    },
    measured={
        **_TRANSFORMERS_LLAMA.measured,
        "ffn": ("layers.*.mlp.experts.0.gate_proj.weight", 0),
        "experts": ("layers.*.mlp.gate.weight", 0),
    },
    settings=hf_settings.QWEN3_MOE,
)

_TRANSFORMERS_BERT = PublishedFamily(
    family=BERT,
    types=("bert",),
    architecture="BertForMaskedLM",
    prefix="bert.",
    bare="cls.",
    block="encoder.layer",
    ends={
        "embedding.token": "embeddings.word_embeddings.weight",
        "embedding.position": "embeddings.position_embeddings.weight",
        "embedding.segment": "embeddings.token_type_embeddings.weight",
        "embedding.norm.gamma": "embeddings.LayerNorm.weight",
        "embedding.norm.beta": "embeddings.LayerNorm.bias",
        "head.dense.weight": "cls.predictions.transform.dense.weight",
        "head.dense.bias": "cls.predictions.transform.dense.bias",
        "head.norm.gamma": "cls.predictions.transform.LayerNorm.weight",
        "head.norm.beta": "cls.predictions.transform.LayerNorm.bias",
        "head.bias": "cls.predictions.bias",
        "head.table": "cls.predictions.decoder.weight",
    },
    layers={
        "qkv": ("attention.self.query", "attention.self.key", "attention.self.value"),
        "proj": ("attention.output.dense",),
        "norm1": ("attention.output.LayerNorm",),
        "up": ("intermediate.dense",),
        "down": ("output.dense",),
        "norm2": ("output.LayerNorm",),
    },
    transposed=True,
    measured={
        "vocabulary": ("embeddings.word_embeddings.weight", 0),
        "hidden": ("embeddings.word_embeddings.weight", 1),
        "sequence": ("embeddings.position_embeddings.weight", 0),
        "ffn": ("encoder.layer.0.intermediate.dense.weight", 0),
    },
    copies={"cls.predictions.decoder.bias": "cls.predictions.bias"},
    tied=True,
    settings=hf_settings.BERT,
)

_TRANSFORMERS_ROBERTA = _TRANSFORMERS_BERT._replace(
    family=ROBERTA,
    types=("roberta",),
    architecture="RobertaForMaskedLM",
    prefix="roberta.",
    bare="lm_head.",
    ends={
        **_TRANSFORMERS_BERT.ends,
        "head.dense.weight": "lm_head.dense.weight",
        "head.dense.bias": "lm_head.dense.bias",
        "head.norm.gamma": "lm_head.layer_norm.weight",
        "head.norm.beta": "lm_head.layer_norm.bias",
        "head.bias": "lm_head.bias",
        "head.table": "lm_head.decoder.weight",
    },
    copies={"lm_head.decoder.bias": "lm_head.bias"},
    settings=hf_settings.ROBERTA,
)

PUBLISHED = {
    each.types[0]: each
    for each in (
        _TRANSFORMERS_GPT2,
        _TRANSFORMERS_GPT_NEOX,
        _TRANSFORMERS_LLAMA,
        _TRANSFORMERS_QWEN2,
        _TRANSFORMERS_PHI3,
        _TRANSFORMERS_QWEN3,
        _TRANSFORMERS_OLMO2,
        _TRANSFORMERS_GEMMA,
        _TRANSFORMERS_GEMMA2,
        _TRANSFORMERS_GEMMA3,
        _TRANSFORMERS_MISTRAL,
        _TRANSFORMERS_MIXTRAL,
        _TRANSFORMERS_QWEN3_MOE,
        _TRANSFORMERS_BERT,
        _TRANSFORMERS_ROBERTA,
    )
}
_MIXTURES = {  # kind of model -> name and family of its mixtures of experts
    LLAMA.kind: ("Mixtral", _TRANSFORMERS_MIXTRAL),
    QWEN3.kind: ("Qwen3-MoE", _TRANSFORMERS_QWEN3_MOE),
}


def published(model: ModelConfig) -> PublishedFamily:
    """Return the `transformers` family for a `[model]` section.

    Raises ValueError for a window or a mixture of experts that `transformers` does not support.
    """
    family = _family_of(model)
    missing = {"window", "global_every"} - family.settings.windows
    for key in sorted(missing, reverse=True):
        if value := getattr(model, key):
            able = {
                each.family.kind for each in PUBLISHED.values() if key in each.settings.windows
            }
            raise ValueError(
                f"model.{key} = {value}: {family.architecture} in transformers does not have this "
                f"setting; models with model.kind = {', '.join(sorted(able))} can be exported "
                "with it if they have neither experts nor additional biases"
            )
    return family


def _family_of(model: ModelConfig) -> PublishedFamily:
    if not model.experts:
        biased = model.attention_bias or model.mlp_bias
        windowed = model.window and model.kind == LLAMA.kind and not biased
        return _TRANSFORMERS_MISTRAL if windowed else PUBLISHED[model.kind]
    if model.kind not in _MIXTURES:
        raise ValueError(
            f"model.kind = {model.kind} with experts has no counterpart in transformers; use "
            f"model.kind = {LLAMA.kind}, which is exported as Mixtral"
        )
    name, family = _MIXTURES[model.kind]
    if problem := hf_settings.no_mixture(model, family.settings, name):
        raise ValueError(
            f"{problem}, so this model cannot be exported to transformers; train with the "
            "required value"
        )
    return family
