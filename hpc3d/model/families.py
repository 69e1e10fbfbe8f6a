"""Model families, defined by their sizes, embedding, head and matrix products.

Validation rules, planner bounds, MFU and memory footprints are computed from the numbers of
parameters, FLOPs and saved elements that a family defines. FAMILIES has one entry per family.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from hpc3d.model.bert import SEGMENTS, MaskedHead, SegmentedEmbeddings
from hpc3d.model.gpt2 import Embeddings, Head
from hpc3d.model.layers import LayerNorm, RMSNorm
from hpc3d.model.spec import Experts, Family, ModelSizes, WeightProduct
from hpc3d.ops.rotary import Rotation

_BERT_EPSILON = 1e-12
_EXPERT_KEYS = {  # map from keys of [model] to fields of `Experts`
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


def _block_products(sizes, mixes, gated):
    hidden, mlp = sizes.hidden, _mixture_products if mixes else _mlp_products
    return (
        WeightProduct("qkv", hidden, sizes.qkv),
        WeightProduct("proj", hidden, hidden, turned=True),
        *mlp(sizes, gated),
    )


def _mlp_products(sizes, gated, name="", wide=1, **experts):
    ffn = wide * sizes.ffn
    return (
        WeightProduct(f"{name}up", sizes.hidden, (1 + gated) * ffn, **experts),
        WeightProduct(f"{name}down", ffn, sizes.hidden, turned=True, **experts),
    )


def _mixture_products(sizes, gated):
    form = sizes.experts
    slots = form.slots_of_token(sizes.sequence)
    experts = {"rows": form.top_k, "experts": form.count, "slots": slots}
    shared = _mlp_products(sizes, gated, "shared.", form.shared) if form.shared else ()
    return (
        WeightProduct("router", sizes.hidden, form.count, by_rows=True),
        *_mlp_products(sizes, gated, "experts.", **experts),
        *shared,
    )


def _table_product(sizes):
    return (WeightProduct("head", sizes.hidden, sizes.vocabulary),)


def _dense_and_table_product(sizes):
    dense = WeightProduct("dense", sizes.hidden, sizes.hidden, alike=True)
    return dense, *_table_product(sizes)


def _final_norm(sizes, centred):
    return (1 + centred) * sizes.hidden


def _bert_vectors(sizes):
    """Count BERT's segment embeddings, and the norm and bias parameters outside its blocks.

    The embeddings and the head each have a norm. The head's dense layer and its output projection
    each have a bias.
    """
    return (SEGMENTS + 2 * 2 + 1) * sizes.hidden + sizes.vocabulary


def _full_attention(sizes):
    """Return the attention FLOPs per token: 2 T D per head for q k^T, and as many for p v.

    FLOPs for masked scores are included.
    """
    return 4 * sizes.sequence * sizes.hidden


def _block_kept(sizes, recompute, chunked, mixes, gated):
    """Return the number of elements that a block saves per token, excluding dropout masks.

    The block saves the inputs of the norms, of the QKV, output, up and down projections and of the
    activation function, as well as q, k and v (Korthikanti et al. 2022, section 4).
    Attention saves its probabilities or, if chunked, one log-sum-exp per row and head.
    """
    features = (2 + gated) * sizes.ffn
    rest = 5 * sizes.hidden + sizes.qkv
    rest += _mixture_kept(sizes, features) if mixes else features
    if recompute == "full":
        return sizes.hidden
    if chunked:
        return rest + sizes.heads
    return rest + (sizes.heads * sizes.sequence if recompute == "none" else 0)


def _mixture_kept(sizes, features):
    """Return the number of elements that a mixture of experts saves per token.

    For every expert slot, including empty slots, the mixture saves the inputs of the up
    projection, the activation and the down projection, and the output. Each shared expert saves as
    many elements as an MLP. The data saved by the router is negligible.
    """
    form = sizes.experts
    slots = form.slots_of_token(sizes.sequence)
    return form.shared * features + slots * (2 * sizes.hidden + features)


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
    first=Embeddings,
    last=Head,
    products=partial(_block_products, gated=False),
    head=_table_product,
    vectors=partial(_final_norm, centred=LayerNorm.centred),
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
    first=Embeddings,
    last=Head,
    products=partial(_block_products, gated=True),
    head=_table_product,
    vectors=partial(_final_norm, centred=RMSNorm.centred),
    attention=_full_attention,
    kept=partial(_block_kept, gated=True),
)

QWEN2 = replace(LLAMA, kind="qwen2", biased=frozenset({"qkv"}))

BERT = replace(
    GPT2,
    kind="bert",
    sizes=_bert_sizes,
    first_norm=False,
    epsilon=_BERT_EPSILON,
    causal=False,
    first=SegmentedEmbeddings,
    last=MaskedHead,
    head=_dense_and_table_product,
    vectors=_bert_vectors,
)

FAMILIES = {family.kind: family for family in (GPT2, LLAMA, QWEN2, BERT)}


def family_of(model: Any) -> Family:
    """Return the `Family` selected by the `[model]` section."""
    return FAMILIES[model.kind]


def with_epsilon(model: Any) -> Any:
    """Replace an unset `norm_epsilon` in the `[model]` section with the family's default."""
    return replace(model, norm_epsilon=_or_usual(model.norm_epsilon, family_of(model).epsilon))


def least_vocabulary(model: Any, tokens: int) -> int:
    """Return the minimum vocabulary size of the model for a tokenizer with `tokens` tokens.

    Families trained on masked tokens need one additional entry, at the end, for the mask token.
    """
    return tokens if family_of(model).causal else tokens + 1


def block_products(model: Any) -> list[tuple[int, WeightProduct]]:
    """Return the matrix products of all blocks as pairs (number of blocks, `WeightProduct`).

    Blocks with and without a mixture of experts are listed separately.
    """
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
    tables += 0 if family.rotary else sizes.sequence
    ends = sum(each.weights for each in family.head(sizes)) + family.vectors(sizes)
    norms = 2 * (1 + family.norm.centred) * sizes.hidden
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
