"""Families of models: the sizes of each, its block and its two ends, and the list of its products.

Whoever counts parameters, operations or words of a model asks the lists: rules, bounds of the
planner, MFU, footprints.  A family is one entry of FAMILIES.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from hpc3d.model.bert import MaskedHead, SegmentedEmbeddings
from hpc3d.model.gpt2 import Embeddings, Head
from hpc3d.model.layers import LayerNorm, RMSNorm
from hpc3d.model.spec import Experts, Family, ModelSizes, WeightProduct
from hpc3d.ops.rotary import Rotation

_BERT_EPSILON = 1e-12
_QWEN2_KEYS = "kv_heads", "ffn", "norm_epsilon", "rope_theta", "rope_scaling"
_EXPERT_KEYS = {  # -> the field of Experts
    "experts": "count",
    "moe_every": "every",
    "shared_experts": "shared",
    **{key: key for key in ("top_k", "capacity", "balance_loss", "z_loss", "balance_bias")},
}


def _experts(model):
    values = {field: getattr(model, key) for key, field in _EXPERT_KEYS.items()}
    return Experts(**values) if model.experts else None


def _gpt2_sizes(model, vocabulary):
    named = "layers", "hidden", "heads", "sequence", "tied", "gelu", "dropout"
    return ModelSizes(
        vocabulary=vocabulary,
        experts=_experts(model),
        **{name: getattr(model, name) for name in named},
    )


def _bert_sizes(model, vocabulary):
    named = "layers", "hidden", "heads", "sequence", "tied", "gelu", "dropout", "padding"
    return ModelSizes(
        vocabulary=vocabulary,
        ffn=model.ffn or 4 * model.hidden,
        epsilon=_or_usual(model.norm_epsilon, _BERT_EPSILON),
        **{name: getattr(model, name) for name in named},
    )


def _or_usual(value, usual):
    return usual if value is None else value


def _llama_sizes(model, vocabulary):
    named = "layers", "hidden", "heads", "sequence", "tied", "dropout"
    rotation = Rotation(model.rope_theta, **(model.rope_scaling or {}))
    return ModelSizes(
        vocabulary=vocabulary,
        kv_heads=model.kv_heads or model.heads,
        ffn=model.ffn or 4 * model.hidden,
        epsilon=_or_usual(model.norm_epsilon, LayerNorm.EPSILON),
        rotation=rotation,
        experts=_experts(model),
        **{name: getattr(model, name) for name in named},
    )


def _block_products(sizes, gated):
    hidden = sizes.hidden
    return (
        WeightProduct("qkv", hidden, sizes.qkv),
        WeightProduct("proj", hidden, hidden, turned=True),
        WeightProduct("up", hidden, (1 + gated) * sizes.ffn),
        WeightProduct("down", sizes.ffn, hidden, turned=True),
    )


def _table_product(sizes):
    return (WeightProduct("head", sizes.hidden, sizes.vocabulary),)


def _dense_and_table_product(sizes):
    dense = WeightProduct("dense", sizes.hidden, sizes.hidden, alike=True)
    return dense, *_table_product(sizes)


def _full_attention(sizes):
    """Of q k' and p v, with the masked half: 2 T D for every head, each."""
    return 4 * sizes.sequence * sizes.hidden


def _block_kept(sizes, recompute, chunked, gated):
    """Korthikanti et al. 2022, section 4, without dropout's masks: the inputs of norms, of qkv, of
    proj and of up, q, k and v, and what activation and down work with.  Attention keeps its
    probabilities, or chunk by chunk a sum of every row and head."""
    rest = 5 * sizes.hidden + sizes.qkv + (2 + gated) * sizes.ffn
    if recompute == "full":
        return sizes.hidden
    if chunked:
        return rest + sizes.heads
    return rest + (sizes.heads * sizes.sequence if recompute == "none" else 0)


GPT2 = Family(
    kind="gpt2",
    sizes=_gpt2_sizes,
    norm=LayerNorm,
    first_norm=True,
    epsilon=LayerNorm.EPSILON,
    gated=False,
    causal=True,
    rotary=False,
    biased=frozenset({"qkv", "proj", "up", "down"}),
    keys=("gelu", *_EXPERT_KEYS),
    first=Embeddings,
    last=Head,
    products=partial(_block_products, gated=False),
    head=_table_product,
    attention=_full_attention,
    kept=partial(_block_kept, gated=False),
)

LLAMA = Family(
    kind="llama",
    sizes=_llama_sizes,
    norm=RMSNorm,
    first_norm=True,
    epsilon=LayerNorm.EPSILON,
    gated=True,
    causal=True,
    rotary=True,
    biased=frozenset(),
    keys=(*_QWEN2_KEYS, *_EXPERT_KEYS),
    first=Embeddings,
    last=Head,
    products=partial(_block_products, gated=True),
    head=_table_product,
    attention=_full_attention,
    kept=partial(_block_kept, gated=True),
)

QWEN2 = replace(LLAMA, kind="qwen2", biased=frozenset({"qkv"}), keys=_QWEN2_KEYS)

BERT = replace(
    GPT2,
    kind="bert",
    sizes=_bert_sizes,
    first_norm=False,
    epsilon=_BERT_EPSILON,
    causal=False,
    keys=("gelu", "ffn", "norm_epsilon", "padding"),
    first=SegmentedEmbeddings,
    last=MaskedHead,
    head=_dense_and_table_product,
)

FAMILIES = {family.kind: family for family in (GPT2, LLAMA, QWEN2, BERT)}


def family_of(model: Any) -> Family:
    """The Family of a section [model]."""
    return FAMILIES[model.kind]


def with_epsilon(model: Any) -> Any:
    """A section [model] with that of its norms, which is its family's where it is absent."""
    return replace(model, norm_epsilon=_or_usual(model.norm_epsilon, family_of(model).epsilon))


def least_vocabulary(model: Any, tokens: int) -> int:
    """The least vocabulary for so many `tokens` of a tokenizer: where a family masks tokens there
    is one more, the last, for these."""
    return tokens if family_of(model).causal else tokens + 1


def block_products(model: Any) -> tuple[WeightProduct, ...]:
    """The WeightProducts of a block of the model of a section [model]."""
    family = family_of(model)
    return family.products(family.sizes(model, model.vocabulary))


def block_weights(model: Any) -> int:
    """Elements of the matrices of such a block."""
    return sum(product.weights for product in block_products(model))
