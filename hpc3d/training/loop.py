"""A training step, the same on every rank."""

import time
from typing import NamedTuple

import numpy as np

from hpc3d.model.gpt2 import GPT2, Shape
from hpc3d.training.optimizer import OPTIMIZERS, learning_rate


class Step(NamedTuple):
    """What a step came to: `loss` a token, times in seconds, `communication` a share of the step,
    `peak` the bytes of arrays on the fullest rank."""

    number: int
    loss: float
    learning_rate: float
    grad_norm: float
    tokens: int
    seconds: float
    communication: float
    peak: int


class Trainer:
    """Model and optimiser of a run on a mesh; `batches` is None on all ranks but 0."""

    def __init__(self, mesh, config, vocabulary, batches):
        model, train = config.model, config.train
        self.mesh, self.config, self.batches = mesh, config, batches
        shape = Shape(
            model.layers,
            model.hidden,
            model.heads,
            model.sequence,
            vocabulary,
            tied=model.tied,
            gelu=model.gelu,
            dropout=model.dropout,
        )
        keep = config.parallel.keep_gathered
        self.model = GPT2(mesh, shape, config.split(), train.dtype, config.seed, keep)
        self.optimizer = OPTIMIZERS[train.optimizer](self.model.parameters, train.weight_decay)

    def step(self, number):
        """Step `number`: forward, backward, sums over ranks, clipping, update."""
        trace, start = self.mesh.trace, time.perf_counter()
        trace.begin_step(number)
        self.mesh.pool.reset_peak()
        tokens, targets = self.batch(number)
        self.model.parameters.grad.fill(0)
        begin = time.perf_counter()
        loss, saved = self.model.forward_loss(tokens, targets, number)
        middle = time.perf_counter()
        self.model.backward_loss(saved)
        trace.phase = "optimizer"
        end = time.perf_counter()
        loss, norm = self.totals(loss)
        rate = learning_rate(self.config.train, number)
        self.update(number, loss, norm, rate)
        trace.phase = "other"
        seconds = time.perf_counter() - start
        share, peak = self.worst(trace.communication / 1e9 / seconds)
        trace.end_step(self.mesh.pool, tokens.size, loss, norm, rate, middle - begin, end - middle)
        return Step(number, loss, rate, norm, tokens.size, seconds, share, peak)

    def batch(self, number):
        """Inputs and targets of the whole batch, read on rank 0 and broadcast."""
        sequence = self.config.model.sequence
        pair = np.empty((0, self.config.train.batch, sequence), np.int32)
        if self.batches is not None:
            pair = np.stack(self.batches.batch(number))
        tokens, targets = self.mesh.world.broadcast(pair, 0).wait()
        return tokens, targets

    def totals(self, loss):
        """The mean loss and the norm of the gradient, over all ranks."""
        parameters = self.model.parameters
        parameters.reduce_gradients()
        with self.mesh.trace.span("norm of the gradient"):
            mine = np.array([loss, parameters.sum_of_squares()])
        loss, squares = self.mesh.world.all_reduce(mine).wait()
        return float(loss), float(np.sqrt(squares))

    def update(self, number, loss, norm, rate):
        """Clip to the global norm and update; all ranks see the same sums, so all stop or none."""
        if not np.isfinite(loss + norm):
            raise FloatingPointError(f"step {number}: loss {loss}, gradient norm {norm}")
        clip = self.config.train.clip
        scale = min(1.0, clip / norm) if clip and norm else 1.0
        with self.mesh.trace.span("update"):
            self.optimizer.update(rate, scale)

    def worst(self, communication):
        """The mean share of communication and the highest peak of array bytes."""
        mine = np.array([communication, self.mesh.pool.peak["all"]], np.float64)
        world = self.mesh.world
        share = world.all_reduce(mine[:1]).wait()[0] / self.mesh.ranks
        return float(share), int(world.all_reduce(mine[1:], "max").wait()[0])
