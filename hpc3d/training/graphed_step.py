"""CUDA graph of a training step: the forward and backward passes in one launch.

The graph also contains the messages between pipeline stages, the gradient reductions, and the
all-gathers of updated values that overlap with the forward pass. The first step of a run launches
each kernel individually, so that all kernels are compiled and all buffers allocated. The second
step is captured, and later steps replay the graph.

The rest of a step is launched individually: the exchange of tied gradients, which passes through
host memory; the gradient norm, which depends on this exchange; and the optimizer update, because
all ranks check the loss and the gradient norm before the update.

Inputs that change from step to step (tokens, dropout keys, the loss scale) are in arrays with
fixed addresses (`microbatch_loader._PersistentDeviceCache`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from hpc3d.cuda.cudnn_attention import Flash
from hpc3d.pipeline.schedule import SCHEDULES

if TYPE_CHECKING:
    from hpc3d.config.input_file import Config
    from hpc3d.model.microbatch import Microbatch
    from hpc3d.pipeline.passes import Group

# Transports whose calls can be captured; auto is NCCL if each rank has a device.
_CAPTURED = ("none", "nccl", "auto")


class GraphedStep:
    """Training steps of `trainer`, whose passes are launched by `graph`.

    A graph has the methods of hpc3d.cuda.graph.CudaGraph. If it is `immediate`, captured work runs
    during the capture, so every step is captured, including the first.
    """

    def __init__(self, trainer: Any, graph: Any) -> None:
        self.trainer, self.graph = trainer, graph
        self.warm, self.recording = graph.immediate, False
        # This rank's loss, which the graph writes; `None` until the graph has been captured.
        self.loss: Any = None
        self.peak: Counter[str] = Counter()

    def run(self, groups: Sequence[Group], micros: Mapping[int, Microbatch]) -> None:
        """Run all passes and the optimizer update of a step."""
        trainer = self.trainer
        if self.loss is not None:
            trainer.engine.seconds.clear()
            self.launch()
            with trainer.mesh.trace.scope(phase="optimizer"):
                trainer.update_by(self.loss)
            return
        if self.warm:
            self.recording = True
            self.graph.begin()
        trainer.engine.run(groups, micros)
        self.warm = True

    def close(self, loss: Any) -> None:
        """End the capture, if one is in progress, and launch the graph.

        The captured passes write this rank's loss to the array `loss`. Sends that are still in
        flight are completed first, because they are part of the graph.
        """
        if not self.recording:
            return
        self.trainer.engine.drain()
        self.graph.end()
        self.recording = False
        if not self.graph.immediate:
            self.loss, self.peak = loss, self.trainer.mesh.pool.peak
            self.launch()

    def launch(self) -> None:
        pool = self.trainer.mesh.pool
        with self.trainer.mesh.trace.span("graph", "graph"):
            self.graph.launch()
        pool.peak |= self.peak


def replay_of(trainer: Any) -> GraphedStep | None:
    """Return a GraphedStep for a trainer, or `None` if its steps are not captured."""
    pool = trainer.mesh.pool
    if not (pool.on_device and captured(trainer.config)):
        return None
    return GraphedStep(trainer, pool.graph())


def captured(config: Config) -> bool:
    """Return True if the passes of a training step are captured in a CUDA graph."""
    return config.train.cuda_graph and not _obstacle(config)


def settled(config: Config, transport: str) -> Config:
    """Return `config` with `train.cuda_graph` = false if the steps cannot be captured."""
    graph = not _obstacle(config, transport)
    return replace(config, train=replace(config.train, cuda_graph=graph))


def graph_in_words(config: Config, transport: str = "") -> str:
    """Describe what the CUDA graph of a training step contains, or why there is no graph."""
    if why := _obstacle(config, transport):
        return f"none, because {why}"
    return "one launch for the forward and backward passes of a step"


def _obstacle(config: Config, transport: str = "") -> str:
    """Return why the passes of a training step are not captured in a CUDA graph.

    The result is "" if they are captured. `transport` is the transport of the ranks; the default
    is `mesh.transport`.
    """
    return next(_obstacles(config, transport or config.mesh.transport), "")


def _obstacles(config: Config, transport: str) -> Iterator[str]:
    parallel, model = config.parallel, config.model
    if not config.train.cuda_graph:
        yield "train.cuda_graph = false"
    if transport not in _CAPTURED and config.grid().size > 1:
        remedy = "use mesh.transport = nccl with a device for each rank"
        yield f"transport {transport} cannot be captured; {remedy}"
    schedule = SCHEDULES.get(parallel.schedule)  # `None` for a file, whose steps do not overlap
    if schedule and schedule.asynchronous:
        why = f"the steps of schedule {parallel.schedule} overlap"
        yield f"{why}; use a synchronous schedule"
    if parallel.compression != "none":
        why = f"gradient compression (parallel.compression = {parallel.compression})"
        yield f"{why} cannot be captured"
    if others := sorted({*parallel.offload} - {"optimizer"}):
        why = f"the copies of offloaded {' and '.join(others)} cannot be captured"
        yield f'{why}; use parallel.offload = ["optimizer"]'
    if model.experts and not model.capacity:
        why = "with model.capacity = 0, the number of slots depends on the routing"
        yield f"{why}; model.capacity = {model.experts / model.top_k:g} drops no tokens either"
    yield from _uncaptured_attention(config)


def _uncaptured_attention(config: Config) -> Iterator[str]:
    """Report a sequence length at which cuDNN's attention cannot be captured.

    Attention with dropout, document boundaries or a soft cap does not use cuDNN, and neither does
    ring attention with a sliding window. In ring attention, the numbers of queries and keys per
    call are multiples of the chunk length.
    """
    model, context = config.model, config.context()
    fused = config.train.dtype in ("float16", "bfloat16")
    fused = fused and not (model.dropout or config.data.boundaries or model.score_cap)
    ring = context.rings > 1
    fused = fused and not (ring and model.window and not model.global_every)
    if fused and not Flash.replays(context.chunk if ring else model.sequence):
        size = f"{128 * 2 * context.rings} (chunks of 128 tokens)" if ring else "128"
        key = f"model.sequence = {model.sequence}"
        yield f"cuDNN's attention with {key} cannot be captured; use a multiple of {size}"
