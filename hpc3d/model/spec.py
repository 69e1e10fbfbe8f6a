"""Specification of a model: its sizes, its family and its splits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from math import ceil
from typing import Any, NamedTuple

from hpc3d.model.context import WHOLE, Context
from hpc3d.ops.attention import HeadForm
from hpc3d.ops.rotary import Rotation
from hpc3d.tensor.split import Split


@dataclass(frozen=True)
class Experts:
    """Mixture of experts that replaces the MLP in one of every `every` blocks.

    It has `count` experts, of which each token is routed to `top_k`, and `shared` experts that
    process all tokens.  `balance_loss` and `z_loss` are the factors of the router's auxiliary
    losses; `balance_bias` is the update rate of the balancing bias.  With a `capacity` of 0 no
    token is dropped.
    """

    count: int
    top_k: int = 1
    capacity: float = 1.25
    every: int = 1
    shared: int = 0
    balance_loss: float = 0.01
    z_loss: float = 0.001
    balance_bias: float = 0.0

    def slots(self, tokens: int) -> int:
        """Return the slots of an expert for a sequence of T `tokens`, ceil(k T capacity / E)."""
        if not self.capacity:
            return tokens
        wanted = self.top_k * tokens * Fraction(str(self.capacity)) / self.count
        return min(tokens, ceil(wanted))

    def slots_of_token(self, tokens: int) -> float:
        """Return the slots of all experts per token of such a sequence, E C / T."""
        return self.count * self.slots(tokens) / tokens


@dataclass(frozen=True)
class ModelSizes:
    """Sizes of a model.

    `std` is the standard deviation of the initial weights, `rotation` the parameters of rotary
    positions, and `padding` the token that no other token attends to.  With `fused_gelu`, a device
    with complete matrices fuses GELU with products.

    `kv_heads` is the number of key/value heads (0: `heads`), and `ffn` the number of hidden
    features of the MLP or of an expert (0: 4 hidden).
    """

    layers: int
    hidden: int
    heads: int
    sequence: int
    vocabulary: int | None
    tied: bool = True
    gelu: str = "tanh"
    dropout: float = 0.0
    std: float = 0.02
    fused_gelu: bool = False
    kv_heads: int = 0
    ffn: int = 0
    epsilon: float = 1e-5
    rotation: Rotation = field(default_factory=Rotation)
    padding: int | None = None
    experts: Experts | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "kv_heads", self.kv_heads or self.heads)
        object.__setattr__(self, "ffn", self.ffn or 4 * self.hidden)

    def mixes(self, layer: int) -> bool:
        """Return True if a block has a mixture of experts: the last of every `experts.every`."""
        return self.experts is not None and (layer + 1) % self.experts.every == 0

    def blocks(self) -> dict[bool, int]:
        """Return {True if a block has a mixture of experts: the number of such blocks}."""
        mixtures = self.layers // self.experts.every if self.experts else 0
        return {False: self.layers - mixtures, True: mixtures}

    @property
    def form(self) -> HeadForm:
        """Form of a key head with its queries."""
        return self.form_over(1)

    def form_over(self, members: int) -> HeadForm:
        """Return the head form on one of `members` ranks over which heads are sharded.

        If there are more ranks than key heads, several ranks share the queries of one key head.
        """
        queries = self.heads // max(self.kv_heads, members)
        return HeadForm(self.hidden // self.heads, queries)

    @property
    def qkv(self) -> int:
        """Number of columns of q, k and v together."""
        return self.hidden + 2 * self.hidden * self.kv_heads // self.heads


class WeightProduct(NamedTuple):
    """Product Y[m, outputs] = X[m, inputs] W with `rows` rows per token.

    `turned` means the next split, as for the second of two consecutive products (Bian et al. 2021,
    section 3.1.2); `alike` the split whose Y has the layout of X; `by_rows` the split whose Y has
    complete rows.  Each of `experts` has its own W, and a token is routed to `rows` of them.  It
    has `slots` rows there, which are computed and communicated whether full or empty.
    """

    name: str
    inputs: int
    outputs: int
    turned: bool = False
    rows: float = 1
    alike: bool = False
    by_rows: bool = False
    experts: int = 1
    slots: float = 1

    @property
    def weights(self) -> int:
        """Number of elements of W over all experts."""
        return self.experts * self.inputs * self.outputs

    @property
    def active(self) -> float:
        """Elements of W times the rows per token."""
        return self.rows * self.inputs * self.outputs

    @property
    def computed(self) -> float:
        """Elements of W times the computed rows per token, including empty slots."""
        return self.slots * self.inputs * self.outputs

    @property
    def flops(self) -> float:
        """Forward FLOPs per token."""
        return 2 * self.active


# Recomputation of every block, or the numbers of the blocks that are fully recomputed.
_Recompute = str | Sequence[int]


def recompute_of(recompute: _Recompute, layer: int) -> str:
    """Return the recomputation of a block: "none", "selective" or "full"."""
    if isinstance(recompute, str):
        return recompute
    return "full" if layer in recompute else "none"


@dataclass(frozen=True)
class Family:
    """Family of models, identified by its `kind`.

    sizes     (the section [model], vocabulary) -> ModelSizes
    norm      type of the norms: (mesh, parameters, name, width, layout, epsilon)
    first_norm True for pre-norm, False for post-norm
    epsilon   default epsilon of the norms, if [model] has none
    gated     True for SwiGLU, False for GELU
    causal    True if a token attends only to earlier tokens and its target is the next token;
              False if some tokens are masked, and these are the targets
    rotary    True for rotary positions, False for a table of positions in the embedding
    biased    the linear layers of a block that have a bias
    first     the embedding, with the token table: (mesh, parameters, spec, table)
    last      the head, with the loss: (mesh, parameters, spec, table)
    products  of a block: (sizes, True for a mixture of experts) -> WeightProducts, in the order of
              the forward pass
    head      of the head: (sizes) -> WeightProducts
    vectors   elements of embedding and head without products and the tables of tokens and
              positions: (sizes)
    attention FLOPs of core attention per token and block, forward: (sizes)
    kept      elements that a block saves per token for backward: (sizes, recompute, True for
              chunked attention, True for a mixture of experts)
    """

    kind: str
    sizes: Callable
    norm: type[Any]
    first_norm: bool
    epsilon: float
    gated: bool
    causal: bool
    rotary: bool
    biased: frozenset[str]
    first: type
    last: type
    products: Callable
    head: Callable
    vectors: Callable
    attention: Callable
    kept: Callable

    def flops(self, sizes: ModelSizes) -> float:
        """Return the forward FLOPs per token of products and attention.

        They are one third of the FLOPs of a step without recomputation.  Only the experts to which
        a token is routed count; empty slots do not.
        """
        blocks = sum(count * product.flops for count, product in self.block_products(sizes))
        head = sum(product.flops for product in self.head(sizes))
        return blocks + sizes.layers * self.attention(sizes) + head

    def block_products(self, sizes: ModelSizes) -> list[tuple[int, WeightProduct]]:
        """Return pairs of a number of blocks and a WeightProduct that each of them has."""
        return [
            (count, product)
            for mixes, count in sizes.blocks().items()
            if count
            for product in self.products(sizes, mixes)
        ]

    def blocks_kept(self, sizes: ModelSizes, recompute: _Recompute, chunked: bool) -> float:
        """Return the elements that all blocks save per token, the sum of `kept`."""
        if isinstance(recompute, str):
            counts = {(recompute, mixes): count for mixes, count in sizes.blocks().items()}
        else:
            layers = range(sizes.layers)
            counts = Counter((recompute_of(recompute, i), sizes.mixes(i)) for i in layers)
        return sum(
            count * self.kept(sizes, how, chunked, mixes)
            for (how, mixes), count in counts.items()
            if count
        )


@dataclass(frozen=True)
class ModelSpec:
    """Complete specification of a model for its layers.

    `splits` has the split of the products of each kind of layer, `keep` the operands saved for
    backward, `seed` the seed of dropout, `recompute` the activation checkpointing, and `context`
    the sharding of sequences (none by default).  `chunked` selects chunked attention.  `scales` is
    "block" or "tensor" if the products of layers use float8: the region that has one scale.
    """

    family: Family
    sizes: ModelSizes
    splits: Mapping[str, Split]
    keep: str = "xw"
    seed: int = 0
    recompute: _Recompute = "none"
    keep_dtype: str | None = None
    context: Context = WHOLE
    chunked: bool = False
    scales: str | None = None

    def __post_init__(self) -> None:
        if self.context is WHOLE:
            object.__setattr__(self, "context", Context(self.sizes.sequence))
