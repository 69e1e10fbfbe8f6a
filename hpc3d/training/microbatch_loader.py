"""Loader of microbatches, numbered in the order of the pipeline schedule."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np

from hpc3d.model.microbatch import DeviceCache, microbatches, valid_tokens
from hpc3d.training.graphed_step import captured

if TYPE_CHECKING:
    from hpc3d.arrays.pool import Pool
    from hpc3d.comm.mesh import Mesh
    from hpc3d.config.input_file import Config
    from hpc3d.data.batches import Batches
    from hpc3d.model.microbatch import Microbatch
    from hpc3d.pipeline.program import Program


class _PersistentDeviceCache(DeviceCache):
    """Device cache whose arrays keep their addresses from step to step, for use in a CUDA graph.

    At the beginning of each step, the functions in `makers` refill the arrays of all microbatches.
    """

    persistent = True

    def __init__(self, pool: Pool) -> None:
        super().__init__(pool)
        self.makers: dict[str, Callable[[Microbatch], Any]] = {}

    def __call__(self, micro: Microbatch, name: str, make: Callable[[Microbatch], Any]) -> Any:
        key = micro.first, name
        if key not in self.arrays:
            self.arrays[key] = self.pool.bring(make(micro))
            self.makers.setdefault(name, make)
        return self.arrays[key]

    def begin(self, number: int, micros: Iterable[Microbatch]) -> None:
        for micro, (name, make) in product(micros, self.makers.items()):
            if (micro.first, name) in self.arrays:
                self.pool.refill(self.arrays[micro.first, name], make(micro))
            else:  # a simulated first step runs only a few microbatches
                self(micro, name, make)


class MicrobatchLoader:
    """Loader that reads batches on rank 0, broadcasts them and splits them into microbatches.

    On the other ranks, `batches` is `None`. In each training step, microbatches are numbered from
    0. Under an asynchronous schedule, the numbers continue from step to step, and the loader also
    prefetches the microbatches of the next `program.ahead` steps.
    """

    def __init__(
        self, mesh: Mesh, config: Config, batches: Batches | None, program: Program
    ) -> None:
        self.mesh, self.batches = mesh, batches
        self.shape = (config.train.batch, config.model.sequence)
        self.count, self.alone = config.parallel.microbatches, program.alone
        self.context = config.context()
        self.asynchronous, self.ahead = program.asynchronous, program.ahead
        self.last = config.train.steps - 1
        self.training = program.training
        recorded = mesh.pool.on_device and program.training and captured(config)
        self.cache = (_PersistentDeviceCache if recorded else DeviceCache)(mesh.pool)
        self.micros, self.valid = {}, {}

    def fetch(self, number: int, factor: float = 1.0) -> dict[int, Microbatch]:
        """Return the microbatches that step `number` needs, in a dict keyed by microbatch number.

        `factor` is the loss scale, which multiplies the `scale` of each microbatch.
        """
        last = min(number + self.ahead, self.last) if self.asynchronous else number
        for old in [key for key, micro in self.micros.items() if micro.step < number]:
            del self.micros[old]
        self.valid = {step: count for step, count in self.valid.items() if step >= number}
        for step in range(number, last + 1):
            if step not in self.valid:
                self.add(step, factor)
        self.cache.begin(number, self.micros.values())
        return self.micros

    def add(self, step: int, factor: float) -> None:
        tokens, targets = self.batch(step)
        self.valid[step] = valid_tokens(targets)
        first = step * self.count if self.asynchronous else 0
        cut = microbatches(
            step, tokens, targets, self.count, self.alone, cache=self.cache, context=self.context
        )
        here = (
            micro._replace(scale=factor * micro.scale, training=self.training) for micro in cut
        )
        self.micros.update(enumerate(here, first))

    def batch(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """Return inputs and targets of a full batch, in memory owned by this rank."""
        pair = np.empty((0, *self.shape), np.int32)
        if self.batches is not None:
            with self.mesh.trace.span("read the text", "none"):
                pair = np.stack(self.batches.batch(step))
        tokens, targets = np.array(self.mesh.world.broadcast(pair, 0).wait())
        return tokens, targets
