"""Communication, FLOPs and memory of a training step, counted by running the program.

One rank at a time runs the trainer on abstract arrays (arrays/abstract.py), which takes
milliseconds for any model size. The simulation uses the same recorder as real runs, so the
predicted bytes, messages and memory are exactly equal to the values in a trace.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from hpc3d.arrays.abstract import AbstractArray
from hpc3d.comm import threads
from hpc3d.comm.abstract_communicator import abstract_mesh
from hpc3d.pipeline.program import program_of
from hpc3d.predict.simulation.abstract_gpu import pool_of, unrecorded
from hpc3d.trace.recorder import Recorder
from hpc3d.trace.schema import CATEGORY, EVENTS, OP, PHASE, record_type
from hpc3d.training.microbatch_loader import MicrobatchLoader
from hpc3d.training.trainer import Trainer

if TYPE_CHECKING:
    from hpc3d.comm.mesh import Mesh
    from hpc3d.config.input_file import Config
    from hpc3d.pipeline.program import Program

CAPACITY = 1 << 12  # initial number of rows in the table of each Prediction
_COMM = CATEGORY.index("comm")


class InMemory(Recorder):
    """Recorder that keeps all rows of a step in memory."""

    def flush(self) -> None:
        pass


class ZeroBatches(MicrobatchLoader):
    """Loader of zero batches; token values do not affect a prediction."""

    def batch(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        pair = AbstractArray((2, *self.shape), np.int32, self.mesh.pool)
        self.mesh.world.broadcast(pair, 0).wait()
        zeros = np.broadcast_to(np.int32(0), self.shape)
        return zeros, zeros


class Prediction(NamedTuple):
    """Predicted steady-state training step of one rank.

    `events` contains the rows of the trace table EVENTS, but without valid times. `axes` lists the
    mesh axis of each group. `peak` maps a kind of memory to its peak in bytes; the key "all" is
    the peak of the sum over all kinds.
    """

    events: np.ndarray
    axes: list
    peak: dict

    def moved(self) -> dict[tuple[str, str], tuple[int, int]]:
        """Return a dict from (axis, op, phase) to (number of calls, bytes received)."""
        calls, received = Counter(), Counter()
        for row in self.events[self.events["category"] == _COMM]:
            key = self.axes[row["group"]], OP[row["op"]], PHASE[row["phase"]]
            calls[key] += 1
            received[key] += int(row["bytes"])
        return {key: (count, received[key]) for key, count in calls.items()}

    def flops(self) -> dict[str, float]:
        """Return a dict from operation to its number of floating-point operations."""
        events, total = self.events, {}
        for op in np.unique(events["op"]).tolist():
            if count := float(events["flops"][events["op"] == op].sum()):
                total[OP[op]] = count
        return total


def predict(
    config: Config, vocabulary: int, coords: Mapping[str, int], program: Program | None = None
) -> Prediction:
    """Predict the second training step of the rank at `coords`, a dict from axis to coordinate.

    Raises ValueError if blocks have owner ranks (scheme 3d-broadcast), because a single rank then
    does not know all shapes.
    """
    mesh = abstract_mesh(config.mesh.sizes(), coords, pool_of(config))
    return predict_on(mesh, config, vocabulary, program)


def predict_on(
    mesh: Mesh, config: Config, vocabulary: int, program: Program | None = None
) -> Prediction:
    """Predict the second training step on an abstract `mesh`, for the rank that it represents."""
    config = unrecorded(config)
    recorder = InMemory(None, {"rank": mesh.rank}, CAPACITY, clock=lambda: 0)
    program = program or program_of(config)
    trainer = Trainer(mesh.traced(recorder), config, vocabulary, None, program, feed=ZeroBatches)
    for number in range(min(2, config.train.steps)):
        recorder.count = 0
        trainer.step(number)
    events = np.frombuffer(recorder.table, record_type(EVENTS), recorder.count)
    axes = [group["axis"] for group in recorder.header["groups"]]
    return Prediction(events, axes, dict(mesh.pool.peak))


def every_rank(config: Config, vocabulary: int) -> list[Prediction]:
    """Return the Prediction of each rank, in rank order.

    Ranks run sequentially, or concurrently on threads if blocks have owner ranks.
    """
    grid, program = config.mesh.grid(), program_of(config)
    if any(split.own for split in config.splits.values()):
        rank = partial(predict_on, config=config, vocabulary=vocabulary, program=program)
        return threads.run(grid.sizes, rank, partial(pool_of, config))
    all_coords = map(grid.coords, range(grid.size))
    return [predict(config, vocabulary, coords, program) for coords in all_coords]
