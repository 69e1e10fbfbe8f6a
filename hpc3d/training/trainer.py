"""Trainer, which runs the same training step on every rank."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from hpc3d.arrays.pool import value_of
from hpc3d.comm.mesh import COPIES
from hpc3d.model.families import family_of
from hpc3d.model.parameters import Parameters
from hpc3d.model.spec import ModelSpec
from hpc3d.model.stage import LayerRange, build
from hpc3d.pipeline.engine import Engine
from hpc3d.pipeline.gradient_buckets import Buckets
from hpc3d.pipeline.program import program_of
from hpc3d.pipeline.schedule import find
from hpc3d.training import graphed_step, guard
from hpc3d.training.gradient_compression import compression_of
from hpc3d.training.loss_scale import scale_of
from hpc3d.training.microbatch_loader import MicrobatchLoader
from hpc3d.training.optimizers.catalog import optimizer_for, optimizer_of
from hpc3d.training.optimizers.optimizer import learning_rate
from hpc3d.training.optimizers.outer import outer_optimizer_of

if TYPE_CHECKING:
    from hpc3d.comm.mesh import Mesh
    from hpc3d.config.input_file import Config
    from hpc3d.pipeline.instruction import Placement
    from hpc3d.pipeline.program import Program
    from hpc3d.pipeline.stage_protocol import PipelineStage


class Step(NamedTuple):
    """Result of a training step.

    `loss` is the mean loss per token in nats. `communication` is the fraction of the step time
    that ranks spend in communication, averaged over ranks. `peak` is the peak memory of arrays in
    bytes, and `stop_request` the stop code; both are maxima over ranks. `loss_scale` is the loss
    scale of the next step, or `None` if it is static.
    """

    number: int
    loss: float
    learning_rate: float
    grad_norm: float
    tokens: int
    seconds: float
    communication: float
    peak: int
    stop_request: int
    loss_scale: float | None = None


class Trainer:
    """Model and optimizer of a run on a mesh; only rank 0 has `batches`.

    `clock()` returns the time in seconds; it is used to time each step and its passes. To train
    another model, override `stages` (see `hpc3d.pipeline.stage_protocol`), and `sums`, which
    creates the gradient buckets.
    """

    has_tied_ends = True  # the tied embedding table may be stored on two stages

    def __init__(
        self,
        mesh: Mesh,
        config: Config,
        vocabulary: int,
        batches: Any,
        program: Program | None = None,
        clock: Callable[[], float] = time.perf_counter,
        feed: Callable[..., Any] = MicrobatchLoader,
    ) -> None:
        self.mesh, self.config, self.clock, train = mesh, config, clock, config.train
        local = config.parallel.local_steps > 0
        self.workers, self.worker = config.workers, mesh.coord(COPIES) if local else 0
        program = program or program_of(config)
        self.parameters = parameters_of(mesh, config)
        self.vocabulary, self.tokens = vocabulary, train.batch * config.model.sequence
        stages = self.stages(program.placement)
        self.parameters.allocate(config.seed)
        self.buckets = self.sums(config.parallel.bucket_bytes)
        self.optimizer = optimizer_for(config, self.parameters)
        self.outer = outer_optimizer_of(config, self.optimizer, self.buckets)
        self.weights, self.alone = program.weights(self.parameters), program.alone
        self.engine = Engine(
            mesh, stages, program.placement, self.buckets, self.weights, self.update, clock
        )
        self.feed = feed(mesh, config, batches, program)
        self.groups = program.steps(mesh.coord("p"))
        self.replay = graphed_step.replay_of(self)
        self.number, self.loss, self.norms = -1, 0.0, np.zeros(1)
        self.local_loss = self.squares = 0.0  # this rank's loss and squared gradient norm
        self.scaling, self.skipped = scale_of(train.dtype), False

    @property
    def norm(self) -> float:
        """Norm of the gradient; with local updates, the mean of the norms of all workers."""
        return float(self.norms.mean())

    def stages(self, placement: Placement) -> Sequence[PipelineStage]:
        """Build this rank's stages, one per chunk, and add their parameters to `parameters`."""
        spec = spec_of(self.config, self.vocabulary)
        self.shape = spec.sizes
        parts = parts_of(self.mesh, self.config, placement)
        return build(self.mesh, self.parameters, spec, *parts)

    def manifest(self) -> dict[str, Any]:
        """Return the checkpoint manifest entries that cannot be derived from the configuration."""
        return {}

    def sums(self, size: float) -> Buckets:
        """Create the gradient buckets of `parameters`, each of about `size` bytes."""
        compression = compression_of(self.config, self.parameters)
        return Buckets(self.parameters, size, compression, gathers_later(self.config))

    def step(self, number: int, stop_request: Callable[[], int] = int) -> Step:
        """Run step `number`: forward and backward passes, gradient reduction, and update.

        `stop_request()` returns 0 to continue, or the stop code that says why this rank asks the
        run to stop after the step.
        """
        trace, start = self.mesh.trace, self.clock()
        trace.begin_step(number)
        self.mesh.guard.begin(number, trace)
        self.mesh.pool.reset_peak()
        self.number = number
        micros = self.feed.fetch(number, self.scaling.factor)
        run = self.replay.run if self.replay else self.engine.run
        run(next(self.groups), micros)
        if self.alone:
            self.local_loss = self.engine.losses.pop(number, 0.0)
            with trace.scope(phase="optimizer"):
                self.total()
        self.mesh.pool.synchronize()
        seconds = self.clock() - start
        share, peak, stop_request = self._reduce_step_stats(
            trace.communication / 1e9 / seconds, stop_request()
        )
        self.mesh.guard.end()
        spent, tokens = self.engine.seconds, self.tokens
        forward, backward = spent["F"], spent["B"] + spent["W"] + spent["BW"]
        rate = learning_rate(self.config.train, number)
        trace.end_step(
            self.mesh.pool, tokens, self.loss, self.norm, rate, forward, backward, self.skipped
        )
        sums = number, self.loss, rate, self.norm, tokens, seconds, share, peak, stop_request
        return Step(*sums, self.scaling.state().get("factor"))

    def update(self) -> None:
        """Finish the gradient reduction and apply the optimizer update with gradient clipping."""
        self.buckets.wait()
        local_loss = 0.0 if self.alone else self.engine.losses.pop(self.number, 0.0)
        if self.replay:
            self.replay.close(local_loss)
        self.update_by(local_loss)

    def update_by(self, local_loss: Any) -> None:
        """Update the parameters, given this rank's share of the loss and the reduced gradients.

        If a gradient of a scaled loss overflows, all ranks of the worker skip the update. A worker
        scales its gradient as if all workers had the same batch, because the loss is the mean over
        the tokens of all workers.
        """
        self.buckets.sum_tied()
        with self.mesh.trace.span("norm of the gradient"):
            self.squares = self.parameters.sum_of_squares()
        self.local_loss = local_loss
        scale, clip = self.workers / self.scaling.factor, self.config.train.clip
        if not self.alone:
            self.total()
            norm = self.norms[self.worker]
            scale *= min(1.0, clip / norm) if clip and norm else 1.0
        if not self.skipped:
            self.weights.before_update()
            self.optimizer.update(learning_rate(self.config.train, self.number), scale)
            self.parameters.update_by_sign()
        elif np.isfinite(self.norms).any():  # all workers count the same number of updates
            self.optimizer.steps += 1
        moved = self.outer is not None and self.outer.after(self.number)
        if moved or not self.skipped:
            self.buckets.gather()
        self.buckets.begin()

    def total(self) -> None:
        """Compute the mean loss of the step over all ranks, and the gradient norm of each worker.

        All ranks see the same sums, so either all ranks stop or no rank does. A rank with failed
        checks contributes NaN. With loss scaling, a worker whose gradient norm overflows skips the
        update, and the scale decreases on all ranks, unless it is already at its minimum.
        """
        self.local_loss, self.squares = value_of(self.local_loss), value_of(self.squares)
        mine = np.zeros(1 + self.workers)
        mine[[0, 1 + self.worker]] = self.local_loss, self.squares
        if self.mesh.guard.compare():
            mine[:] = np.nan
        loss, *squares = self.mesh.world.all_reduce(mine).wait()
        self.loss = float(loss) / self.feed.valid[self.number]
        self.norms = self.workers * np.sqrt(squares) / self.scaling.factor
        finite = np.isfinite(self.norms)
        self.skipped = bool(np.isfinite(self.loss) and not finite[self.worker])
        overflow = not finite.all()
        if not np.isfinite(self.loss) or (overflow and not self.scaling.skipped()):
            guard.refuse(self)
        if not overflow:
            self.scaling.good()

    def _reduce_step_stats(
        self, communication: float, stop_request: int
    ) -> tuple[float, int, int]:
        share = self.mesh.world.all_reduce(np.array([communication])).wait()[0] / self.mesh.ranks
        most = np.array([self.mesh.pool.peak["all"], stop_request], np.float64)
        peak, stop_request = self.mesh.world.all_reduce(most, "max").wait()
        return float(share), int(peak), int(stop_request)


def gathers_later(config: Config) -> bool:
    """Return True if each step gathers the values that the previous step updated (ZeRO).

    The all-gather then overlaps with the forward pass. With asynchronous schedules and offloaded
    weights, a step gathers the values that it updates.
    """
    parallel = config.parallel
    in_place = "parameters" not in parallel.offload and not find(parallel.schedule).asynchronous
    return parallel.prefetch and in_place


def parameters_of(mesh: Mesh, config: Config) -> Parameters:
    """Return the `Parameters` of a training run on a mesh, without any parameter."""
    train, parallel = config.train, config.parallel
    return Parameters(
        mesh,
        train.dtype,
        parallel.zero,
        optimizer_of(config).WHOLE_MATRICES,
        parallel.reduce_dtype,
        parallel.offload,
        parallel.local_steps > 0,
    )


def parts_of(
    mesh: Mesh, config: Config, placement: Placement
) -> tuple[list[LayerRange], int | None]:
    """Return this rank's layer ranges, one per chunk, and the peer stage of tied embeddings.

    The peer is `None` unless the embedding and the head are on different stages and this rank's
    stage is one of the two.
    """
    stage, layers = mesh.coord("p"), config.layers()
    here = placement.parts_of(stage)
    parts = [LayerRange(layers[i], i == 0, i == placement.parts - 1) for i in here]
    ends = {placement.location(part)[0] for part in (0, placement.parts - 1)}
    return parts, next(iter(ends - {stage}), None) if stage in ends else None


def spec_of(config: Config, vocabulary: int) -> ModelSpec:
    """Return the `ModelSpec` that corresponds to a configuration."""
    family = family_of(config.model)
    sizes = family.sizes(config.model, vocabulary)
    return ModelSpec(
        family,
        replace(sizes, fused_gelu=config.train.fused_gelu, separator=config.data.document_end()),
        config.splits,
        config.keep(),
        config.seed,
        config.parallel.recompute,
        config.parallel.keep_dtype,
        config.context(),
        config.chunked(),
        config.train.product_scale if config.train.product_dtype else None,
        config.parallel.chunked_products,
        config.parallel.prefetch,
        config.parallel.reduce_dtype,
    )
