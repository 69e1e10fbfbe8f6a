"""Families of models: the sizes of each, its block and its two ends, and the list of its products.

Whoever counts parameters, operations or words of a model asks the lists: rules, bounds of the
planner, MFU, footprints.  A family is one entry of FAMILIES.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from hpc3d.model.gpt2 import Embeddings, Head
from hpc3d.model.layers import LayerNorm, RMSNorm
from hpc3d.model.spec import Family, ModelSizes, WeightProduct
from hpc3d.ops.rotary import Rotation


def _gpt2_sizes(model, vocabulary):
    named = "layers", "hidden", "heads", "sequence", "tied", "gelu", "dropout"
    return ModelSizes(vocabulary=vocabulary, **{name: getattr(model, name) for name in named})


def _llama_sizes(model, vocabulary):
    named = "layers", "hidden", "heads", "sequence", "tied", "dropout"
    rotation = Rotation(model.rope_theta, **(model.rope_scaling or {}))
    return ModelSizes(
        vocabulary=vocabulary,
        kv_heads=model.kv_heads or model.heads,
        ffn=model.ffn or 4 * model.hidden,
        epsilon=model.norm_epsilon,
        rotation=rotation,
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


def _full_attention(sizes):
    """Of q k' and p v, with the masked half: 2 T D for every head, each."""
    return 4 * sizes.sequence * sizes.hidden


def _block_kept(sizes, recompute, gated):
    """Korthikanti et al. 2022, section 4, without dropout's masks: the inputs of norms, of qkv, of
    proj and of up, q, k and v, and what activation and down work with."""
    scores = sizes.heads * sizes.sequence
    rest = 5 * sizes.hidden + sizes.qkv + (2 + gated) * sizes.ffn
    return {"none": rest + scores, "selective": rest, "full": sizes.hidden}[recompute]


GPT2 = Family(
    kind="gpt2",
    sizes=_gpt2_sizes,
    norm=LayerNorm,
    gated=False,
    rotary=False,
    biased=frozenset({"qkv", "proj", "up", "down"}),
    keys=("gelu",),
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
    gated=True,
    rotary=True,
    biased=frozenset(),
    keys=("kv_heads", "ffn", "norm_epsilon", "rope_theta", "rope_scaling"),
    first=Embeddings,
    last=Head,
    products=partial(_block_products, gated=True),
    head=_table_product,
    attention=_full_attention,
    kept=partial(_block_kept, gated=True),
)

QWEN2 = replace(LLAMA, kind="qwen2", biased=frozenset({"qkv"}))

FAMILIES = {family.kind: family for family in (GPT2, LLAMA, QWEN2)}


def family_of(model: Any) -> Family:
    """The Family of a section [model]."""
    return FAMILIES[model.kind]


def block_products(model: Any) -> tuple[WeightProduct, ...]:
    """The WeightProducts of a block of the model of a section [model]."""
    family = family_of(model)
    return family.products(family.sizes(model, model.vocabulary))


def block_weights(model: Any) -> int:
    """Elements of the matrices of such a block."""
    return sum(product.weights for product in block_products(model))
