"""Specification of a model: its sizes, its family, and the splits of its matrix products."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from math import ceil
from typing import Any, NamedTuple

from hpc3d.model.context import WHOLE, Context
from hpc3d.ops.attention import HeadForm
from hpc3d.ops.rotary import Rotation
from hpc3d.tensor.split import Split

# Capacity factor that determines the minimum number of slots if the capacity is not limited.
_LEAST_CAPACITY = 1.25


@dataclass(frozen=True)
class Experts:
    """Mixture of experts that replaces the MLP in every `every`-th block.

    The layer has `count` experts, with each token routed to `top_k` of them, and `shared` experts
    that process all tokens. `balance_loss` and `z_loss` are the coefficients of the router's
    auxiliary losses; `balance_bias` is the update rate of the balancing bias. If `capacity` is 0,
    no token is dropped, and the number of slots depends on the load (`sufficient_slots`).
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
        """Return the number of slots per expert for a routing group of T = `tokens` tokens.

        The number is min(T, ceil(top_k * T * capacity / count)). If `capacity` is 0, it is the
        number for a capacity of 1.25, which suffices if no expert receives more than 1.25 times
        the mean number of tokens.
        """
        factor = Fraction(str(self.capacity or _LEAST_CAPACITY))
        return min(tokens, ceil(self.top_k * tokens * factor / self.count))

    def sufficient_slots(self, tokens: int, load: int) -> int:
        """Return a number of slots per expert with which none of `tokens` tokens is dropped.

        `load` is the largest number of tokens that are routed to one expert. The result is the
        first sufficient number of the sequence N, 2 N, 4 N, ..., with N = `slots(tokens)`, but at
        most `tokens`. With few different numbers, the pools store arrays of few sizes.
        """
        found = self.slots(tokens)
        while found < load:
            found *= 2
        return min(tokens, found)

    def slots_of_token(self, tokens: int) -> float:
        """Return the number of slots per token, summed over all experts.

        `tokens` is the number of tokens per routing group. If `capacity` is 0, the number is a
        lower bound.
        """
        if not self.capacity:
            return min(self.count, self.top_k * _LEAST_CAPACITY)
        return self.count * self.slots(tokens) / tokens


@dataclass(frozen=True)
class ModelSizes:
    """Sizes and other hyperparameters of a model.

    `std` is the standard deviation of the initial weights, `rotation` the parameters of the rotary
    embedding, and `padding` the padding token, which is masked in attention. If `fused_gelu` is
    True, GELU is fused into the products on GPUs, unless the MLP is sharded.

    `kv_heads` is the number of key/value heads (0: `heads`), `head_dim` the number of features of
    a head (0: hidden / heads), and `ffn` the number of hidden features of the MLP or of an expert
    (0: 4 hidden).

    With `window`, a token attends only to the last `window` tokens up to its own position (0: to
    all of them), except in every `global_every`-th block (0: no exceptions). Blocks with a window
    have `window_rotation`, or `rotation` if it is `None`.

    `score_cap` and `logit_cap` are the soft caps of attention scores and of logits: x is replaced
    with cap tanh(x / cap) (0: no cap).

    If `separator`, the end-of-document token, is not `None`, tokens attend only to tokens in the
    same document, and learned positions restart with each document.
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
    head_dim: int = 0
    ffn: int = 0
    epsilon: float = 1e-5
    rotation: Rotation = field(default_factory=Rotation)
    padding: int | None = None
    experts: Experts | None = None
    window: int = 0
    global_every: int = 0
    window_rotation: Rotation | None = None
    score_cap: float = 0.0
    logit_cap: float = 0.0
    separator: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "kv_heads", self.kv_heads or self.heads)
        object.__setattr__(self, "head_dim", self.head_dim or self.hidden // self.heads)
        object.__setattr__(self, "ffn", self.ffn or 4 * self.hidden)

    def mixes(self, layer: int) -> bool:
        """Return True if block `layer` has a mixture of experts (one block in `experts.every`)."""
        return self.experts is not None and (layer + 1) % self.experts.every == 0

    def window_of(self, layer: int) -> int:
        """Return the attention window of block `layer`, or 0 if it covers all earlier tokens."""
        return self.window if self._windowed(layer) and self.window < self.sequence else 0

    def _windowed(self, layer: int) -> bool:
        every = self.global_every
        return self.window > 0 and not (every > 0 and (layer + 1) % every == 0)

    def rotation_of(self, layer: int) -> Rotation:
        """Return the parameters of the rotary embedding of block `layer`."""
        return (self._windowed(layer) and self.window_rotation) or self.rotation

    def windows(self) -> Counter[int]:
        """Return the number of blocks with each attention window (0: all earlier tokens)."""
        every, windowed = self.global_every, 0
        if 0 < self.window < self.sequence:
            windowed = self.layers - (self.layers // every if every > 0 else 0)
        return +Counter({self.window: windowed, 0: self.layers - windowed})

    def blocks(self) -> dict[bool, int]:
        """Return the number of blocks with (key True) and without (False) a mixture of experts."""
        mixtures = self.layers // self.experts.every if self.experts else 0
        return {False: self.layers - mixtures, True: mixtures}

    @property
    def form(self) -> HeadForm:
        """Head dimension, and number of query heads per KV head."""
        return self.form_over(1)

    def form_over(self, members: int) -> HeadForm:
        """Return the layout of each rank's heads if they are sharded over `members` ranks.

        With more ranks than KV heads, the query heads that share a KV head are sharded as well.
        """
        queries = self.heads // max(self.kv_heads, members)
        return HeadForm(self.head_dim, queries, self.score_cap)

    @property
    def attended(self) -> int:
        """Number of features of the attention output, over all query heads."""
        return self.heads * self.head_dim

    @property
    def qkv(self) -> int:
        """Number of output columns of the QKV projection (q, k and v together)."""
        return (self.heads + 2 * self.kv_heads) * self.head_dim


class WeightProduct(NamedTuple):
    """Matrix product Y[m, outputs] = X[m, inputs] W with `rows` rows of X per token.

    The product uses the layer's `Split` unless a flag is set. `turned` selects `Split.next`, for
    the second of two consecutive products (Bian et al. 2021, section 3.1.2). `alike` selects
    `Split.alike`, with the same layout for Y as for X. `by_rows` selects `Split.by_rows`, with
    complete rows of Y on each rank.

    Each of `experts` experts has its own W, and each token is routed to `rows` of the experts. All
    experts together have `slots` rows per token, including empty slots, which are computed and
    communicated as well.
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
        """Number of weights (elements of W), summed over all experts."""
        return self.experts * self.inputs * self.outputs

    @property
    def active(self) -> float:
        """Number of active weights per token: elements of W times rows per token."""
        return self.rows * self.inputs * self.outputs

    @property
    def computed(self) -> float:
        """Multiply-adds per token, including empty slots: elements of W times slots per token."""
        return self.slots * self.inputs * self.outputs

    @property
    def flops(self) -> float:
        """Forward FLOPs per token."""
        return 2 * self.active


# Activation checkpointing mode of all blocks, the names of the modules that are recomputed in all
# blocks, or the indices of fully recomputed blocks.
_Recompute = str | Collection[str] | Sequence[int]


def recompute_of(recompute: _Recompute, layer: int | None = None) -> frozenset[str]:
    """Return the modules of block `layer` that are recomputed, or {"full"} for the full block.

    Without `layer`, the modules that are recomputed in all blocks are returned.
    """
    if isinstance(recompute, str):
        modules: dict[str, tuple[str, ...]] = {"none": (), "selective": ("core_attn",)}
        return frozenset(modules.get(recompute, (recompute,)))
    if layer in recompute:
        return frozenset(("full",))
    return frozenset(each for each in recompute if isinstance(each, str))


@dataclass(frozen=True)
class Family:
    """Family of models, identified by its `kind`.

    keys      the keys of [model] that this family has, but not every family
    sizes     (the section [model], vocabulary) -> ModelSizes
    norm      type of the norms: (mesh, parameters, name, width, layout, epsilon)
    connection type of the residual connections around attention and MLP, with their norms
    epsilon   default epsilon of the norms, if [model] has none
    gate      activation of a gated MLP (SwiGLU or GeGLU), or None for GELU
    causal    True if a token attends only to earlier tokens and its target is the next token;
              False if the targets are masked tokens
    rotary    True for rotary positions, False for a table of positions in the embedding
    biased    the linear layers of a block that have a bias
    segments  number of rows of the table of segment embeddings; all tokens are in segment 0
    unused_positions number of rows of the position table before that of the first token
    parallel  True if attention and MLP of a block have the same input
    scales_embedding True if token embeddings are multiplied by the square root of `hidden`
    query_norm type of the normalization of q and k: (mesh, parameters, spec, name), or None
    first     the embedding, with the token table: (mesh, parameters, spec, table)
    last      the head, with the loss: (mesh, parameters, spec, table)
    head      products of the head: (sizes) -> WeightProducts
    vectors   number of elements of embedding and head other than products and the tables of tokens
              and positions: (sizes)
    """

    kind: str
    keys: frozenset[str]
    sizes: Callable
    norm: type[Any]
    connection: type[Any]
    epsilon: float
    gate: Callable | None
    causal: bool
    rotary: bool
    biased: frozenset[str]
    first: type
    last: type
    head: Callable
    vectors: Callable
    query_norm: type[Any] | None = None
    segments: int = 0
    unused_positions: int = 0
    scales_embedding: bool = False
    parallel: bool = False

    @property
    def gated(self) -> bool:
        """True if the MLP has a gate, and thus two up projections."""
        return self.gate is not None

    def products(self, sizes: ModelSizes, mixes: bool) -> list[WeightProduct]:
        """Return the products of a block, or of one with a mixture of experts if `mixes` is True.

        The products are in the order of the forward pass.
        """
        hidden, form = sizes.hidden, sizes.experts
        qkv = WeightProduct("qkv", hidden, sizes.qkv)
        attention = [qkv, WeightProduct("proj", sizes.attended, hidden, turned=True)]
        if not (mixes and form):
            return attention + self._mlp(sizes)
        slots = form.slots_of_token(sizes.sequence)
        routed: Any = {"rows": form.top_k, "experts": form.count, "slots": slots}
        router = WeightProduct("router", hidden, form.count, by_rows=True)
        experts = [router, *self._mlp(sizes, "experts.", **routed)]
        shared = self._mlp(sizes, "shared.", form.shared) if form.shared else []
        return attention + experts + shared

    def _mlp(
        self, sizes: ModelSizes, name: str = "", wide: int = 1, **routed: Any
    ) -> list[WeightProduct]:
        hidden, ffn = sizes.hidden, wide * sizes.ffn
        return [
            WeightProduct(f"{name}up", hidden, (1 + self.gated) * ffn, **routed),
            WeightProduct(f"{name}down", ffn, hidden, turned=True, **routed),
        ]

    def attention(self, sizes: ModelSizes) -> float:
        """Return the forward FLOPs of core attention per token, on average over the blocks.

        Each head needs 2 T D for q k^T, and as many for p v, including masked scores. With a
        window, it needs 2 D per token in the window instead.
        """
        seen = sum(count * (window or sizes.sequence) for window, count in sizes.windows().items())
        return 4 * seen * sizes.attended / sizes.layers

    def kept(self, sizes: ModelSizes, recompute: _Recompute, chunked: bool, mixes: bool) -> float:
        """Return the number of elements that a block saves per token, excluding dropout masks.

        The block saves the inputs of the norms, of the QKV, output, up and down projections and of
        the activation function, as well as q, k and v (Korthikanti et al. 2022, section 4).
        Attention saves its probabilities or, if `chunked`, one log-sum-exp per row and head.

        A mixture of experts saves, for every expert slot, including empty slots, the inputs of the
        up projection, the activation and the down projection, and the output. Each shared expert
        saves as many elements as an MLP. The data saved by the router is negligible.

        If `recompute` contains "layernorm", the block does not save the norm outputs that its QKV
        and up projections read; with "mlp_act", it does not save the output of the activation, and
        with "mlp", neither the input nor the output of the activation.
        """
        modules = recompute_of(recompute)
        if "full" in modules:
            return sizes.hidden
        mlp: float = (2 + self.gated - ("mlp_act" in modules)) * sizes.ffn
        mlp *= "mlp" not in modules
        if mixes and (form := sizes.experts):
            slots = form.slots_of_token(sizes.sequence)
            mlp = form.shared * mlp + slots * (2 * sizes.hidden + mlp)
        # The norms of parallel branches have the same input, which is saved once.
        norms = 2 * (1 + self.connection.NORMS)
        norms -= (self.connection.RECOMPUTED + self.parallel) * ("layernorm" in modules)
        saved = norms * sizes.hidden + sizes.attended + sizes.qkv + mlp
        if self.query_norm:  # the normalized q and k
            saved += (sizes.heads + sizes.kv_heads) * sizes.head_dim
        if chunked:
            return saved + sizes.heads
        return saved + (0 if "core_attn" in modules else sizes.heads * sizes.sequence)

    def flops(self, sizes: ModelSizes) -> float:
        """Return the forward FLOPs per token of matrix products and attention.

        The forward pass has one third of the FLOPs of a step without recomputation. Only the
        experts to which a token is routed are counted; empty slots are not counted.
        """
        blocks = sum(count * product.flops for count, product in self.block_products(sizes))
        head = sum(product.flops for product in self.head(sizes))
        return blocks + sizes.layers * self.attention(sizes) + head

    def block_products(self, sizes: ModelSizes) -> list[tuple[int, WeightProduct]]:
        """Return the matrix products of all blocks as pairs (number of blocks, `WeightProduct`).

        Blocks with and without a mixture of experts are listed separately.
        """
        return [
            (count, product)
            for mixes, count in sizes.blocks().items()
            if count
            for product in self.products(sizes, mixes)
        ]

    def blocks_kept(self, sizes: ModelSizes, recompute: _Recompute, chunked: bool) -> float:
        """Return the number of elements that all blocks together save per token."""
        if all(isinstance(each, str) for each in recompute):
            how = recompute_of(recompute)
            counts = {(how, mixes): count for mixes, count in sizes.blocks().items()}
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
    """Complete specification of a model, from which its layers are built.

    `splits` maps each kind of layer to the `Split` that shards its matrix products.  `keep` names
    the operands (x, w) saved for the backward pass, `seed` is the random seed for dropout,
    `recompute` selects activation checkpointing, and `context` is the sharding of sequences (none
    by default).  `chunked` selects chunked attention.  If matrix products use float8, `scales` is
    the region that shares a scale: "block" or "tensor".
    `chunks` is the number of chunks of the products in blocks.  `prefetch` overlaps the
    communication of weights with the products of the same block.  `reduced` is the type in which
    the data axes reduce gradients of matrices in the backward pass (`sharded_matmul`).
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
    chunks: int = 1
    prefetch: bool = False
    reduced: str | None = None

    def __post_init__(self) -> None:
        if self.context is WHOLE:
            object.__setattr__(self, "context", Context(self.sizes.sequence))

    def of_layer(self, layer: int) -> ModelSpec:
        """Return the specification with the rotary embedding of block `layer`."""
        sizes = replace(self.sizes, rotation=self.sizes.rotation_of(layer))
        return replace(self, sizes=sizes)

    @property
    def product_settings(self) -> dict[str, Any]:
        """Keyword arguments of `hpc3d.tensor.chunked.chunked_matmul` for the products of blocks.

        A block has the same settings for all of its products.
        """
        return {name: getattr(self, name) for name in ("chunks", "keep", "scales", "reduced")}
