"""Communication, FLOPs and memory of a training step, counted by running the program itself.

One rank at a time runs the trainer on abstract arrays (arrays/abstract.py), in milliseconds for
any size, with the recorder that measures real runs. The predicted bytes, messages and memory
therefore equal those of a trace exactly.
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

CAPACITY = 1 << 12  # initial rows; small, because every Prediction keeps its table
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

    `events` has rows of EVENTS without meaningful times, and `axes` the mesh axis of each group.
    `peak` is the peak of array memory in bytes by kind; "all" is the peak of their sum.
    """

    events: np.ndarray
    axes: list
    peak: dict

    def moved(self) -> dict[tuple[str, str], tuple[int, int]]:
        """Return {(axis, op, phase): (calls, bytes received)}."""
        calls, received = Counter(), Counter()
        for row in self.events[self.events["category"] == _COMM]:
            key = self.axes[row["group"]], OP[row["op"]], PHASE[row["phase"]]
            calls[key] += 1
            received[key] += int(row["bytes"])
        return {key: (count, received[key]) for key, count in calls.items()}

    def flops(self) -> dict[str, float]:
        """Return the floating-point operations by operation."""
        events, total = self.events, {}
        for op in np.unique(events["op"]).tolist():
            if count := float(events["flops"][events["op"] == op].sum()):
                total[OP[op]] = count
        return total


def predict(
    config: Config, vocabulary: int, coords: Mapping[str, int], program: Program | None = None
) -> Prediction:
    """Return the Prediction of the rank at `coords` (axis -> coordinate) in the second step.

    Raises ValueError if a block has an owner (scheme 3d-broadcast), because a single rank does not
    know the shapes then.
    """
    mesh = abstract_mesh(config.mesh.sizes(), coords, pool_of(config))
    return predict_on(mesh, config, vocabulary, program)


def predict_on(
    mesh: Mesh, config: Config, vocabulary: int, program: Program | None = None
) -> Prediction:
    """Return the Prediction of the rank of an abstract mesh."""
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

    Ranks run one after the other, or concurrently on threads if blocks have owners.
    """
    grid, program = config.mesh.grid(), program_of(config)
    if any(split.own for split in config.splits.values()):
        rank = partial(predict_on, config=config, vocabulary=vocabulary, program=program)
        return threads.run(grid.sizes, rank, partial(pool_of, config))
    all_coords = map(grid.coords, range(grid.size))
    return [predict(config, vocabulary, coords, program) for coords in all_coords]
