"""What a model is built from and counted by: its sizes, its family, its split."""

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
    """Of the mixtures that every so-many-th block has in the place of its MLP: `count` experts, of
    which `top_k` see a token, and `shared` ones that see all; factors of what their router adds to
    the loss, `balance_loss` and `z_loss`; the rate `balance_bias` of a bias that balances them.

    With a `capacity` of 0 there is room for all.
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
        """The slots of an expert for a sequence of so many tokens, ceil(k T capacity / E)."""
        if not self.capacity:
            return tokens
        wanted = self.top_k * tokens * Fraction(str(self.capacity)) / self.count
        return min(tokens, ceil(wanted))

    def slots_of_token(self, tokens: int) -> float:
        """The slots of all experts for a token of such a sequence, E C / T."""
        return self.count * self.slots(tokens) / tokens


@dataclass(frozen=True)
class ModelSizes:
    """The sizes of a model; `std` is that of the initial weights, `rotation` that of rotary
    positions, `padding` the token that nobody attends to.  With `fused_gelu` a device does GELU
    within products, where it has whole matrices.

    `kv_heads`, those of keys and values, are as many as `heads` where they are 0, and `ffn`, the
    features of the hidden layer of the MLP, or of an expert, are 4 hidden.
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
        """Whether a block has a mixture of experts: the last of every `experts.every`."""
        return self.experts is not None and (layer + 1) % self.experts.every == 0

    def blocks(self) -> dict[bool, int]:
        """Whether a block has a mixture of experts -> the number of such blocks."""
        mixtures = self.layers // self.experts.every if self.experts else 0
        return {False: self.layers - mixtures, True: mixtures}

    @property
    def form(self) -> HeadForm:
        """Of a head of keys, with its queries."""
        return self.form_over(1)

    def form_over(self, members: int) -> HeadForm:
        """The same on one of so many ranks over which heads are cut: where there are more than
        heads of keys, several ranks have the queries of one."""
        queries = self.heads // max(self.kv_heads, members)
        return HeadForm(self.hidden // self.heads, queries)

    @property
    def qkv(self) -> int:
        """Columns of q, k and v together."""
        return self.hidden + 2 * self.hidden * self.kv_heads // self.heads


class WeightProduct(NamedTuple):
    """Y[m, outputs] = X[m, inputs] W, with `rows` rows for every token; `turned` where its split
    is the next one, that of a second product in a row (Bian et al. 2021, section 3.1.2), `alike`
    where it is the one of which Y lies as X does, `by_rows` where it is the one of which Y has
    whole rows.  Of `experts`, each has a W of its own, and a token goes to `rows` of them; it has
    `slots` rows there, which are computed and moved, full or empty."""

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
        """Elements of W, of all experts."""
        return self.experts * self.inputs * self.outputs

    @property
    def active(self) -> float:
        """Elements of W, as often as a token meets them."""
        return self.rows * self.inputs * self.outputs

    @property
    def computed(self) -> float:
        """Elements of W, as often as rows of a token meet them, empty ones among them."""
        return self.slots * self.inputs * self.outputs

    @property
    def flops(self) -> float:
        """Floating-point operations of a token, forward."""
        return 2 * self.active


# What backward computes again of every block, or the numbers of the blocks that it computes whole.
_Recompute = str | Sequence[int]


def recompute_of(recompute: _Recompute, layer: int) -> str:
    """What backward computes again of a block: "none", "selective" or "full"."""
    if isinstance(recompute, str):
        return recompute
    return "full" if layer in recompute else "none"


@dataclass(frozen=True)
class Family:
    """A family of models by its `kind`.

    sizes     (the section [model], vocabulary) -> ModelSizes
    norm      that of blocks and head: (mesh, parameters, name, width, layout, epsilon)
    first_norm whether a half of a block begins with its norm, else it ends with it
    epsilon   that of norms where [model] has none
    gated     whether the MLP is SwiGLU, else GELU
    causal    whether a token sees those before it alone and is followed by its target; else some
              tokens are masked, and these are the targets
    rotary    whether positions turn q and k, else the first end has a table of them
    biased    the linear layers of a block that have a bias
    first     the end with the token table: (mesh, parameters, spec, table)
    last      the end with the loss: the same
    products  of a block: (sizes, whether it has a mixture of experts) -> WeightProducts, in the
              order of the forward pass
    head      of the last end: (sizes) -> the same
    vectors   elements of the two ends beside tables of tokens and positions, and products: (sizes)
    attention operations of the core of attention, of a token in a block, forward: (sizes)
    kept      elements that a block keeps of a token for its backward pass: (sizes, recompute,
              whether attention is chunked, whether it has a mixture)
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
        """Floating-point operations of a token, forward, of products and attention: one third of
        those of a step without recomputation.  Of experts those that a token goes to count, and
        none of a slot that is empty."""
        blocks = sum(count * product.flops for count, product in self.block_products(sizes))
        head = sum(product.flops for product in self.head(sizes))
        return blocks + sizes.layers * self.attention(sizes) + head

    def block_products(self, sizes: ModelSizes) -> list[tuple[int, WeightProduct]]:
        """The WeightProducts of all blocks, each after the number of blocks that have it."""
        return [
            (count, product)
            for mixes, count in sizes.blocks().items()
            if count
            for product in self.products(sizes, mixes)
        ]

    def blocks_kept(self, sizes: ModelSizes, recompute: _Recompute, chunked: bool) -> float:
        """What all blocks keep, as `kept`."""
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
    """What all parts of a model are built from: its `family` and `sizes`, the `splits` of the
    products of each kind of layer, the operands that these `keep` for backward, the `seed` of
    dropout, what backward does again, `recompute`, how sequences are cut, `context` (whole ones
    unless it is given), whether attention is `chunked`, and what has a scale of its own where
    products of layers are in float8, a block or a tensor."""

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
