"""Frozen dataclasses of an input file, with one dataclass per section.

config/load.py creates the dataclasses from an input file, and config/resolve.py validates them.
The string below a key is its description, which `hpc3d train --help` prints. The dataclasses are
not pydantic models, so that they can be broadcast to ranks that do not import pydantic.

The default of a new key must preserve the previous behavior, because the stored configurations of
older runs do not contain the key.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cache, cached_property
from itertools import accumulate, pairwise
from math import gcd, inf, lcm, prod
from typing import Annotated, Literal

from hpc3d.comm.grid import AXES, Grid
from hpc3d.comm.mesh import COPIES, DATA
from hpc3d.config.constraints import AtLeast, AtMost, LessThan, MoreThan, ValidFor
from hpc3d.config.limits import INT32, MOST_LAYERS, MOST_PASSES, MOST_RANKS
from hpc3d.model.context import Context
from hpc3d.model.families import FAMILIES, kinds_with
from hpc3d.tensor.split import PUBLISHED, SCHEMES, Split

_LONG = 1024  # minimum sequence length in tokens for which chunked attention is faster in NumPy
BUCKET_MB = 25.0  # default size of a gradient bucket if the latency of collectives is unknown
STRICT = {"extra": "forbid"}
OPTIMIZER_KEYS = "beta1", "beta2", "epsilon"
CONSTANTS: dict[str, dict[str, float]] = {  # optimizer -> default hyperparameters
    "adamw": {"beta1": 0.9, "beta2": 0.95, "epsilon": 1e-8},
    "adamw-8bit": {"beta1": 0.9, "beta2": 0.95, "epsilon": 1e-8},
    "adafactor": {},
    "lion": {"beta1": 0.9, "beta2": 0.99},
    "muon": {"beta1": 0.95, "beta2": 0.95, "epsilon": 1e-8},
    "sgd": {},
}
_CAUSAL = tuple(kind for kind, family in FAMILIES.items() if family.causal)


def _of_kinds(key: str) -> ValidFor:
    """Return the constraint that only the model families with a key accept it."""
    return ValidFor("model.kind", *kinds_with(key))


_OF_MIXTURES = _of_kinds("experts"), ValidFor("model.experts")


def _with(constant: str) -> tuple[str, ...]:
    return tuple(name for name, constants in CONSTANTS.items() if constant in constants)


@dataclass(frozen=True)
class MeshConfig:
    """Sizes of the mesh axes. Their product is the number of ranks."""

    __pydantic_config__ = STRICT
    p: Annotated[int, AtLeast(1), AtMost(1024)] = 1
    """Pipeline parallelism: number of pipeline stages."""
    d: Annotated[int, AtLeast(1), AtMost(MOST_RANKS)] = 1
    """Data parallelism: number of model replicas, each with its share of the batch."""
    c: Annotated[int, AtLeast(1), AtMost(MOST_RANKS)] = 1
    """Context parallelism: number of ranks over which the tokens of each sequence are sharded."""
    e: Annotated[int, AtLeast(1), AtMost(MOST_RANKS), ValidFor("model.experts")] = 1
    """Expert parallelism: number of ranks over which the experts are distributed. Each rank along
    this axis also processes its own share of the batch, as along the data-parallel axis d."""
    x: Annotated[int | None, AtLeast(1), AtMost(MOST_RANKS)] = None
    """Tensor parallelism: number of ranks along the first tensor axis, x. Default: if x, y and z
    are all unset, the three sizes that minimize communication; otherwise 1."""
    y: Annotated[int | None, AtLeast(1), AtMost(MOST_RANKS)] = None
    """Tensor parallelism: number of ranks along the second tensor axis, y. Default: see x."""
    z: Annotated[int | None, AtLeast(1), AtMost(MOST_RANKS)] = None
    """Tensor parallelism: number of ranks along the third tensor axis, z. Default: see x."""
    order: str = " ".join(AXES)
    """Order of the mesh axes in the numbering of ranks, from the outermost to the innermost.
    Consecutive ranks are neighbors along the innermost axis."""
    transport: Literal["auto", "mpi", "nccl", "host-staged"] = "auto"
    """Transport between ranks. auto uses shared memory within a node, or NCCL if each rank has a
    GPU. Between hosts, auto uses MPI's collectives or, if no host has a network with remote memory
    access, messages between all pairs of ranks (docs/hosts.md). mpi uses only MPI, except for sums
    of 16-bit floats. nccl and host-staged (copies through host memory) require GPUs."""

    def sizes(self, shard: int = 0) -> dict[str, int]:
        """Return a dict from each mesh axis to its number of ranks, outermost axis first.

        With hybrid sharding or local updates, `shard` is the number of replicas per group. Axis d
        is then split into the axis COPIES, along which the groups are numbered, and the d axis of
        a group.
        """
        return dict(_sizes_of(self, shard))

    def replicas(self) -> int:
        """Return the number of ranks that process different tokens with the same dense weights."""
        return self.d * self.c * self.e

    def tensor_ranks(self) -> int:
        """Return the number of ranks over which tensor parallelism shards a layer."""
        return (self.x or 1) * (self.y or 1) * (self.z or 1)

    def grid(self, shard: int = 0) -> Grid:
        """Return the `Grid` of ranks with these sizes; `shard` is as in `sizes`."""
        return _grid_of(self, shard)


@cache
def _sizes_of(mesh: MeshConfig, shard: int) -> dict[str, int]:
    sizes = {}
    for axis in mesh.order.split():
        size = getattr(mesh, axis) or 1
        if axis == DATA and shard not in (0, size):
            sizes[COPIES], size = size // shard, shard
        sizes[axis] = size
    return sizes


@cache
def _grid_of(mesh: MeshConfig, shard: int) -> Grid:
    return Grid(mesh.sizes(shard))


@dataclass(frozen=True)
class ParallelConfig:
    """Parallelization: algorithms, communication, saved activations and recomputation."""

    __pydantic_config__ = STRICT
    scheme: Literal[PUBLISHED] = "3d"
    """Tensor-parallel scheme. It determines which mesh axes shard each dimension (m, n, k) of a
    matrix product, and how the blocks are stored (docs/parallelism.md). 1d-sequence adds sequence
    parallelism."""
    split: dict[str, str] | None = field(default=None, hash=False)
    """Custom tensor-parallel scheme: the mesh axes that shard the dimensions of the GEMM [m, k] x
    [k, n], such as { m = "x", n = "y", k = "z" }. A matrix that lacks a dimension, as the weights
    [k, n] lack m, is sharded by rows along the axes of this dimension. Optional keys list axes
    along which it is instead replicated (replicate) or stored by a single rank (own). The optional
    key panels names an axis for SUMMA (docs/parallelism.md). Default: the axes given by scheme."""
    keep_gathered: bool = True
    """Save gathered operands for the backward pass. If false, the backward pass re-gathers
    them."""
    zero: Literal[0, 1, 2, 3] = 0
    """ZeRO stage over the data-parallel ranks: 1 shards the optimizer state, 2 also the
    gradients, 3 also the parameters (FSDP)."""
    shard: Annotated[
        int,
        AtLeast(0),
        AtMost(MOST_RANKS),
        ValidFor("parallel.zero", 1, 2, 3),
        ValidFor("parallel.compression", "none"),
    ] = 0
    """Hybrid sharding (HSDP): ZeRO shards over groups of this many replicas along d, and gradients
    are also all-reduced between the groups. It must divide mesh.d. 0 shards over all replicas."""
    local_steps: Annotated[int, AtLeast(0), AtMost(INT32), ValidFor("torch.factory", None)] = 0
    """Local updates: number of steps that each worker trains on its own before the workers average
    their parameters (local SGD, DiLoCo). A worker is a group of parallel.shard replicas or, if
    this key is unset, one replica. 0 reduces the gradients of all replicas in every step."""
    outer_learning_rate: Annotated[
        float, MoreThan(0), LessThan(inf), ValidFor("parallel.local_steps")
    ] = 1.0
    """Learning rate of the outer optimizer, which moves the agreed parameters towards the mean of
    the workers. With 1 and without momentum, the workers continue from their mean. DiLoCo uses
    0.7."""
    outer_momentum: Annotated[float, AtLeast(0), LessThan(1), ValidFor("parallel.local_steps")] = (
        0.0
    )
    """Nesterov momentum of the outer optimizer. DiLoCo uses 0.9."""
    sync: Annotated[Literal["blocking", "stale"], ValidFor("parallel.local_steps")] = "blocking"
    """How the workers synchronize. With blocking, they wait until an agreement completes. With
    stale, an agreement is applied local_steps steps after it starts, and its communication
    overlaps with these steps."""
    bucket_mb: Annotated[float | None, AtLeast(0), LessThan(inf)] = None
    """Size of a gradient bucket in MB. One collective reduces each bucket along d. Default: 25, or
    more if latency accounts for more than 40 % of the predicted time of a collective of 25 MB
    (docs/data-parallelism.md). With 0, each parameter is reduced separately."""
    reduce_dtype: Literal["float16", "bfloat16", "float32"] | None = None
    """Data type in which gradients are sent along d, c and e. They are accumulated in float32.
    Default: the data type of the gradients. With ZeRO 2 and 3, the default for matrices is
    train.dtype."""
    overlap: bool = True
    """Overlap the gradient all-reduce along d with the backward pass."""
    prefetch: bool = False
    """Overlap the communication of weights with the matrix products of the same block: gather the
    weights of the next product, and reduce the weight gradient of the previous one, during the
    current product. With ZeRO, the all-gather of the updated values overlaps with the next forward
    pass."""
    overlap_experts: bool = False
    """Overlap the all-to-alls of experts in the forward pass of one microbatch with the backward
    pass of another one, and vice versa (DualPipe). Requires the schedule dualpipe-v."""
    chunked_products: Annotated[
        int, AtLeast(1), AtMost(64), ValidFor("train.product_dtype", None)
    ] = 1
    """Number of chunks of each matrix product in a block. The activations of one chunk are
    gathered or reduced while another chunk is computed."""
    compression: Literal["none", "powersgd", "top-k"] = "none"
    """Gradient compression for matrices along d, c and e: powersgd sends low-rank factors, top-k
    the largest elements. The compression error is added to the next gradient (error feedback)."""
    compression_rank: Annotated[
        int, AtLeast(1), AtMost(2**20), ValidFor("parallel.compression", "powersgd")
    ] = 4
    """Rank of the low-rank factors that powersgd sends."""
    compression_share: Annotated[
        float, MoreThan(0), AtMost(1), ValidFor("parallel.compression", "top-k")
    ] = 0.01
    """Fraction of the elements of a gradient matrix that top-k sends."""
    microbatches: Annotated[int, AtLeast(1), AtMost(MOST_PASSES)] = 1
    """Number of microbatches per step (gradient accumulation)."""
    chunks: Annotated[int | None, AtLeast(1), AtMost(MOST_LAYERS)] = None
    """Number of model chunks (virtual stages) per pipeline stage. Default: determined by the
    schedule."""
    layers_per_stage: tuple[int, ...] | None = None
    """Number of layers in each model chunk, in model order, such as [3, 2, 2, 0]. Default: the
    layers are distributed evenly, with at least one layer per chunk."""
    context: Literal["ring", "all-to-all", "both"] = "ring"
    """Context-parallel algorithm: ring attention, all-to-all over attention heads (Ulysses), or
    both, that is, an all-to-all in groups of neighboring ranks and a ring between these groups."""
    ulysses: Annotated[
        int, AtLeast(1), AtMost(MOST_RANKS), ValidFor("parallel.context", "both")
    ] = 1
    """Number of ranks in each all-to-all group along c, used only with context = "both"."""
    attention: Literal["full", "chunked"] | None = None
    """full stores all T x T attention probabilities. chunked stores only one log-sum-exp per row,
    so that memory is linear in the sequence length T. Default: chunked with ring attention, and on
    CPUs with float32 or float64 if T is at least 1024; otherwise full."""
    recompute: (
        Literal["none", "selective", "full"]
        | tuple[int, ...]
        | tuple[Literal["core_attn", "layernorm", "mlp_act", "mlp"], ...]
    ) = "none"
    """Activation checkpointing. In the backward pass, full recomputes all Transformer blocks, and
    a list such as [0, 1] the blocks with these zero-based indices. A list such as ["layernorm",
    "mlp"] recomputes modules of all blocks. The modules are core_attn (attention scores and
    softmax), layernorm (outputs of the norms), mlp_act (output of the activation function of the
    MLP) and mlp (also the outputs of the up and gate projections). The value selective is short
    for ["core_attn"]."""
    keep_dtype: Literal["bfloat16", "int8", "float8"] | None = None
    """Data type of saved activations. The backward pass uses the rounded values. int8 and float8
    (e4m3) have one scale per row. Default: train.dtype."""
    offload: tuple[Literal["optimizer", "activations", "parameters"], ...] = ()
    """Data to offload: optimizer states, saved activations, or the weights of Transformer blocks
    while they are not in use. Example: ["optimizer"]. On CPUs, the data is stored in files in
    TMPDIR; on GPUs, in host memory."""
    schedule: str | None = None
    """Pipeline schedule: {schedules} or csv:FILE. Default: 1f1b, or none if there is one stage."""

    @property
    def bucket_bytes(self) -> float:
        """Maximum size of a gradient bucket in bytes."""
        return 1e6 * (BUCKET_MB if self.bucket_mb is None else self.bucket_mb)

    @property
    def group(self) -> int:
        """Number of replicas along d that reduce their gradients in every step; 0 for all."""
        return self.shard or (1 if self.local_steps else 0)

    @property
    def sharding(self) -> str:
        """Text for messages: the ZeRO stage and, with hybrid sharding, the size of a group."""
        return f"ZeRO {self.zero}" + (f" in groups of {self.shard} replicas" if self.shard else "")

    @property
    def way(self) -> str:
        """Text for messages: "scheme NAME", or "parallel.split" if this key is set."""
        return f"scheme {self.scheme}" if self.split is None else "parallel.split"


@dataclass(frozen=True)
class ModelConfig:
    """Architecture of the Transformer."""

    __pydantic_config__ = STRICT
    kind: Literal[tuple(FAMILIES)] = "gpt2"
    """Model family."""
    layers: Annotated[int, AtLeast(1), AtMost(MOST_LAYERS)] = 2
    """Number of Transformer blocks."""
    hidden: Annotated[int, AtLeast(1), AtMost(2**20)] = 384
    """Hidden size. It must be a multiple of heads, unless head_dim is set."""
    heads: Annotated[int, AtLeast(1), AtMost(2**20)] = 64
    """Number of attention heads."""
    sequence: Annotated[int, AtLeast(1), AtMost(2**27)] = 64
    """Sequence length in tokens."""
    vocabulary: Annotated[int | None, AtLeast(1), AtMost(2**27)] = None
    """Vocabulary size. Default: the vocabulary size of the tokenizer."""
    tied: bool = True
    """Tie the token embedding to the output projection."""
    kv_heads: Annotated[int | None, AtLeast(1), AtMost(2**20), _of_kinds("kv_heads")] = None
    """Number of KV heads (grouped-query attention). Each KV head is shared by heads / kv_heads
    query heads. Default: heads."""
    head_dim: Annotated[int | None, AtLeast(1), AtMost(2**20), _of_kinds("head_dim")] = None
    """Number of features of an attention head. Default: hidden / heads."""
    ffn: Annotated[int | None, AtLeast(1), AtMost(2**22), _of_kinds("ffn")] = None
    """Intermediate size of the MLP (SwiGLU in families with a gate). Default: 4 x hidden."""
    norm_epsilon: Annotated[float | None, AtLeast(0), LessThan(1), _of_kinds("norm_epsilon")] = (
        None
    )
    """Epsilon of the normalization layers. Default: 1e-12 for bert and roberta, 1e-6 for gemma,
    gemma2 and gemma3_text, otherwise 1e-5."""
    attention_bias: Annotated[bool, _of_kinds("attention_bias")] = False
    """Add biases to the q, k, v and output projections of attention. The kinds gpt2, gpt_neox,
    bert and roberta always have these biases, and qwen2 always has those of q, k and v."""
    mlp_bias: Annotated[bool, _of_kinds("mlp_bias")] = False
    """Add biases to the linear layers of the MLP. The kinds gpt2, gpt_neox, bert and roberta
    always have these biases."""
    rope_theta: Annotated[float, AtLeast(1), LessThan(inf), _of_kinds("rope_theta")] = 10000.0
    """Base (theta) of the rotary position embedding (RoPE)."""
    rope_window_theta: Annotated[
        float, AtLeast(1), LessThan(inf), _of_kinds("rope_window_theta")
    ] = 10000.0
    """Base (theta) of RoPE in blocks with a sliding window, to which rope_scaling does not apply.
"""
    rope_fraction: Annotated[float, MoreThan(0), AtMost(1), _of_kinds("rope_fraction")] = 1.0
    """Fraction of the features of an attention head that RoPE rotates (partial rotary factor)."""
    rope_scaling: Annotated[
        dict[str, float | str | tuple[float, ...]] | None, _of_kinds("rope_scaling")
    ] = field(default=None, hash=False)
    """RoPE scaling for long sequences. Its type is linear, dynamic, yarn, longrope or llama3
    (default), as rope_type in Hugging Face configurations. The other parameters are the scaling
    factor, the original context length in tokens, and those of the type (docs/models.md). Example:
    { type = "llama3", factor = 8, low = 1, high = 4, original = 8192 }. Default: none."""
    query_scalar: Annotated[int | None, AtLeast(1), AtMost(2**20), _of_kinds("query_scalar")] = (
        None
    )
    """Attention scores are divided by the square root of this number. Default: head_dim."""
    score_cap: Annotated[float, AtLeast(0), LessThan(inf), _of_kinds("score_cap")] = 0.0
    """Soft cap of attention scores: a score s is replaced with cap tanh(s / cap). Gemma 2 uses 50.
    0 disables the cap."""
    logit_cap: Annotated[float, AtLeast(0), LessThan(inf), _of_kinds("logit_cap")] = 0.0
    """Soft cap of the logits: a logit x is replaced with cap tanh(x / cap). Gemma 2 uses 30. 0
    disables the cap."""
    gelu: Annotated[Literal["tanh", "exact"], _of_kinds("gelu")] = "tanh"
    """GELU with the tanh approximation, or the exact GELU with the error function. On CPUs, exact
    requires the optional dependency hpc3d[exact]."""
    padding: Annotated[int | None, AtLeast(0), AtMost(2**27), _of_kinds("padding")] = None
    """ID of the padding token. No token attends to padding tokens, and they are never prediction
    targets. Default: no padding."""
    window: Annotated[int, AtLeast(0), AtMost(2**27), ValidFor("model.kind", *_CAUSAL)] = 0
    """Sliding-window attention: number of tokens that a token attends to, itself included. 0
    disables the window: a token attends to all earlier tokens."""
    global_every: Annotated[int, AtLeast(0), AtMost(MOST_LAYERS), ValidFor("model.window")] = 0
    """Interval, in blocks, between blocks without a window: 2 in Gemma 2, 6 in Gemma 3. In every
    group of global_every blocks, the last block attends to all earlier tokens. 0 gives every block
    the window, as in Mistral."""
    dropout: Annotated[float, AtLeast(0), LessThan(1)] = 0.0
    """Dropout probability in training. Dropout is applied to the embeddings, the attention
    probabilities, and the outputs of attention and MLP before the residual addition. Evaluations
    and generated texts use no dropout."""
    experts: Annotated[int, AtLeast(0), AtMost(2**20), _of_kinds("experts")] = 0
    """Number of experts in each mixture-of-experts layer, which replaces the MLP. 0 disables
    mixture of experts."""
    top_k: Annotated[int, AtLeast(1), AtMost(2**10), *_OF_MIXTURES] = 1
    """Number of experts that the router selects for each token: 1 in Switch, 2 in GShard and
    Mixtral."""
    capacity: Annotated[float, AtLeast(0), LessThan(inf), *_OF_MIXTURES] = 1.25
    """Capacity factor: number of token slots per expert, relative to top_k x tokens / experts. The
    tokens are those of a sequence or, if sequences are sharded over ranks, those of a rank in a
    sequence. Tokens beyond the capacity are dropped. With 0, no token is dropped, and the number
    of slots depends on the largest number of tokens that are routed to one expert."""
    moe_every: Annotated[int, AtLeast(1), AtMost(MOST_LAYERS), *_OF_MIXTURES] = 1
    """Interval, in blocks, between mixture-of-experts layers. In every group of moe_every blocks,
    the last block has a mixture-of-experts layer, and the others have an MLP."""
    shared_experts: Annotated[int, AtLeast(0), AtMost(2**10), *_OF_MIXTURES] = 0
    """Number of shared experts, which process all tokens. Together they form one MLP with
    shared_experts times the width of an expert."""
    balance_loss: Annotated[float, AtLeast(0), LessThan(inf), *_OF_MIXTURES] = 0.01
    """Weight of the load-balancing loss. 0 disables the loss."""
    z_loss: Annotated[float, AtLeast(0), LessThan(inf), *_OF_MIXTURES] = 0.001
    """Weight of the router z-loss, the squared logsumexp of the router logits. 0 disables the
    loss."""
    balance_bias: Annotated[float, AtLeast(0), LessThan(1), *_OF_MIXTURES] = 0.0
    """Load balancing without an auxiliary loss: update rate of the router bias of each expert. In
    each step, the bias increases if the expert received less than its share of tokens, and
    decreases if it received more. 0 disables the bias."""

    @property
    def head_width(self) -> int:
        """Number of features of an attention head: `head_dim`, or hidden / heads."""
        return self.head_dim or self.hidden // self.heads


@dataclass(frozen=True)
class DataConfig:
    """Training and validation text."""

    __pydantic_config__ = STRICT
    path: str | tuple[str, ...] = "inputs/corpus"
    """Training text: a text file, a folder of *.txt files, or a token file written by `hpc3d
    prepare`. A list of them is a mixture, whose parts must have the same tokenizer."""
    weights: tuple[float, ...] | None = None
    """Weights of a mixture, one positive number per entry of path. [2, 1] takes 2 of every 3
    sequences from the first entry, and [0.7, 0.3] takes 7 of every 10. Default: all 1."""
    tokenizer: Literal["byte", "bpe"] | None = None
    """byte has one token per byte value, 256 in total. bpe is any other tokenizer, which a token
    file contains. Default: the tokenizer of the token file, or byte for text files."""
    validation: Annotated[float | str | tuple[str, ...] | None, MoreThan(0), LessThan(1)] = None
    """Validation text for train.eval_every: the fraction of the training text to hold out at its
    end, such as 0.05, or a separate text in any form allowed for path. A list of separate texts
    gives one loss per text and their mean. Default: none."""
    shuffle: Literal["sequences", "documents"] = "sequences"
    """Random order in each epoch. With sequences, the sequences of each text are shuffled. With
    documents, the documents are shuffled first, so each epoch packs other documents into a
    sequence."""
    boundaries: Annotated[bool, ValidFor("model.kind", *_CAUSAL)] = False
    """Separate documents packed into one sequence: tokens attend only to tokens of the same
    document, and learned positions restart with each document."""
    separator: Annotated[
        int | None, AtLeast(0), AtMost(2**27), ValidFor("data.boundaries", True)
    ] = None
    """ID of the token that ends a document. Default: the end-of-document token of the
    tokenizer."""

    def paths(self) -> tuple[str, ...]:
        """Return the paths of the training text, one per part of a mixture."""
        return (self.path,) if isinstance(self.path, str) else self.path

    def ratio(self) -> list[int]:
        """Return the weights of the texts as the smallest integers with the same ratio.

        The conversion of decimal fractions is exact: [0.7, 0.3] becomes [7, 3].
        """
        parts = [Fraction(str(weight)) for weight in self.weights or [1] * len(self.paths())]
        divisor = gcd(*(part.numerator for part in parts))
        scale = Fraction(lcm(*(part.denominator for part in parts)), divisor)
        return [int(part * scale) for part in parts]

    def validation_texts(self) -> tuple[str, ...]:
        """Return the paths of the separate validation texts."""
        texts = self.validation or ()
        return () if isinstance(texts, float) else (texts,) if isinstance(texts, str) else texts

    def with_separator(self, end: int | None, vocabulary: int) -> DataConfig:
        """Return these keys with `separator` set if `boundaries` is true.

        `end` is the ID of the tokenizer's end-of-document token, or `None` if the tokenizer has
        none. Raises ValueError if the ID is unknown or not in the vocabulary.
        """
        data = self
        if data.boundaries and data.separator is None:
            if end is None:
                raise ValueError(
                    "data.boundaries = true: the tokenizer has no known end-of-document token; "
                    "set data.separator to its ID"
                )
            data = replace(data, separator=end)
        if data.separator is not None and data.separator >= vocabulary:
            raise ValueError(
                f"data.separator = {data.separator}: the tokenizer has no such token; use an ID "
                f"below {vocabulary}"
            )
        return data

    def document_end(self) -> int | None:
        """Return the ID of the token that ends a document, or `None` without boundaries.

        Predictions use 0 if the tokenizer is unknown, because they do not depend on token values.
        """
        return (self.separator or 0) if self.boundaries else None


@dataclass(frozen=True)
class TorchConfig:
    """Unmodified PyTorch module that replaces [model] and [data]. `hpc3d.partition run` trains the
    module according to its partition plan."""

    __pydantic_config__ = STRICT
    factory: str | None = None
    """MODULE:FACTORY, where FACTORY is a function that returns the module and its example inputs.
    Default: the model in [model]."""
    inputs: str | None = None
    """MODULE:FUNCTION, where FUNCTION returns the inputs of a step, given the step number.
    Default: the example inputs in every step."""
    validation: str | None = None
    """MODULE:FUNCTION, where FUNCTION returns the inputs of a batch for train.eval_every, given
    the number of the batch, from 0 to train.eval_batches - 1. Each batch has as many samples as a
    training step. Default: none."""
    verify: Literal["on", "forward", "off"] = "on"
    """Verify before the first step, on the samples of two microbatches, that the captured module
    computes the same loss and gradients as the module, and that the loss is a mean over samples.
    Set `forward` to compare only losses if the gradients do not fit in the memory of one rank.
    With `off`, rank 0 only compares the largest prefix of the module that fits in its memory, and
    a difference does not end the run."""


@dataclass(frozen=True)
class TrainConfig:
    """Training, optimizer and learning rate."""

    __pydantic_config__ = STRICT
    steps: Annotated[int, AtLeast(1), AtMost(INT32)] = 20
    """Number of training steps."""
    max_minutes: Annotated[float, AtLeast(0), LessThan(inf)] = 0.0
    """Time limit in minutes. The run saves a checkpoint and stops after the step in which the
    limit is reached. 0 sets no limit."""
    batch: Annotated[int, AtLeast(1), AtMost(2**20)] = 192
    """Global batch size in sequences, over all replicas and microbatches."""
    optimizer: Literal["adamw", "adamw-8bit", "adafactor", "lion", "muon", "sgd"] = "adamw"
    """Optimizer with decoupled weight decay. adamw-8bit stores both moments of matrices in 8 bits.
    adafactor stores only row and column means of the second moment, and no first moment. lion
    updates weights by the sign of the momentum. muon orthogonalizes the momentum of block
    matrices, and uses adamw for all other parameters."""
    orthogonalize: Annotated[
        Literal["in-turn", "sharded"], ValidFor("train.optimizer", "muon")
    ] = "in-turn"
    """muon: how to orthogonalize matrices that are sharded over several ranks. in-turn assigns
    complete matrices to the ranks round-robin. With sharded, the ranks that hold the blocks of
    a matrix orthogonalize it jointly, without gathering it."""
    beta1: Annotated[
        float | None, AtLeast(0), LessThan(1), ValidFor("train.optimizer", *_with("beta1"))
    ] = None
    """Decay rate of the first moment. Default: 0.95 for the matrices optimized by muon, otherwise
    0.9."""
    beta2: Annotated[
        float | None, AtLeast(0), LessThan(1), ValidFor("train.optimizer", *_with("beta2"))
    ] = None
    """Decay rate of the second moment; for lion, decay rate of the momentum stored for the next
    step. Default: 0.99 for lion, otherwise 0.95."""
    epsilon: Annotated[
        float | None, AtLeast(1e-30), LessThan(1), ValidFor("train.optimizer", *_with("epsilon"))
    ] = None
    """Constant added to the square root of the second moment. Default: 1e-8."""
    learning_rate: Annotated[float, AtLeast(0), LessThan(inf)] = 3e-3
    """Peak learning rate, reached at the end of the warmup."""
    warmup: Annotated[int, AtLeast(0), AtMost(INT32)] = 2
    """Number of steps of the linear learning-rate warmup."""
    min_learning_rate: Annotated[float | None, AtLeast(0)] = None
    """Final learning rate, reached at the end of the decay. Default: a tenth of learning_rate."""
    decay: Literal["cosine", "linear", "wsd", "wsd-linear", "constant"] = "cosine"
    """Learning-rate schedule after the warmup. wsd (warmup, stable, decay) stays at the peak until
    the cooldown, and then decays as 1 - sqrt(t), where t is the completed fraction of the
    cooldown; wsd-linear decays linearly during the cooldown; constant stays at the peak."""
    cooldown: Annotated[
        int | None, AtLeast(1), AtMost(INT32), ValidFor("train.decay", "wsd", "wsd-linear")
    ] = None
    """wsd, wsd-linear: length of the cooldown in steps. The cooldown ends at step decay_steps.
    Default: a fifth of decay_steps."""
    decay_steps: Annotated[int | None, AtLeast(1), AtMost(INT32)] = None
    """Number of steps, including the warmup, after which the learning rate reaches its final value
    and stays constant. Default: the number of steps of the initial run, even if the run is
    extended later."""
    weight_decay: Annotated[float, AtLeast(0), LessThan(inf)] = 0.1
    """Decoupled weight decay, applied to matrices only."""
    clip: Annotated[float, AtLeast(0), LessThan(inf)] = 1.0
    """Maximum global norm of the gradient (gradient clipping by global norm). 0 disables
    clipping."""
    dtype: Literal["float16", "bfloat16", "float32", "float64"] = "float32"
    """Data type of parameters and activations. Training in float16 or bfloat16 uses mixed
    precision: sums and master weights are float32, and float16 uses loss scaling."""
    product_dtype: Annotated[Literal["float8"] | None, ValidFor("torch.factory", None)] = None
    """Data type of GEMM operands in the layers. float8 means e4m3 for activations and weights, and
    e5m2 for gradients. GEMM results have the type train.dtype. Default: train.dtype."""
    product_scale: Annotated[
        Literal["block", "tensor"], ValidFor("train.product_dtype", "float8")
    ] = "block"
    """Granularity of the float8 scales: one per block (128 elements in a row of activations or
    gradients, or 128 x 128 weights), or one per tensor."""
    backend: Literal["numpy", "cupy"] = "numpy"
    """Array library: numpy computes on CPUs, cupy on GPUs."""
    eval_every: Annotated[int, AtLeast(0), AtMost(INT32)] = 0
    """Interval in steps between evaluations on data.validation or, for a PyTorch module, on
    torch.validation. The last step is also evaluated. 0 disables evaluation."""
    eval_batches: Annotated[int, AtLeast(0), AtMost(INT32)] = 16
    """Maximum number of batches per evaluation of a text, each with `batch` sequences. 0 evaluates
    the complete text, including an incomplete last sequence. For a PyTorch module, the number of
    batches, which must not be 0."""
    tf32: Annotated[
        bool, ValidFor("train.backend", "cupy"), ValidFor("train.dtype", "float32")
    ] = False
    """On GPUs, round the operands of float32 GEMMs to 10 mantissa bits (TF32)."""
    cuda_graph: Annotated[bool, ValidFor("train.backend", "cupy")] = False
    """On GPUs, launch the forward and backward passes of a training step as a single CUDA graph.
    If the graph cannot be captured, the log states the reason, and kernels are launched
    individually."""
    fused_gelu: Annotated[
        bool,
        ValidFor("train.backend", "cupy"),
        _of_kinds("gelu"),
        ValidFor("model.gelu", "tanh"),
        ValidFor("train.product_dtype", None),
    ] = False
    """On GPUs, fuse GELU into the GEMMs (cuBLASLt epilogues)."""

    def constants(self) -> dict[str, float]:
        """Return a dict of the optimizer's hyperparameters, with defaults for unset keys."""
        given = {key: getattr(self, key) for key in OPTIMIZER_KEYS}
        usual = CONSTANTS[self.optimizer]
        return {key: usual[key] if given[key] is None else given[key] for key in usual}

    def decaying(self) -> int:
        """Return the number of steps, including the warmup, after which the decay ends."""
        return self.decay_steps or max(self.steps, self.warmup)

    def falling(self) -> int:
        """Return the number of steps in which the learning rate decreases."""
        after = self.decaying() - self.warmup
        if self.decay not in ("wsd", "wsd-linear"):
            return after
        return min(after, self.cooldown or -(-self.decaying() // 5))

    def least_rate(self) -> float:
        """Return the final learning rate, which is reached at the end of the decay."""
        least = self.min_learning_rate
        return self.learning_rate / 10 if least is None else least

    def curve(self) -> tuple:
        """Return all values, including defaults, that determine the learning rate of each step."""
        rises = self.learning_rate, self.warmup, self.decay
        falls = self.least_rate(), self.decaying(), self.falling()
        return rises if self.decay == "constant" else (*rises, *falls)


@dataclass(frozen=True)
class CheckpointConfig:
    """Checkpointing of the training state."""

    __pydantic_config__ = STRICT
    every: Annotated[int, AtLeast(0), AtMost(INT32)] = 0
    """Interval in steps between checkpoints. The last step is also saved. With 0, a checkpoint is
    saved only if the run is asked to stop, and at the end of a resumed run."""
    keep: Annotated[int, AtLeast(1), AtMost(INT32)] = 2
    """Number of most recent checkpoints to keep."""
    keep_best: Annotated[bool, ValidFor("train.eval_every")] = False
    """Save a checkpoint after each evaluation with the lowest loss so far, and keep it in addition
    to the most recent ones."""


@dataclass(frozen=True)
class GuardConfig:
    """Detection of corrupted data, loss spikes and wrong layouts."""

    __pydantic_config__ = STRICT
    replicas_every: Annotated[int, AtLeast(0), AtMost(INT32)] = 100
    """Interval in steps between consistency checks of replicated parameters. 0 disables the
    checks."""
    abft_every: Annotated[
        int,
        AtLeast(0),
        AtMost(INT32),
        ValidFor("train.backend", "numpy"),
        ValidFor("train.dtype", "float32", "float64"),
        ValidFor("parallel.reduce_dtype", None, "float32"),
    ] = 0
    """Interval, in steps, at which checksums verify all matrix products and messages
    (algorithm-based fault tolerance, ABFT). 0 disables the checks."""
    loss_spike_sigma: Annotated[float, AtLeast(0), LessThan(inf)] = 6.0
    """Log a warning if the loss exceeds the mean of recent losses by more than this many standard
    deviations. 0 disables the warning."""
    layout: bool = True
    """Before the first step, prove that the layout reduces and gathers every value exactly once
    (hpc3d.predict.proof). The proof takes about 0.1 seconds on one rank."""


@dataclass(frozen=True)
class TraceConfig:
    """Recording of a performance trace."""

    __pydantic_config__ = STRICT
    enabled: bool = True
    """Record a trace of the run."""
    sync_every: Annotated[int, AtLeast(1), AtMost(INT32)] = 100
    """Interval in steps between clock synchronizations in a run on several hosts."""
    clock: Annotated[Literal["wall", "cpu"], ValidFor("train.backend", "numpy")] = "wall"
    """wall records wall-clock time. cpu records the CPU time of each rank, which measures the cost
    of an operation even if ranks outnumber cores."""
    nvtx: Annotated[bool, ValidFor("train.backend", "cupy")] = False
    """Annotate GPU kernels with NVTX ranges for NVIDIA's profilers."""


@dataclass(frozen=True)
class RunConfig:
    """Output, stop requests and monitoring."""

    __pydantic_config__ = STRICT
    out: str = "results"
    """Folder in which each run creates its own folder."""
    label: str | None = None
    """Name of the run in reports, tables and figures. Default: its layout. A study sets it to the
    labels of the point (docs/sweep.md)."""
    signal: Literal["USR1", "USR2"] = "USR1"
    """Signal that asks the run to save a checkpoint and stop, in addition to SIGTERM, SIGINT and
    SIGHUP."""
    watchdog_s: Annotated[float, AtLeast(0.1), LessThan(1e9)] = 300.0
    """Abort the run if it makes no progress for this many seconds."""
    trackers: tuple[str, ...] = ()
    """Experiment trackers that also receive the records of metrics.jsonl: tensorboard, mlflow,
    wandb, and the entry points hpc3d.trackers of other packages."""
    metrics_hook: str | None = None
    """Callback, given as MODULE:FUNCTION. Rank 0 calls the function with each record of
    metrics.jsonl as a dict. Default: none."""


@dataclass(frozen=True)
class Config:
    """Complete configuration of one run."""

    __pydantic_config__ = STRICT
    name: str = "gpt"
    """Prefix of the name of the run's folder. If it is unset, runs of models other than gpt2 use
    model.kind."""
    seed: Annotated[int, AtLeast(0), LessThan(2**64)] = 1234
    """Random seed for the initial weights, the dropout masks and the order of the training
    text."""
    mesh: MeshConfig = field(default_factory=MeshConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    torch: TorchConfig = field(default_factory=TorchConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    guard: GuardConfig = field(default_factory=GuardConfig)
    trace: TraceConfig = field(default_factory=TraceConfig)
    run: RunConfig = field(default_factory=RunConfig)

    def sizes(self) -> dict[str, int]:
        """Return a dict from each mesh axis to its number of ranks, outermost axis first.

        Hybrid sharding and local updates split axis d into two axes (`MeshConfig.sizes`).
        """
        return self.mesh.sizes(self.parallel.group)

    def grid(self) -> Grid:
        """Return the `Grid` of ranks with the sizes of `sizes`."""
        return self.mesh.grid(self.parallel.group)

    @cached_property
    def tensor_split(self) -> Split:
        """`Split` of the tensor-parallel scheme, without data axes."""
        letters = self.parallel.split
        return SCHEMES[self.parallel.scheme] if letters is None else Split(**letters)

    @cached_property
    def splits(self) -> Mapping[str, Split]:
        """Dict from layer kind to the `Split` of the first matrix product in such a layer.

        The kinds are `dense` (blocks, embedding and head) and `experts`. A split includes the data
        axes. Experts are sharded along axis e, so the split of `experts` does not contain e.
        With local updates, each worker has consecutive sequences of a microbatch, so that the
        result does not depend on the layout of a worker.
        """
        split, zero, sizes = self.tensor_split, self.parallel.zero, self.sizes()
        local = self.parallel.local_steps > 0
        split = split.over(COPIES, outermost=local) if COPIES in sizes else split
        split = split.over(DATA, zero) if sizes[DATA] > 1 else split
        dense = split.over("e", zero) if self.mesh.e > 1 else split
        splits = {"dense": dense, "experts": split}
        if self.mesh.c > 1:
            splits = {kind: each.over("c", zero, outermost=True) for kind, each in splits.items()}
        return splits

    @property
    def workers(self) -> int:
        """Number of workers with local updates; 1 if gradients are reduced over all replicas."""
        return self.mesh.d // self.parallel.group if self.parallel.local_steps else 1

    def keep(self) -> str:
        """Return the gathered GEMM operands to save for the backward pass: "xw", "x" or "" (none).

        The letters stand for the activations X and the weights W. The backward pass re-gathers
        operands that are not saved. ZeRO-3 always re-gathers W, because otherwise every microbatch
        in flight would save its own copy of W.
        """
        kept = "x" if self.parallel.zero == 3 and self.mesh.replicas() > 1 else "xw"
        return kept if self.parallel.keep_gathered else ""

    def context(self) -> Context:
        """Return the partition of sequences over the context axis."""
        parallel, c = self.parallel, self.mesh.c
        heads = {"ring": 1, "all-to-all": c, "both": parallel.ulysses}[parallel.context]
        return Context(self.model.sequence, c // heads, heads)

    def routing_group(self) -> int:
        """Return the number of tokens among which the slots of the experts are shared.

        A routing group is a sequence or, if a rank stores only parts of sequences, such a part.
        If the capacity is not limited, it consists of all tokens of a rank and microbatch.
        """
        sizes = self.sizes()
        ranks = prod(sizes[axis] for axis in self.splits["dense"].x[0])
        rows = self.train.batch * self.model.sequence // (self.parallel.microbatches * ranks)
        return gcd(rows, self.context().tokens) if self.model.capacity else rows

    def chunked(self) -> bool:
        """Return True if attention is computed in chunks along the sequence."""
        train, long = self.train, self.model.sequence >= _LONG
        on_cpus = train.backend == "numpy" and train.dtype in ("float32", "float64")
        asked = self.parallel.attention or ("chunked" if on_cpus and long else "full")
        return asked == "chunked" or self.context().rings > 1

    def layers(self) -> list[range]:
        """Return one range of layer indices per model chunk, in model order."""
        parts, layers = self.mesh.p * self.parallel.chunks, self.model.layers
        counts = self.parallel.layers_per_stage or [
            layers * (part + 1) // parts - layers * part // parts for part in range(parts)
        ]
        ends = [*accumulate(counts, initial=0)]
        return [range(first, stop) for first, stop in pairwise(ends)]
