"""The input file as typed, frozen values: hpc3d.inputs reads them, hpc3d.rules has their rules.

Plain dataclasses, so that ranks get them by broadcast and need no parser.
"""

from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Literal

from hpc3d.tensor.split import SCHEMES, Split

AXES = ("p", "d", "c", "e", "x", "y", "z")
STRICT = {"extra": "forbid"}


@dataclass(frozen=True)
class MeshConfig:
    """Ranks along each axis; x, y and z all absent mean the best cuboid for the scheme.

    `transport` "mpi" takes MPI alone, where "auto" takes memory that the ranks of a node share; on
    GPUs the ways are those of hpc3d.cluster.transport.
    """

    __pydantic_config__ = STRICT
    p: int = 1
    d: int = 1
    c: int = 1
    e: int = 1
    x: int | None = None
    y: int | None = None
    z: int | None = None
    order: str = "p d c e x y z"
    transport: Literal["auto", "mpi", "nccl", "staged"] = "auto"

    def sizes(self):
        """Axis -> number of ranks, in the order of the ranks."""
        return {axis: getattr(self, axis) or 1 for axis in self.order.split()}


@dataclass(frozen=True)
class ParallelConfig:
    """Which loop each axis splits, what is kept, and in which order microbatches run.

    `stages` are the layers of each part of a pipeline, in model order (absent: even); `schedule`
    absent is "none" on one stage and else "1f1b", `chunks` absent what the schedule wants.
    Gradients are summed over the data axis in buckets of `bucket_mb` megabytes, with `overlap`
    while backward still runs.
    """

    __pydantic_config__ = STRICT
    scheme: Literal["1d", "1d-sequence", "2d", "2d-summa", "2.5d", "3d", "3d-broadcast"] = "3d"
    split: dict[str, str] | None = None
    keep_gathered: bool = True
    zero: Literal[0, 1, 2, 3] = 0
    bucket_mb: float = 25.0
    overlap: bool = True
    microbatches: int = 1
    chunks: int | None = None
    stages: tuple[int, ...] | None = None
    recompute: Literal["none", "selective", "full"] = "none"
    schedule: str | None = None


@dataclass(frozen=True)
class ModelConfig:
    """The Transformer."""

    __pydantic_config__ = STRICT
    kind: Literal["gpt2"] = "gpt2"
    layers: int = 2
    hidden: int = 384
    heads: int = 64
    sequence: int = 64
    vocabulary: int | None = None
    tied: bool = True
    gelu: Literal["tanh", "exact"] = "tanh"
    dropout: float = 0.0


@dataclass(frozen=True)
class DataConfig:
    """The text: a token file, a text file or a folder of them."""

    __pydantic_config__ = STRICT
    path: str = "inputs/corpus"
    tokenizer: Literal["byte", "bpe"] = "byte"


@dataclass(frozen=True)
class TrainConfig:
    """The optimisation; `batch` counts the sequences of a global batch.  The run stops and saves
    after the step in which its `max_minutes` have passed (0: no limit).  The learning rate rises
    over `warmup` steps and decays until `decay_steps` are done (absent: the `steps` that the run
    is begun with, also where it is extended later); then it stays as it is.  With `tf32` a GPU
    rounds the factors of float32 products to 10 bits, with `graph` its step is one launch, with
    `fused_gelu` cuBLASLt does GELU within products."""

    __pydantic_config__ = STRICT
    steps: int = 20
    max_minutes: float = 0.0
    batch: int = 192
    optimizer: Literal["adamw", "sgd"] = "adamw"
    learning_rate: float = 3e-3
    warmup: int = 2
    decay: Literal["cosine", "linear", "constant"] = "cosine"
    decay_steps: int | None = None
    weight_decay: float = 0.1
    clip: float = 1.0
    dtype: Literal["float16", "bfloat16", "float32", "float64"] = "float32"
    backend: Literal["numpy", "cupy"] = "numpy"
    tf32: bool = False
    graph: bool = False
    fused_gelu: bool = False

    def decaying(self):
        """The steps, warm-up and all, after which the learning rate has decayed."""
        return self.decay_steps or max(self.steps, self.warmup)


@dataclass(frozen=True)
class CheckpointConfig:
    """How often the state is saved: `every` 0 steps is never."""

    __pydantic_config__ = STRICT
    every: int = 0
    keep: int = 2


@dataclass(frozen=True)
class GuardConfig:
    """What is checked as a run goes: replicated parameters after every `replicas_every`-th step,
    all products and messages of every `products_every`-th step (0: never), and losses that lie
    `spike` standard deviations above those before."""

    __pydantic_config__ = STRICT
    replicas_every: int = 100
    products_every: int = 0
    spike: float = 6.0


@dataclass(frozen=True)
class TraceConfig:
    """`clock` "processor" counts the processor time of each rank instead of what the wall clock
    shows: where ranks outnumber cores, that is what an operation costs.  The clocks of several
    hosts are compared at the start, every `sync_every` steps and at the end.  With `nvtx`
    NVIDIA's profilers show the names of what a GPU computes."""

    __pydantic_config__ = STRICT
    enabled: bool = True
    sync_every: int = 100
    clock: Literal["wall", "processor"] = "wall"
    nvtx: bool = False


@dataclass(frozen=True)
class RunConfig:
    """Where a run is kept, the signal that, like SIGTERM, asks it to save and stop, and after how
    many silent seconds it is given up."""

    __pydantic_config__ = STRICT
    out: str = "results"
    signal: Literal["USR1", "USR2"] = "USR1"
    watchdog_s: float = 300.0


@dataclass(frozen=True)
class Config:
    """One experiment."""

    __pydantic_config__ = STRICT
    name: str = "gpt"
    seed: int = 1234
    mesh: MeshConfig = field(default_factory=MeshConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    guard: GuardConfig = field(default_factory=GuardConfig)
    trace: TraceConfig = field(default_factory=TraceConfig)
    run: RunConfig = field(default_factory=RunConfig)

    def split(self):
        """The split of the first product of a block, over the data axis where there is one."""
        letters = self.parallel.split
        split = SCHEMES[self.parallel.scheme] if letters is None else Split(**letters)
        return split.over_data("d", self.parallel.zero) if self.mesh.d > 1 else split

    @property
    def alone(self):
        """Whether every microbatch is a minibatch with an update of its own."""
        return self.parallel.schedule == "pipedream"

    def updates(self):
        """Updates in a training step."""
        return self.parallel.microbatches if self.alone else 1

    def keep(self):
        """The operands of products whose working blocks are kept for backward.

        ZeRO-3 gathers W again: kept, it would be there once for every microbatch in flight.
        """
        kept = "x" if self.parallel.zero == 3 and self.mesh.d > 1 else "xw"
        return kept if self.parallel.keep_gathered else ""

    def layers(self):
        """The blocks of each part of the pipeline, in model order, as ranges."""
        parts, layers = self.mesh.p * self.parallel.chunks, self.model.layers
        counts = self.parallel.stages or [
            layers * (part + 1) // parts - layers * part // parts for part in range(parts)
        ]
        ends = [*accumulate(counts, initial=0)]
        return [range(*ends) for ends in pairwise(ends)]
