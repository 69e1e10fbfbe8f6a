"""Model families, defined by their sizes, embedding, head and matrix products.

Validation rules, planner bounds, MFU and memory footprints are computed from the numbers of
parameters, FLOPs and saved elements that a family defines. FAMILIES has one entry per family.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial
from typing import Any, NamedTuple

from hpc3d.model.bert import MaskedHead, SegmentedEmbeddings
from hpc3d.model.gpt2 import Embeddings, Head
from hpc3d.model.layers import LayerNorm, OffsetRMSNorm, RMSNorm
from hpc3d.model.qkv.query_norm import HeadNorm, ProjectionNorm
from hpc3d.model.residual import BranchNorm, PostNorm, PreNorm, SandwichNorm
from hpc3d.model.spec import Experts, Family, ModelSizes, WeightProduct
from hpc3d.ops.rotary import Rotation
from hpc3d.ops.swiglu import geglu, swiglu

_EXPERT_KEYS = {  # map from keys of [model] to fields of `Experts`
    "experts": "count",
    "moe_every": "every",
    "shared_experts": "shared",
    **{key: key for key in ("top_k", "capacity", "balance_loss", "z_loss", "balance_bias")},
}


def _experts(model):
    if not model.experts:
        return None
    return Experts(**{field: getattr(model, key) for key, field in _EXPERT_KEYS.items()})


def _epsilon(model):
    unset = model.norm_epsilon is None
    return family_of(model).epsilon if unset else model.norm_epsilon


@cache
def _sizes(model, vocabulary):
    """Return the sizes in the `[model]` section."""
    family = family_of(model)
    own = {"gelu", "padding", "ffn", "kv_heads", "head_dim", "score_cap", "logit_cap"}
    own &= family.keys
    keys = "layers", "hidden", "heads", "sequence", "tied", "dropout", *own
    how: Any = {key: getattr(model, key) for key in (*keys, "window", "global_every")}
    if family.rotary:
        scaling = {"sequence": model.sequence, "share": model.rope_fraction}
        if model.query_scalar:  # a factor of q and k each
            scaling["gain"] = (model.head_width / model.query_scalar) ** 0.25
        if "rope_window_theta" in family.keys:
            how["window_rotation"] = Rotation(model.rope_window_theta, **scaling)
        scaling |= model.rope_scaling or {}
        how["rotation"] = Rotation(model.rope_theta, **scaling)
    return ModelSizes(
        vocabulary=vocabulary, epsilon=_epsilon(model), experts=_experts(model), **how
    )


def _table_product(sizes):
    return (WeightProduct("head", sizes.hidden, sizes.vocabulary),)


def _dense_and_table_product(sizes):
    dense = WeightProduct("dense", sizes.hidden, sizes.hidden, alike=True)
    return dense, *_table_product(sizes)


def _final_norm(sizes, centred):
    return (1 + centred) * sizes.hidden


def _bert_vectors(sizes, segments):
    """Count BERT's segment embeddings, and the norm and bias parameters outside its blocks.

    The embeddings and the head each have a norm. The head's dense layer and its output projection
    each have a bias.
    """
    return (segments + 2 * 2 + 1) * sizes.hidden + sizes.vocabulary


_BIASES = {  # maps keys of [model] to the linear layers of a block that have a bias
    "attention_bias": frozenset({"qkv", "proj"}),
    "mlp_bias": frozenset({"up", "down"}),
}
_ROPE_KEYS = frozenset({"kv_heads", "head_dim", "ffn", "norm_epsilon", "rope_theta"})
_ROPE_KEYS |= {"rope_scaling"}

GPT2 = Family(
    kind="gpt2",
    keys=frozenset({"gelu", "experts"}),
    sizes=_sizes,
    norm=LayerNorm,
    connection=PreNorm,
    epsilon=LayerNorm.EPSILON,
    gate=None,
    causal=True,
    rotary=False,
    biased=frozenset({"qkv", "proj", "up", "down"}),
    first=Embeddings,
    last=Head,
    head=_table_product,
    vectors=partial(_final_norm, centred=LayerNorm.centred),
)

LLAMA = Family(
    kind="llama",
    keys=_ROPE_KEYS | _BIASES.keys() | {"experts"},
    sizes=_sizes,
    norm=RMSNorm,
    connection=PreNorm,
    epsilon=LayerNorm.EPSILON,
    gate=swiglu,
    causal=True,
    rotary=True,
    biased=frozenset(),
    first=Embeddings,
    last=Head,
    head=_table_product,
    vectors=partial(_final_norm, centred=RMSNorm.centred),
)

PHI3 = replace(LLAMA, kind="phi3", keys=(_ROPE_KEYS | {"rope_fraction"}) - {"head_dim"})

QWEN2 = replace(LLAMA, kind="qwen2", keys=_ROPE_KEYS, biased=frozenset({"qkv"}))

QWEN3 = replace(
    LLAMA,
    kind="qwen3",
    keys=_ROPE_KEYS | {"attention_bias", "experts"},
    query_norm=HeadNorm,
)

OLMO2 = replace(
    LLAMA,
    kind="olmo2",
    keys=_ROPE_KEYS | {"attention_bias"},
    connection=BranchNorm,
    query_norm=ProjectionNorm,
)

GEMMA = replace(
    LLAMA,
    kind="gemma",
    keys=_ROPE_KEYS | {"attention_bias"},
    norm=OffsetRMSNorm,
    epsilon=1e-6,
    gate=geglu,
    scales_embedding=True,
)

GEMMA2 = replace(
    GEMMA,
    kind="gemma2",
    keys=GEMMA.keys | {"query_scalar", "score_cap", "logit_cap"},
    connection=SandwichNorm,
)

GEMMA3 = replace(
    GEMMA,
    kind="gemma3_text",
    keys=GEMMA.keys | {"rope_window_theta", "query_scalar"},
    connection=SandwichNorm,
    query_norm=HeadNorm,
)

GPT_NEOX = replace(
    GPT2,
    kind="gpt_neox",
    keys=(_ROPE_KEYS | {"gelu", "rope_fraction"}) - {"kv_heads", "head_dim"},
    rotary=True,
    parallel=True,
)

BERT = replace(
    GPT2,
    kind="bert",
    keys=frozenset({"gelu", "padding", "ffn", "norm_epsilon"}),
    connection=PostNorm,
    epsilon=1e-12,
    causal=False,
    first=SegmentedEmbeddings,
    last=MaskedHead,
    head=_dense_and_table_product,
    vectors=partial(_bert_vectors, segments=2),
    segments=2,
)

ROBERTA = replace(
    BERT,
    kind="roberta",
    vectors=partial(_bert_vectors, segments=1),
    segments=1,
    unused_positions=2,
)

FAMILIES = {
    family.kind: family
    for family in (
        *(GPT2, GPT_NEOX, LLAMA, QWEN2, QWEN3, PHI3, OLMO2),
        *(GEMMA, GEMMA2, GEMMA3, BERT, ROBERTA),
    )
}


def family_of(model: Any) -> Family:
    """Return the `Family` selected by the `[model]` section, with its additional biases."""
    family = FAMILIES[model.kind]
    added = frozenset().union(*(_BIASES[key] for key in _BIASES if getattr(model, key)))
    return replace(family, biased=family.biased | added) if added else family


def kinds_with(key: str) -> tuple[str, ...]:
    """Return the kinds of the families that have a key of the `[model]` section."""
    return tuple(kind for kind, family in FAMILIES.items() if key in family.keys)


def with_epsilon(model: Any) -> Any:
    """Replace an unset `norm_epsilon` in the `[model]` section with the family's default."""
    return replace(model, norm_epsilon=_epsilon(model))


def least_vocabulary(model: Any, tokens: int, mask: int | None = None) -> int:
    """Return the minimum vocabulary size of the model for a tokenizer with `tokens` tokens.

    `mask` is the ID of the tokenizer's mask token, or `None`. Families trained on masked tokens
    need a mask token. If the tokenizer has none, they need one additional entry, at the end.
    """
    return tokens if family_of(model).causal or mask is not None else tokens + 1


def block_products(model: Any) -> list[tuple[int, WeightProduct]]:
    """Return `Family.block_products` for the `[model]` section."""
    family = family_of(model)
    return family.block_products(family.sizes(model, model.vocabulary))


class Total(NamedTuple):
    """Total number of weights, and number of weights that are active for one token.

    A token does not activate the weights of experts to which it is not routed.
    """

    total: float
    active: float


def block_weights(model: Any) -> Total:
    """Return the number of elements in the weight matrices of all blocks."""
    products = block_products(model)
    total = sum(count * each.weights for count, each in products)
    return Total(total, sum(count * each.active for count, each in products))


def parameters(model: Any) -> Total:
    """Return the number of parameters of a model; its `[model]` section must set `vocabulary`."""
    family = family_of(model)
    sizes = family.sizes(model, model.vocabulary)
    tables = 0 if sizes.tied else sizes.vocabulary
    tables += 0 if family.rotary else family.unused_positions + sizes.sequence
    ends = sum(each.weights for each in family.head(sizes)) + family.vectors(sizes)
    norms = 2 * family.connection.NORMS * (1 + family.norm.centred) * sizes.hidden
    norms += family.query_norm.weights(sizes) if family.query_norm else 0
    rest = ends + tables * sizes.hidden + sizes.layers * norms + _balancing(sizes)
    weights = block_weights(model)
    total = sum(count * each.experts * each.outputs for count, each in _biased(model))
    active = sum(count * each.rows * each.outputs for count, each in _biased(model))
    return Total(rest + weights.total + total, rest + weights.active + active)


def _biased(model):
    family = family_of(model)
    return [
        (count, each)
        for count, each in block_products(model)
        if each.name.rpartition(".")[2] in family.biased
    ]


def _balancing(sizes):
    balanced = sizes.experts and sizes.experts.balance_bias
    return sizes.blocks()[True] * sizes.experts.count if balanced else 0


def expert_weights(model: Any) -> float:
    """Return the number of elements in the weight matrices of all routed experts."""
    return sum(count * each.weights for count, each in block_products(model) if each.experts > 1)


def expert_parameters(model: Any) -> float:
    """Return the number of elements in the experts' matrices and biases."""
    biases = [
        count * each.experts * each.outputs for count, each in _biased(model) if each.experts > 1
    ]
    return expert_weights(model) + sum(biases)
