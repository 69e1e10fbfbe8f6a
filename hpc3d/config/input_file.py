"""Input file as typed, frozen dataclasses.

config/load.py reads them, and config/rules.py validates them. The text below a key is its meaning,
which `hpc3d train --help` prints. The dataclasses are plain, so that they can be broadcast to
ranks that have no parser.

The default of a key is the behavior of runs before the key existed, because the configuration of
an older run, which lacks the key, is read with the default.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from itertools import accumulate, pairwise
from math import inf
from typing import Annotated, Literal

from hpc3d.comm.grid import AXES, Grid
from hpc3d.config.constraints import AtLeast, AtMost, LessThan, MoreThan, ValidFor
from hpc3d.config.limits import INT32, MOST_LAYERS, MOST_PASSES, MOST_RANKS
from hpc3d.model.context import Context
from hpc3d.model.families import FAMILIES
from hpc3d.tensor.split import SCHEMES, Split

_LONG = 1024  # shortest sequence for which chunked attention is not slower, in NumPy
STRICT = {"extra": "forbid"}
OPTIMIZER_KEYS = "beta1", "beta2", "epsilon"
CONSTANTS: dict[str, dict[str, float]] = {  # defaults of each optimizer
    "adamw": {"beta1": 0.9, "beta2": 0.95, "epsilon": 1e-8},
    "adamw-8bit": {"beta1": 0.9, "beta2": 0.95, "epsilon": 1e-8},
    "adafactor": {},
    "lion": {"beta1": 0.9, "beta2": 0.99},
    "muon": {"beta1": 0.95, "beta2": 0.95, "epsilon": 1e-8},
    "sgd": {},
}
_OF_MIXTURES = ValidFor("model.kind", "gpt2", "llama"), ValidFor("model.experts")


def _with(constant: str) -> tuple[str, ...]:
    """Return the optimizers that have a constant."""
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
    """Context parallelism: number of ranks that share the tokens of each sequence."""
    e: Annotated[int, AtLeast(1), AtMost(MOST_RANKS), ValidFor("model.experts")] = 1
    """Expert parallelism: number of ranks over which the experts are distributed. Each also
    processes its own share of the batch, as along d."""
    x: Annotated[int | None, AtLeast(1), AtMost(MOST_RANKS)] = None
    """Tensor parallelism, first axis. Default: the best cuboid if x, y and z are all absent,
    otherwise 1."""
    y: Annotated[int | None, AtLeast(1), AtMost(MOST_RANKS)] = None
    """Tensor parallelism, second axis. Default: as for x."""
    z: Annotated[int | None, AtLeast(1), AtMost(MOST_RANKS)] = None
    """Tensor parallelism, third axis. Default: as for x."""
    order: str = " ".join(AXES)
    """Axes from the outermost to the innermost. Neighboring ranks differ along the last axis."""
    transport: Literal["auto", "mpi", "nccl", "host-staged"] = "auto"
    """Transport between ranks. auto uses shared memory within a node, or NCCL if each rank has
    a GPU. mpi uses MPI only. nccl and host-staged (through host memory) are for GPUs."""

    def sizes(self) -> dict[str, int]:
        """Return a dict from axis to number of ranks, in rank order."""
        return {axis: getattr(self, axis) or 1 for axis in self.order.split()}

    def replicas(self) -> int:
        """Return the number of ranks that process different tokens with the same dense weights."""
        return self.d * self.c * self.e

    def grid(self) -> Grid:
        """Return the Grid of the ranks."""
        return grid_of(self)


@cache
def grid_of(mesh: MeshConfig) -> Grid:
    return Grid(mesh.sizes())


@dataclass(frozen=True)
class ParallelConfig:
    """Parallel algorithms, and what they store, send and recompute."""

    __pydantic_config__ = STRICT
    scheme: Literal["1d", "1d-sequence", "2d", "2d-summa", "2.5d", "3d", "3d-broadcast"] = "3d"
    """Tensor-parallel scheme: which mesh axis splits which loop of a product, and how blocks
    are stored (docs/parallelism.md). 1d-sequence adds sequence parallelism."""
    split: dict[str, str] | None = None
    """Custom scheme: the axes on the loops m, n and k, such as { m = "x", n = "y", k = "z" }, and
    in replicate, own and panels the axes with another storage (docs/parallelism.md). Default: the
    split of scheme."""
    keep_gathered: bool = True
    """Save gathered operands for the backward pass. If false, the backward pass re-gathers
    them."""
    zero: Literal[0, 1, 2, 3] = 0
    """ZeRO stage over the data-parallel ranks: 1 shards the optimizer state, 2 also the
    gradients, 3 also the parameters (FSDP)."""
    bucket_mb: Annotated[float, AtLeast(0), LessThan(inf)] = 25.0
    """Size in MB of a gradient bucket, which one collective reduces along d."""
    reduce_dtype: Annotated[
        Literal["float16", "bfloat16", "float32"] | None, ValidFor("parallel.zero", 0, 1)
    ] = None
    """Type in which gradients are sent along d, c and e. They are summed in float32. Default:
    the type of the gradient."""
    overlap: bool = True
    """Overlap the gradient all-reduce along d with the backward pass."""
    compression: Literal["none", "powersgd", "top-k"] = "none"
    """Gradient compression for matrices along d, c and e: powersgd sends low-rank factors,
    top-k the largest elements. The error is added to the next gradient (error feedback)."""
    compression_rank: Annotated[
        int, AtLeast(1), AtMost(2**20), ValidFor("parallel.compression", "powersgd")
    ] = 4
    """Rank of the factors of powersgd."""
    compression_share: Annotated[
        float, MoreThan(0), AtMost(1), ValidFor("parallel.compression", "top-k")
    ] = 0.01
    """Fraction of the elements of a matrix that top-k sends."""
    microbatches: Annotated[int, AtLeast(1), AtMost(MOST_PASSES)] = 1
    """Number of microbatches per step (gradient accumulation)."""
    chunks: Annotated[int | None, AtLeast(1), AtMost(MOST_LAYERS)] = None
    """Number of model chunks (virtual stages) per pipeline stage. Default: set by the schedule."""
    layers_per_stage: tuple[int, ...] | None = None
    """Number of layers of each model chunk, in model order, such as [3, 2, 2, 1]. Default:
    even."""
    context: Literal["ring", "all-to-all", "both"] = "ring"
    """Algorithm of context parallelism: ring attention, all-to-all of heads (Ulysses), or both:
    all-to-all among neighbors and a ring between these groups."""
    ulysses: Annotated[int, AtLeast(1), AtMost(MOST_RANKS)] = 1
    """Size of the all-to-all groups along c, with context = "both"."""
    attention: Literal["full", "chunked"] | None = None
    """full stores all T x T probabilities. chunked stores one sum per row, so memory is linear
    in T. Default: full, but chunked in ring attention and on CPUs from 1024 tokens in float32
    and float64."""
    recompute: Literal["none", "selective", "full"] | tuple[int, ...] = "none"
    """Activation checkpointing: selective recomputes the scores and the softmax of attention in
    the backward pass, full recomputes blocks, and a list such as [0, 1] recomputes the blocks
    with these numbers."""
    keep_dtype: Literal["bfloat16", "int8", "float8"] | None = None
    """Type of saved activations. The backward pass uses the rounded copies. int8 and float8
    (e4m3) have one scale per row. Default: train.dtype."""
    offload: tuple[Literal["optimizer", "activations", "parameters"], ...] = ()
    """Data to offload: optimizer states, saved activations, or the weights of blocks while they
    are not in use. Example: ["optimizer"]. CPUs offload to files in TMPDIR, GPUs to host
    memory."""
    schedule: str | None = None
    """Pipeline schedule: {schedules} or csv:FILE. Default: none on one stage, otherwise 1f1b."""

    @property
    def way(self) -> str:
        """Name of the setting that determines how matrix products are split, for messages."""
        return f"scheme {self.scheme}" if self.split is None else "parallel.split"


@dataclass(frozen=True)
class ModelConfig:
    """The Transformer."""

    __pydantic_config__ = STRICT
    kind: Literal[tuple(FAMILIES)] = "gpt2"
    """Model family."""
    layers: Annotated[int, AtLeast(1), AtMost(MOST_LAYERS)] = 2
    """Number of Transformer blocks."""
    hidden: Annotated[int, AtLeast(1), AtMost(2**20)] = 384
    """Hidden size, a multiple of heads."""
    heads: Annotated[int, AtLeast(1), AtMost(2**20)] = 64
    """Number of attention heads."""
    sequence: Annotated[int, AtLeast(1), AtMost(2**27)] = 64
    """Sequence length in tokens."""
    vocabulary: Annotated[int | None, AtLeast(1), AtMost(2**27)] = None
    """Vocabulary size. Default: that of the tokenizer."""
    tied: bool = True
    """Tie the token embedding to the output projection."""
    kv_heads: Annotated[
        int | None, AtLeast(1), AtMost(2**20), ValidFor("model.kind", "llama", "qwen2")
    ] = None
    """llama, qwen2: number of key and value heads (grouped-query attention). heads / kv_heads
    query heads share one. Default: heads."""
    ffn: Annotated[
        int | None, AtLeast(1), AtMost(2**22), ValidFor("model.kind", "llama", "qwen2", "bert")
    ] = None
    """llama, qwen2, bert: hidden size of the MLP (SwiGLU in llama and qwen2). Default: 4 x
    hidden."""
    norm_epsilon: Annotated[
        float | None, AtLeast(0), LessThan(1), ValidFor("model.kind", "llama", "qwen2", "bert")
    ] = None
    """llama, qwen2, bert: epsilon of the norms. Default: 1e-12 for bert, otherwise 1e-5."""
    rope_theta: Annotated[
        float, AtLeast(1), LessThan(inf), ValidFor("model.kind", "llama", "qwen2")
    ] = 10000.0
    """llama, qwen2: base of the rotary position embedding (RoPE)."""
    rope_scaling: Annotated[
        dict[str, float | str] | None, ValidFor("model.kind", "llama", "qwen2")
    ] = None
    """llama, qwen2: RoPE scaling for long sequences, rope_type "llama3" of published
    configurations, as { factor = 8, low = 1, high = 4, original = 8192 }. Default: none."""
    gelu: Annotated[Literal["tanh", "exact"], ValidFor("model.kind", "gpt2", "bert")] = "tanh"
    """GELU with the tanh approximation, or exact with the error function (on CPUs, exact needs
    the extra exact)."""
    padding: Annotated[int | None, AtLeast(0), AtMost(2**27), ValidFor("model.kind", "bert")] = (
        None
    )
    """bert: id of the padding token. No token attends to it, and it is never a target. Default:
    no padding."""
    dropout: Annotated[float, AtLeast(0), LessThan(1)] = 0.0
    """Dropout probability."""
    experts: Annotated[int, AtLeast(0), AtMost(2**20), ValidFor("model.kind", "gpt2", "llama")] = 0
    """gpt2, llama: number of experts, which replace the MLP (mixture of experts). 0 disables
    the mixture."""
    top_k: Annotated[int, AtLeast(1), AtMost(2**10), *_OF_MIXTURES] = 1
    """Number of experts per token, selected by the router: 1 in Switch, 2 in GShard and
    Mixtral."""
    capacity: Annotated[float, AtLeast(0), LessThan(inf), *_OF_MIXTURES] = 1.25
    """Capacity factor: slots of an expert per sequence, relative to top_k x sequence / experts.
    Tokens beyond the capacity are dropped. 0 drops no token."""
    moe_every: Annotated[int, AtLeast(1), AtMost(MOST_LAYERS), *_OF_MIXTURES] = 1
    """Interval between mixtures: the last of every moe_every blocks has one, the others an MLP."""
    shared_experts: Annotated[int, AtLeast(0), AtMost(2**10), *_OF_MIXTURES] = 0
    """Number of shared experts, which process all tokens. They form one MLP of shared_experts
    times the width."""
    balance_loss: Annotated[float, AtLeast(0), LessThan(inf), *_OF_MIXTURES] = 0.01
    """Weight of the load balancing loss. 0 disables it."""
    z_loss: Annotated[float, AtLeast(0), LessThan(inf), *_OF_MIXTURES] = 0.001
    """Weight of the router z-loss, the squared logsumexp of the router logits. 0 disables it."""
    balance_bias: Annotated[float, AtLeast(0), LessThan(1), *_OF_MIXTURES] = 0.0
    """Load balancing without a loss: change per step of the router bias of each expert, up if
    it received less than its share of tokens, down otherwise. 0 disables it."""


@dataclass(frozen=True)
class DataConfig:
    """Training and validation text."""

    __pydantic_config__ = STRICT
    path: str = "inputs/corpus"
    """A text file, a folder of *.txt files, or a token file of `hpc3d prepare`."""
    tokenizer: Literal["byte", "bpe"] | None = None
    """byte has 256 tokens. bpe is for a token file that was made with it. Default: that of the
    token file, or byte for text."""
    validation: Annotated[float | str | None, MoreThan(0), LessThan(1)] = None
    """Validation text (train.eval_every): the fraction of the text to hold out at its end, such
    as 0.05, or a text as in path. Default: none."""


@dataclass(frozen=True)
class TorchConfig:
    """An unmodified PyTorch module, given instead of [model] and [data]. `hpc3d.partition run`
    trains it according to its partition plan."""

    __pydantic_config__ = STRICT
    factory: str | None = None
    """MODULE:FACTORY, a function that returns the module and its example inputs. Default: the
    model of [model]."""
    inputs: str | None = None
    """MODULE:FUNCTION, which returns the inputs of a step by its number. Default: the example
    inputs in every step."""


@dataclass(frozen=True)
class TrainConfig:
    """Optimization."""

    __pydantic_config__ = STRICT
    steps: Annotated[int, AtLeast(1), AtMost(INT32)] = 20
    """Number of training steps."""
    max_minutes: Annotated[float, AtLeast(0), LessThan(inf)] = 0.0
    """Save and stop after the step in which this many minutes have passed. 0 sets no limit."""
    batch: Annotated[int, AtLeast(1), AtMost(2**20)] = 192
    """Global batch size in sequences, over all replicas and microbatches."""
    optimizer: Literal["adamw", "adamw-8bit", "adafactor", "lion", "muon", "sgd"] = "adamw"
    """Optimizer, with decoupled weight decay. adamw-8bit stores both moments of matrices in 8
    bits. adafactor stores row and column means of the second moment, and no first moment. lion
    steps by the sign of the momentum. muon orthogonalizes the momentum of block matrices, and
    uses adamw for the rest."""
    orthogonalize: Annotated[
        Literal["in-turn", "sharded"], ValidFor("train.optimizer", "muon")
    ] = "in-turn"
    """muon, for matrices sharded over several ranks: in-turn assigns full matrices round-robin
    to the ranks; sharded keeps every matrix sharded, and all ranks work on it."""
    beta1: Annotated[
        float | None, AtLeast(0), LessThan(1), ValidFor("train.optimizer", *_with("beta1"))
    ] = None
    """Decay rate of the first moment. Default: 0.9; for the matrices of muon, 0.95."""
    beta2: Annotated[
        float | None, AtLeast(0), LessThan(1), ValidFor("train.optimizer", *_with("beta2"))
    ] = None
    """Decay rate of the second moment. Default: 0.95. lion: decay rate of the momentum for the
    next step. Default: 0.99."""
    epsilon: Annotated[
        float | None, AtLeast(1e-30), LessThan(1), ValidFor("train.optimizer", *_with("epsilon"))
    ] = None
    """Term added to the root of the second moment. Default: 1e-8."""
    learning_rate: Annotated[float, AtLeast(0), LessThan(inf)] = 3e-3
    """Peak learning rate, at the end of the warmup."""
    warmup: Annotated[int, AtLeast(0), AtMost(INT32)] = 2
    """Number of steps of the linear learning-rate warmup."""
    min_learning_rate: Annotated[float | None, AtLeast(0)] = None
    """Final learning rate, at the end of the decay. Default: a tenth of learning_rate."""
    decay: Literal["cosine", "linear", "wsd", "wsd-linear", "constant"] = "cosine"
    """Learning-rate schedule after the warmup. wsd (warmup, stable, decay) stays at the peak
    until the cooldown, and then falls as 1 - sqrt; wsd-linear falls linearly; constant does not
    fall."""
    cooldown: Annotated[
        int | None, AtLeast(1), AtMost(INT32), ValidFor("train.decay", "wsd", "wsd-linear")
    ] = None
    """wsd, wsd-linear: number of steps of the cooldown, the last ones of decay_steps. Default:
    a fifth of decay_steps."""
    decay_steps: Annotated[int | None, AtLeast(1), AtMost(INT32)] = None
    """Number of steps until the learning rate has decayed; it then stays constant. Default: the
    steps of the initial run, even if the run is extended later."""
    weight_decay: Annotated[float, AtLeast(0), LessThan(inf)] = 0.1
    """Decoupled weight decay, applied to matrices only."""
    clip: Annotated[float, AtLeast(0), LessThan(inf)] = 1.0
    """Gradient clipping by global norm: the maximum norm. 0 disables it."""
    dtype: Literal["float16", "bfloat16", "float32", "float64"] = "float32"
    """Type of parameters and activations. The 16-bit types train in mixed precision: sums and
    master weights are float32, and float16 uses loss scaling."""
    product_dtype: Annotated[Literal["float8"] | None, ValidFor("torch.factory", None)] = None
    """Type of the operands of the products of layers: float8 is e4m3 for activations and
    weights, and e5m2 for gradients. Sums have the precision of train.dtype. Default:
    train.dtype."""
    product_scale: Annotated[
        Literal["block", "tensor"], ValidFor("train.product_dtype", "float8")
    ] = "block"
    """Scales of float8: one per block (128 elements of a row of activations and gradients, 128
    x 128 weights), or one per tensor."""
    backend: Literal["numpy", "cupy"] = "numpy"
    """numpy computes on CPUs, cupy on GPUs."""
    eval_every: Annotated[int, AtLeast(0), AtMost(INT32), ValidFor("torch.factory", None)] = 0
    """Interval in steps between evaluations on data.validation. The last step is also
    evaluated. 0 disables evaluation."""
    eval_batches: Annotated[int, AtLeast(0), AtMost(INT32)] = 16
    """Maximum number of batches per evaluation, each of `batch` sequences. 0 evaluates all
    batches of the text."""
    tf32: Annotated[
        bool, ValidFor("train.backend", "cupy"), ValidFor("train.dtype", "float32")
    ] = False
    """On GPUs, round the operands of float32 products to 10 mantissa bits (TF32)."""
    cuda_graph: Annotated[bool, ValidFor("train.backend", "cupy"), ValidFor("mesh.p", 1)] = False
    """On GPUs, launch each step as one CUDA graph."""
    fused_gelu: Annotated[
        bool,
        ValidFor("train.backend", "cupy"),
        ValidFor("model.kind", "gpt2", "bert"),
        ValidFor("model.gelu", "tanh"),
        ValidFor("train.product_dtype", None),
    ] = False
    """On GPUs, fuse GELU into the products (cuBLASLt epilogues)."""

    def constants(self) -> dict[str, float]:
        """Return the constants of the optimizer, with defaults for unset keys."""
        given = {key: getattr(self, key) for key in OPTIMIZER_KEYS}
        usual = CONSTANTS[self.optimizer]
        return {key: usual[key] if given[key] is None else given[key] for key in usual}

    def decaying(self) -> int:
        """Return the number of steps, including warm-up, until the learning rate has decayed."""
        return self.decay_steps or max(self.steps, self.warmup)

    def cools_down(self) -> bool:
        """Return True if the learning rate stays at its peak until a cooldown."""
        return self.decay in ("wsd", "wsd-linear")

    def falling(self) -> int:
        """Return the number of steps at the end of the decay in which the learning rate falls."""
        after = self.decaying() - self.warmup
        if not self.cools_down():
            return after
        return min(after, self.cooldown or -(-self.decaying() // 5))

    def least_rate(self) -> float:
        """Return the learning rate at the end of the decay."""
        least = self.min_learning_rate
        return self.learning_rate / 10 if least is None else least

    def curve(self) -> tuple:
        """Return the values that determine the learning rate of every step, including defaults."""
        rises = self.learning_rate, self.warmup, self.decay
        falls = self.least_rate(), self.decaying(), self.falling()
        return rises if self.decay == "constant" else (*rises, *falls)


@dataclass(frozen=True)
class CheckpointConfig:
    """Checkpoints."""

    __pydantic_config__ = STRICT
    every: Annotated[int, AtLeast(0), AtMost(INT32)] = 0
    """Interval in steps between checkpoints. The last step is also saved. 0 saves only if the
    run is asked to stop."""
    keep: Annotated[int, AtLeast(1), AtMost(INT32)] = 2
    """Number of checkpoints to keep, the newest ones."""
    keep_best: Annotated[bool, ValidFor("train.eval_every")] = False
    """Save after each evaluation with the lowest loss so far, and keep that checkpoint as well."""


@dataclass(frozen=True)
class GuardConfig:
    """Detection of wrong numbers."""

    __pydantic_config__ = STRICT
    replicas_every: Annotated[int, AtLeast(0), AtMost(INT32)] = 100
    """Interval in steps between comparisons of replicated parameters. 0 disables them."""
    abft_every: Annotated[
        int,
        AtLeast(0),
        AtMost(INT32),
        ValidFor("train.backend", "numpy"),
        ValidFor("train.dtype", "float32", "float64"),
        ValidFor("parallel.reduce_dtype", None, "float32"),
    ] = 0
    """Interval in steps between steps whose products and messages are all verified by checksums
    (ABFT). 0 disables it."""
    loss_spike_sigma: Annotated[float, AtLeast(0), LessThan(inf)] = 6.0
    """Log a warning for a loss this many standard deviations above the previous ones. 0
    disables it."""


@dataclass(frozen=True)
class TraceConfig:
    """Recording of the trace."""

    __pydantic_config__ = STRICT
    enabled: bool = True
    """Record a trace."""
    sync_every: Annotated[int, AtLeast(1), AtMost(INT32)] = 100
    """Interval in steps between clock comparisons of several hosts."""
    clock: Annotated[Literal["wall", "cpu"], ValidFor("train.backend", "numpy")] = "wall"
    """wall records wall-clock time. cpu records the CPU time of each rank, which is the cost of
    an operation if ranks outnumber cores."""
    nvtx: Annotated[bool, ValidFor("train.backend", "cupy")] = False
    """Name GPU kernels for NVIDIA's profilers (NVTX ranges)."""


@dataclass(frozen=True)
class RunConfig:
    """Output, stop requests and monitoring."""

    __pydantic_config__ = STRICT
    out: str = "results"
    """Folder that contains the folder of each run."""
    signal: Literal["USR1", "USR2"] = "USR1"
    """Signal that asks the run to save and stop, in addition to SIGTERM, SIGINT and SIGHUP."""
    watchdog_s: Annotated[float, AtLeast(0.1), LessThan(1e9)] = 300.0
    """Abort the run after this many seconds without progress."""
    tensorboard: bool = False
    """Also write the records of metrics.jsonl for TensorBoard (extra tensorboard)."""
    metrics_hook: str | None = None
    """MODULE:FUNCTION, which rank 0 calls with each record of metrics.jsonl, a dict. Default:
    none."""


@dataclass(frozen=True)
class Config:
    """One experiment."""

    __pydantic_config__ = STRICT
    name: str = "gpt"
    """First part of the name of the run's folder. If it is not set, other families use
    model.kind."""
    seed: Annotated[int, AtLeast(0), LessThan(2**64)] = 1234
    """Seed of the initial weights, of dropout and of the order of the training text."""
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

    @cached_property
    def splits(self) -> Mapping[str, Split]:
        """Dict from layer kind to the split of its first matrix product, including the data axes.

        Blocks, embedding and head are dense. Experts are sharded along e, so their split lacks
        this axis.
        """
        letters, zero = self.parallel.split, self.parallel.zero
        split = SCHEMES[self.parallel.scheme] if letters is None else Split(**letters)
        split = split.over("d", zero) if self.mesh.d > 1 else split
        dense = split.over("e", zero) if self.mesh.e > 1 else split
        splits = {"dense": dense, "experts": split}
        if self.mesh.c > 1:
            splits = {kind: each.over("c", zero, outermost=True) for kind, each in splits.items()}
        return splits

    def keep(self) -> str:
        """Return the operands of matrix products whose gathered blocks are saved for backward.

        ZeRO-3 re-gathers W. Otherwise, every microbatch in flight would have its own copy.
        """
        kept = "x" if self.parallel.zero == 3 and self.mesh.replicas() > 1 else "xw"
        return kept if self.parallel.keep_gathered else ""

    def context(self) -> Context:
        """Return the partition of sequences over the context axis."""
        parallel, c = self.parallel, self.mesh.c
        heads = {"ring": 1, "all-to-all": c, "both": parallel.ulysses}[parallel.context]
        return Context(self.model.sequence, c // heads, heads)

    def chunked(self) -> bool:
        """Return True if attention is computed chunk by chunk."""
        train, long = self.train, self.model.sequence >= _LONG
        on_cpus = train.backend == "numpy" and train.dtype in ("float32", "float64")
        asked = self.parallel.attention or ("chunked" if on_cpus and long else "full")
        return asked == "chunked" or self.context().rings > 1

    def layers(self) -> list[range]:
        """Return the range of layers of each model chunk, in model order."""
        parts, layers = self.mesh.p * self.parallel.chunks, self.model.layers
        counts = self.parallel.layers_per_stage or [
            layers * (part + 1) // parts - layers * part // parts for part in range(parts)
        ]
        ends = [*accumulate(counts, initial=0)]
        return [range(first, stop) for first, stop in pairwise(ends)]
