"""The input file as typed, frozen values: config/load.py reads them, config/rules.py has their
rules.

The text below a key is its meaning, which `hpc3d train --help` prints.  Plain dataclasses, so that
ranks get them by broadcast and need no parser.

The default of a key is what runs did before the key existed: the configuration of an older run,
which lacks the key, is read with the default.
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
from hpc3d.limits import INT32, MOST_LAYERS, MOST_PASSES, MOST_RANKS
from hpc3d.model.context import Context
from hpc3d.model.families import FAMILIES
from hpc3d.tensor.split import SCHEMES, Split

_LONG = 1024  # tokens from which on attention is no slower chunk by chunk, in NumPy
STRICT = {"extra": "forbid"}
OPTIMIZER_KEYS = "beta1", "beta2", "epsilon"
CONSTANTS: dict[str, dict[str, float]] = {  # those of each optimiser, where they are absent
    "adamw": {"beta1": 0.9, "beta2": 0.95, "epsilon": 1e-8},
    "adamw-8bit": {"beta1": 0.9, "beta2": 0.95, "epsilon": 1e-8},
    "adafactor": {},
    "lion": {"beta1": 0.9, "beta2": 0.99},
    "muon": {"beta1": 0.95, "beta2": 0.95, "epsilon": 1e-8},
    "sgd": {},
}
_OF_MIXTURES = ValidFor("model.kind", "gpt2", "llama"), ValidFor("model.experts")


def _with(constant: str) -> tuple[str, ...]:
    """The optimizers that have a constant."""
    return tuple(name for name, constants in CONSTANTS.items() if constant in constants)


@dataclass(frozen=True)
class MeshConfig:
    """Ranks along each axis; their product is the number of ranks."""

    __pydantic_config__ = STRICT
    p: Annotated[int, AtLeast(1), AtMost(1024)] = 1
    """stages of the pipeline"""
    d: Annotated[int, AtLeast(1), AtMost(MOST_RANKS)] = 1
    """replicas of the model, which share out a batch"""
    c: Annotated[int, AtLeast(1), AtMost(MOST_RANKS)] = 1
    """context parallelism: ranks that share out the tokens of every sequence"""
    e: Annotated[int, AtLeast(1), AtMost(MOST_RANKS), ValidFor("model.experts")] = 1
    """expert parallelism: ranks that have experts of their own, and tokens of their own as along
    d"""
    x: Annotated[int | None, AtLeast(1), AtMost(MOST_RANKS)] = None
    """tensor parallelism (absent: 1, or the best cuboid where y and z are absent, too)"""
    y: Annotated[int | None, AtLeast(1), AtMost(MOST_RANKS)] = None
    """tensor parallelism, as x (absent: as x)"""
    z: Annotated[int | None, AtLeast(1), AtMost(MOST_RANKS)] = None
    """tensor parallelism, as x (absent: as x)"""
    order: str = " ".join(AXES)
    """the axes, outermost first: neighbouring ranks differ along the last one"""
    transport: Literal["auto", "mpi", "nccl", "host-staged"] = "auto"
    """how ranks talk: auto takes memory that those of a node share, or NCCL where each has a
    GPU; mpi is MPI alone; nccl, and host-staged through the memory of the hosts, are for GPUs"""

    def sizes(self) -> dict[str, int]:
        """Axis -> number of ranks, in the order of the ranks."""
        return {axis: getattr(self, axis) or 1 for axis in self.order.split()}

    def replicas(self) -> int:
        """Ranks that have other tokens and the same weights."""
        return self.d * self.c * self.e

    def grid(self) -> Grid:
        """The Grid of the ranks."""
        return grid_of(self)


@cache
def grid_of(mesh: MeshConfig) -> Grid:
    return Grid(mesh.sizes())


@dataclass(frozen=True)
class ParallelConfig:
    """Which loop each axis splits, what is kept, and in which order microbatches run."""

    __pydantic_config__ = STRICT
    scheme: Literal["1d", "1d-sequence", "2d", "2d-summa", "2.5d", "3d", "3d-broadcast"] = "3d"
    """which tensor axes split which loop of a product, and how blocks are stored (README)"""
    split: dict[str, str] | None = None
    """a scheme of your own, as { m = "x", n = "y", k = "z" }; replicate, own and panels take
    axes, too (absent: that of scheme)"""
    keep_gathered: bool = True
    """keep gathered blocks for backward, which otherwise gathers them again"""
    zero: Literal[0, 1, 2, 3] = 0
    """what the d replicas share out: 1 the optimiser's state, 2 gradients too, 3 weights too"""
    bucket_mb: Annotated[float, AtLeast(0), LessThan(inf)] = 25.0
    """megabytes of gradients per reduction along d"""
    reduce_dtype: Annotated[
        Literal["float16", "bfloat16", "float32"] | None, ValidFor("parallel.zero", 0, 1)
    ] = None
    """the type in which gradients cross d, c and e; they are summed in float32 (absent: theirs)"""
    overlap: bool = True
    """reduce gradients along d while backward still runs"""
    compression: Literal["none", "powersgd", "top-k"] = "none"
    """of the gradients of matrices along d, c and e: powersgd sums factors of low rank, top-k the
    largest elements; what is left out is added to the gradient of the next step"""
    compression_rank: Annotated[
        int, AtLeast(1), AtMost(2**20), ValidFor("parallel.compression", "powersgd")
    ] = 4
    """powersgd: the columns of the factors"""
    compression_share: Annotated[
        float, MoreThan(0), AtMost(1), ValidFor("parallel.compression", "top-k")
    ] = 0.01
    """top-k: the share of a matrix that is sent"""
    microbatches: Annotated[int, AtLeast(1), AtMost(MOST_PASSES)] = 1
    """parts of a batch that run one after the other; their gradients accumulate"""
    chunks: Annotated[int | None, AtLeast(1), AtMost(MOST_LAYERS)] = None
    """parts of the model that a stage has (absent: what the schedule wants)"""
    layers_per_stage: tuple[int, ...] | None = None
    """the layers of each part of the pipeline in model order, as [3, 2, 2, 1] (absent: even)"""
    context: Literal["ring", "all-to-all", "both"] = "ring"
    """how the ranks along c attend to each other's tokens: keys and values go round a ring, or
    heads are exchanged for tokens, or the latter among neighbours and the ring between them"""
    ulysses: Annotated[int, AtLeast(1), AtMost(MOST_RANKS)] = 1
    """of the ranks along c those that exchange heads, with context = "both" """
    attention: Literal["full", "chunked"] | None = None
    """full keeps all T x T probabilities, chunked a sum per row: memory linear in T (absent: full,
    but in float32 or float64 on CPUs from 1024 tokens on chunked, which is faster there; a ring is
    chunked)"""
    recompute: Literal["none", "selective", "full"] | tuple[int, ...] = "none"
    """what backward computes again instead of keeping it: selective the scores and softmax of
    attention, full whole blocks, a list such as [0, 1] the blocks of these numbers"""
    keep_dtype: Literal["bfloat16", "int8", "float8"] | None = None
    """of the activations that wait for backward, which works with rounded copies: int8 and float8
    (e4m3) have a scale per row (absent: train.dtype)"""
    offload: tuple[Literal["optimizer", "activations", "parameters"], ...] = ()
    """what waits outside of a rank's memory until it is needed, as ["optimizer"]: its states,
    activations until their backward pass, and matrices of blocks between their uses; on CPUs in
    files in TMPDIR, of GPUs on the host"""
    schedule: str | None = None
    """the order of microbatches: {schedules} or csv:FILE (absent: none on one stage, else 1f1b)"""

    @property
    def way(self) -> str:
        """What says how products are split, for messages."""
        return f"scheme {self.scheme}" if self.split is None else "parallel.split"


@dataclass(frozen=True)
class ModelConfig:
    """The Transformer."""

    __pydantic_config__ = STRICT
    kind: Literal[tuple(FAMILIES)] = "gpt2"
    """the family of models"""
    layers: Annotated[int, AtLeast(1), AtMost(MOST_LAYERS)] = 2
    """Transformer blocks"""
    hidden: Annotated[int, AtLeast(1), AtMost(2**20)] = 384
    """features of a token, a multiple of heads"""
    heads: Annotated[int, AtLeast(1), AtMost(2**20)] = 64
    """heads of attention"""
    sequence: Annotated[int, AtLeast(1), AtMost(2**27)] = 64
    """tokens of a sequence"""
    vocabulary: Annotated[int | None, AtLeast(1), AtMost(2**27)] = None
    """tokens that there are (absent: those of the tokenizer)"""
    tied: bool = True
    """the table of tokens is also the matrix of the head"""
    kv_heads: Annotated[
        int | None, AtLeast(1), AtMost(2**20), ValidFor("model.kind", "llama", "qwen2")
    ] = None
    """llama, qwen2: heads of keys and values, each shared by heads / kv_heads queries (absent:
    heads)"""
    ffn: Annotated[
        int | None, AtLeast(1), AtMost(2**22), ValidFor("model.kind", "llama", "qwen2", "bert")
    ] = None
    """llama, qwen2, bert: features of the hidden layer of the MLP (absent: 4 hidden)"""
    norm_epsilon: Annotated[
        float | None, AtLeast(0), LessThan(1), ValidFor("model.kind", "llama", "qwen2", "bert")
    ] = None
    """llama, qwen2, bert: what norms add to the mean of squares (absent: 1e-12 of bert, else
    1e-5)"""
    rope_theta: Annotated[
        float, AtLeast(1), LessThan(inf), ValidFor("model.kind", "llama", "qwen2")
    ] = 10000.0
    """llama, qwen2: rotary positions turn the slowest pair of a head by about 1 / rope_theta a
    token"""
    rope_scaling: Annotated[
        dict[str, float | str] | None, ValidFor("model.kind", "llama", "qwen2")
    ] = None
    """llama, qwen2: slower turns for longer sequences, rope_type "llama3" of published configs, as
    { factor = 8, low = 1, high = 4, original = 8192 } (absent: none)"""
    gelu: Annotated[Literal["tanh", "exact"], ValidFor("model.kind", "gpt2", "bert")] = "tanh"
    """by tanh, an approximation, or by the error function (on CPUs: extra exact)"""
    padding: Annotated[int | None, AtLeast(0), AtMost(2**27), ValidFor("model.kind", "bert")] = (
        None
    )
    """bert: the token that fills up sequences, to which no token attends and which is no target
    (absent: none)"""
    dropout: Annotated[float, AtLeast(0), LessThan(1)] = 0.0
    """the share of activations that is dropped, from 0 to below 1"""
    experts: Annotated[int, AtLeast(0), AtMost(2**20), ValidFor("model.kind", "gpt2", "llama")] = 0
    """gpt2, llama: experts of a mixture in the place of an MLP (0: none)"""
    top_k: Annotated[int, AtLeast(1), AtMost(2**10), *_OF_MIXTURES] = 1
    """experts that see a token, the likeliest by a router: 1 in Switch, 2 in GShard and Mixtral"""
    capacity: Annotated[float, AtLeast(0), LessThan(inf), *_OF_MIXTURES] = 1.25
    """slots that an expert has for a sequence, over its even share, top_k x sequence / experts: a
    token that finds none is dropped (0: room for all)"""
    moe_every: Annotated[int, AtLeast(1), AtMost(MOST_LAYERS), *_OF_MIXTURES] = 1
    """the last of every so many blocks has a mixture, the others an MLP"""
    shared_experts: Annotated[int, AtLeast(0), AtMost(2**10), *_OF_MIXTURES] = 0
    """experts that see all tokens, beside the others: one MLP so many times as wide"""
    balance_loss: Annotated[float, AtLeast(0), LessThan(inf), *_OF_MIXTURES] = 0.01
    """the factor of the loss that evens out the load of experts (0: none)"""
    z_loss: Annotated[float, AtLeast(0), LessThan(inf), *_OF_MIXTURES] = 0.001
    """the factor of the squared logarithm of the router's sum of exponentials (0: none)"""
    balance_bias: Annotated[float, AtLeast(0), LessThan(1), *_OF_MIXTURES] = 0.0
    """by how much a step changes the bias by which experts are chosen, up where one had less than
    its share of tokens, else down; it balances without a loss (0: no bias)"""


@dataclass(frozen=True)
class DataConfig:
    """The text."""

    __pydantic_config__ = STRICT
    path: str = "inputs/corpus"
    """a text file, a folder of *.txt, or a token file of `hpc3d prepare`"""
    tokenizer: Literal["byte", "bpe"] | None = None
    """byte has 256 tokens, bpe is for a token file that was made with it (absent: what the token
    file says, byte for text)"""
    validation: Annotated[float | str | None, MoreThan(0), LessThan(1)] = None
    """what the model is evaluated on (train.eval_every): the share of the text that is held out,
    its last part, such as 0.05; or a text as in path (absent: nothing)"""


@dataclass(frozen=True)
class TorchConfig:
    """An unmodified PyTorch module instead of [model] and [data], which `hpc3d.partition run`
    trains by its plan."""

    __pydantic_config__ = STRICT
    factory: str | None = None
    """MODULE:FACTORY, a function that returns the module and its example inputs (absent: the model
    is that of [model])"""
    inputs: str | None = None
    """MODULE:FUNCTION, which returns the inputs of a step by its number (absent: the example
    inputs, in every step)"""


@dataclass(frozen=True)
class TrainConfig:
    """The optimisation."""

    __pydantic_config__ = STRICT
    steps: Annotated[int, AtLeast(1), AtMost(INT32)] = 20
    """training steps"""
    max_minutes: Annotated[float, AtLeast(0), LessThan(inf)] = 0.0
    """save and stop after the step in which they have passed (0: no limit)"""
    batch: Annotated[int, AtLeast(1), AtMost(2**20)] = 192
    """sequences of a step, over all replicas and microbatches"""
    optimizer: Literal["adamw", "adamw-8bit", "adafactor", "lion", "muon", "sgd"] = "adamw"
    """adamw-8bit keeps both moments of matrices in 8 bits; adafactor row and column means of a
    matrix's second moment, and no first one; lion steps by the sign of a mean of gradients; muon
    orthogonalises that of a matrix in a block, and does all else as adamw; all with decoupled
    weight decay"""
    orthogonalize: Annotated[
        Literal["in-turn", "sharded"], ValidFor("train.optimizer", "muon")
    ] = "in-turn"
    """by muon, matrices that several ranks have blocks of: in-turn, each of them gets some of the
    matrices whole; sharded, every matrix stays cut, and all of them work on it"""
    beta1: Annotated[
        float | None, AtLeast(0), LessThan(1), ValidFor("train.optimizer", *_with("beta1"))
    ] = None
    """the part of the mean of gradients that a step keeps (absent: 0.9; muon: 0.95, of its
    matrices)"""
    beta2: Annotated[
        float | None, AtLeast(0), LessThan(1), ValidFor("train.optimizer", *_with("beta2"))
    ] = None
    """the same of their squares (absent: 0.95); lion: of the mean that the next step begins with
    (absent: 0.99)"""
    epsilon: Annotated[
        float | None, AtLeast(1e-30), LessThan(1), ValidFor("train.optimizer", *_with("epsilon"))
    ] = None
    """added to the root of the mean of squares (absent: 1e-8)"""
    learning_rate: Annotated[float, AtLeast(0), LessThan(inf)] = 3e-3
    """the highest, at the end of the warm-up"""
    warmup: Annotated[int, AtLeast(0), AtMost(INT32)] = 2
    """steps in which the learning rate rises to it, linearly"""
    min_learning_rate: Annotated[float | None, AtLeast(0)] = None
    """the lowest, at the end of the decay (absent: a tenth of learning_rate)"""
    decay: Literal["cosine", "linear", "wsd", "wsd-linear", "constant"] = "cosine"
    """how the learning rate falls after the warm-up: wsd (warm-up, stable, decay) stays at the
    highest until the `cooldown`, in which it falls as 1 - sqrt, or linearly with wsd-linear;
    constant does not fall"""
    cooldown: Annotated[
        int | None, AtLeast(1), AtMost(INT32), ValidFor("train.decay", "wsd", "wsd-linear")
    ] = None
    """wsd, wsd-linear: the steps in which the learning rate falls, the last ones of decay_steps
    (absent: a fifth of them)"""
    decay_steps: Annotated[int | None, AtLeast(1), AtMost(INT32)] = None
    """the steps until the learning rate has decayed, after which it stays (absent: the `steps`
    that the run is begun with, also where it is extended later)"""
    weight_decay: Annotated[float, AtLeast(0), LessThan(inf)] = 0.1
    """the share of a matrix that a step takes off, times the learning rate"""
    clip: Annotated[float, AtLeast(0), LessThan(inf)] = 1.0
    """the largest norm of the whole gradient, to which it is scaled down (0: none)"""
    dtype: Literal["float16", "bfloat16", "float32", "float64"] = "float32"
    """of parameters and activations; those of 16 bits are summed in float32"""
    product_dtype: Annotated[Literal["float8"] | None, ValidFor("torch.factory", None)] = None
    """of the operands of the layers' products: e4m3 for activations and weights, e5m2 for
    gradients, multiplied and summed as train.dtype (absent: as they are)"""
    product_scale: Annotated[
        Literal["block", "tensor"], ValidFor("train.product_dtype", "float8")
    ] = "block"
    """float8: what has a scale of its own, 128 neighbours in a row of activations and gradients
    and 128 x 128 weights, or a tensor"""
    backend: Literal["numpy", "cupy"] = "numpy"
    """numpy computes on CPUs, cupy on GPUs"""
    eval_every: Annotated[int, AtLeast(0), AtMost(INT32), ValidFor("torch.factory", None)] = 0
    """evaluate on data.validation after every so many steps, and after the last (0: never)"""
    eval_batches: Annotated[int, AtLeast(0), AtMost(INT32)] = 16
    """batches of an evaluation, of `batch` sequences each, as far as the text fills them (0: all
    that it fills)"""
    tf32: Annotated[
        bool, ValidFor("train.backend", "cupy"), ValidFor("train.dtype", "float32")
    ] = False
    """GPUs round the operands of float32 products to 10 bits"""
    cuda_graph: Annotated[bool, ValidFor("train.backend", "cupy"), ValidFor("mesh.p", 1)] = False
    """GPUs run a step as one launch, a CUDA graph"""
    fused_gelu: Annotated[
        bool,
        ValidFor("train.backend", "cupy"),
        ValidFor("model.kind", "gpt2", "bert"),
        ValidFor("model.gelu", "tanh"),
        ValidFor("train.product_dtype", None),
    ] = False
    """GPUs do GELU within products, by cuBLASLt"""

    def constants(self) -> dict[str, float]:
        """The keys that the optimiser has a use for, and their values."""
        given = {key: getattr(self, key) for key in OPTIMIZER_KEYS}
        usual = CONSTANTS[self.optimizer]
        return {key: usual[key] if given[key] is None else given[key] for key in usual}

    def decaying(self) -> int:
        """The steps, warm-up and all, after which the learning rate has decayed."""
        return self.decay_steps or max(self.steps, self.warmup)

    def cools_down(self) -> bool:
        """Whether the learning rate stays at the highest until a cooldown."""
        return self.decay in ("wsd", "wsd-linear")

    def falling(self) -> int:
        """The last steps of these, in which the learning rate falls."""
        after = self.decaying() - self.warmup
        if not self.cools_down():
            return after
        return min(after, self.cooldown or -(-self.decaying() // 5))

    def least_rate(self) -> float:
        """The learning rate once it has decayed."""
        least = self.min_learning_rate
        return self.learning_rate / 10 if least is None else least

    def curve(self) -> tuple:
        """What the learning rate of every step depends on, keys that are absent settled."""
        rises = self.learning_rate, self.warmup, self.decay
        falls = self.least_rate(), self.decaying(), self.falling()
        return rises if self.decay == "constant" else (*rises, *falls)


@dataclass(frozen=True)
class CheckpointConfig:
    """How often the state is saved."""

    __pydantic_config__ = STRICT
    every: Annotated[int, AtLeast(0), AtMost(INT32)] = 0
    """save after every so many steps, and after the last (0: never, unless asked to stop)"""
    keep: Annotated[int, AtLeast(1), AtMost(INT32)] = 2
    """checkpoints that are kept, the newest ones"""
    keep_best: Annotated[bool, ValidFor("train.eval_every")] = False
    """save after an evaluation that is the best so far, and keep that checkpoint, too"""


@dataclass(frozen=True)
class GuardConfig:
    """What is checked as a run goes."""

    __pydantic_config__ = STRICT
    replicas_every: Annotated[int, AtLeast(0), AtMost(INT32)] = 100
    """after every so many steps compare the parameters that ranks hold in common (0: never)"""
    abft_every: Annotated[
        int,
        AtLeast(0),
        AtMost(INT32),
        ValidFor("train.backend", "numpy"),
        ValidFor("train.dtype", "float32", "float64"),
        ValidFor("parallel.reduce_dtype", None, "float32"),
    ] = 0
    """every so many steps check all products and messages of one (0: never)"""
    loss_spike_sigma: Annotated[float, AtLeast(0), LessThan(inf)] = 6.0
    """a line in the log for losses so many standard deviations above those before (0: none)"""


@dataclass(frozen=True)
class TraceConfig:
    """What is recorded as a run goes."""

    __pydantic_config__ = STRICT
    enabled: bool = True
    """whether there is a trace"""
    sync_every: Annotated[int, AtLeast(1), AtMost(INT32)] = 100
    """steps from one comparison of several hosts' clocks to the next"""
    clock: Annotated[Literal["wall", "cpu"], ValidFor("train.backend", "numpy")] = "wall"
    """with cpu each rank counts its own CPU time: where ranks outnumber cores, that is
    what an operation costs"""
    nvtx: Annotated[bool, ValidFor("train.backend", "cupy")] = False
    """NVIDIA's profilers show the names of what a GPU computes"""


@dataclass(frozen=True)
class RunConfig:
    """Where a run is kept, and how it is ended."""

    __pydantic_config__ = STRICT
    out: str = "results"
    """the folder in which the run makes its own"""
    signal: Literal["USR1", "USR2"] = "USR1"
    """asks the run to save and stop, as SIGTERM, SIGINT and SIGHUP do"""
    watchdog_s: Annotated[float, AtLeast(0.1), LessThan(1e9)] = 300.0
    """the run is given up after so many seconds in which nothing moved"""
    tensorboard: bool = False
    """what metrics.jsonl has is written for TensorBoard, too (extra tensorboard)"""
    metrics_hook: str | None = None
    """MODULE:FUNCTION, which rank 0 calls with each record of metrics.jsonl, a dict (absent: none)
    """


@dataclass(frozen=True)
class Config:
    """One experiment."""

    __pydantic_config__ = STRICT
    name: str = "gpt"
    """begins the name of the run's folder (default for other families: model.kind)"""
    seed: Annotated[int, AtLeast(0), LessThan(2**64)] = 1234
    """of the initial weights, of dropout and of the order of the text"""
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
        """Kind of layer -> the split of the first of its products, over the data axes where there
        are some: the blocks, and the ends with them, are dense; experts have one place of e."""
        letters, zero = self.parallel.split, self.parallel.zero
        split = SCHEMES[self.parallel.scheme] if letters is None else Split(**letters)
        split = split.over("d", zero) if self.mesh.d > 1 else split
        dense = split.over("e", zero) if self.mesh.e > 1 else split
        splits = {"dense": dense, "experts": split}
        if self.mesh.c > 1:
            splits = {kind: each.over("c", zero, outermost=True) for kind, each in splits.items()}
        return splits

    def keep(self) -> str:
        """The operands of products whose working blocks are kept for backward.

        ZeRO-3 gathers W again: kept, it would be there once for every microbatch in flight.
        """
        kept = "x" if self.parallel.zero == 3 and self.mesh.replicas() > 1 else "xw"
        return kept if self.parallel.keep_gathered else ""

    def context(self) -> Context:
        """How the context axis cuts sequences."""
        parallel, c = self.parallel, self.mesh.c
        heads = {"ring": 1, "all-to-all": c, "both": parallel.ulysses}[parallel.context]
        return Context(self.model.sequence, c // heads, heads)

    def chunked(self) -> bool:
        """Whether attention works chunk by chunk."""
        train, long = self.train, self.model.sequence >= _LONG
        on_cpus = train.backend == "numpy" and train.dtype in ("float32", "float64")
        asked = self.parallel.attention or ("chunked" if on_cpus and long else "full")
        return asked == "chunked" or self.context().rings > 1

    def layers(self) -> list[range]:
        """The blocks of each part of the pipeline, in model order, as ranges."""
        parts, layers = self.mesh.p * self.parallel.chunks, self.model.layers
        counts = self.parallel.layers_per_stage or [
            layers * (part + 1) // parts - layers * part // parts for part in range(parts)
        ]
        ends = [*accumulate(counts, initial=0)]
        return [range(first, stop) for first, stop in pairwise(ends)]
