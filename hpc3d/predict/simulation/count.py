"""Count the communication, FLOPs and memory of a training step by running the program.

One rank at a time runs the trainer on abstract arrays (arrays/abstract.py), which takes
milliseconds for any model size. The recorder is the same as in real runs, so the predicted bytes,
messages and memory are exactly equal to those in a trace.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from hpc3d.arrays.abstract import AbstractArray
from hpc3d.comm import threads
from hpc3d.comm.abstract_communicator import abstract_mesh
from hpc3d.model.context import Context
from hpc3d.pipeline.program import program_of
from hpc3d.predict.simulation.abstract_gpu import pool_of
from hpc3d.predict.simulation.memory_recorder import MemoryRecorder
from hpc3d.trace.schema import CATEGORY, OP, PHASE, SEND
from hpc3d.training.microbatch_loader import MicrobatchLoader
from hpc3d.training.trainer import Trainer

if TYPE_CHECKING:
    from hpc3d.comm.mesh import Mesh
    from hpc3d.config.input_file import Config
    from hpc3d.pipeline.program import Program

COMM = CATEGORY.index("comm")


class _ZeroContext(Context):
    """Context that shards batches of zeros, which are a single element in memory."""

    def cut(self, batch: np.ndarray) -> np.ndarray:
        if self.parts == 1:
            return batch
        return np.broadcast_to(np.int32(0), (self.parts * len(batch), self.tokens))


class ZeroBatches(MicrobatchLoader):
    """Loader of batches of zeros, because token values do not affect a prediction.

    All tokens are a single element in memory, so neither time nor memory depends on the batch
    size.
    """

    def __init__(self, mesh: Mesh, config: Config, batches: None, program: Program) -> None:
        super().__init__(mesh, config, batches, program)
        self.context = _ZeroContext(*self.context)

    def batch(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        pair = AbstractArray((2, *self.shape), np.int32, self.mesh.pool)
        self.mesh.world.broadcast(pair, 0).wait()
        zeros = np.broadcast_to(np.int32(0), self.shape)
        return zeros, zeros


class Prediction(NamedTuple):
    """Predicted steady-state training step of one rank.

    `events` contains rows of the trace table EVENTS; the times in these rows are not valid. `axes`
    lists the mesh axis of each communication group. `peak` maps each kind of memory to its peak in
    bytes; the key "all" is the peak of the sum over all kinds.
    """

    events: np.ndarray
    axes: list
    peak: dict

    def moved(self) -> dict[tuple[str, str, str], tuple[int, int]]:
        """Return a dict from (axis, op, phase) to (number of calls, bytes received)."""
        events, found = self.events, {}
        for phase in np.unique(events["phase"]).tolist():
            calls = moved_by(events[events["phase"] == phase], self.axes)
            found |= {(*key, PHASE[phase]): counts for key, counts in calls.items()}
        return found

    def flops(self) -> dict[str, float]:
        """Return a dict that maps each operation of the trace to its FLOPs."""
        events, total = self.events, {}
        for op in np.unique(events["op"]).tolist():
            if count := float(events["flops"][events["op"] == op].sum()):
                total[OP[op]] = count
        return total


def moved_by(rows: np.ndarray, axes: Sequence[str]) -> dict[tuple[str, str], tuple[int, int]]:
    """Return a dict that maps (axis, operation) to (number of calls, received bytes).

    `rows` are rows of the trace table /events, and `axes` lists the mesh axis of each group.
    """
    rows, calls, received = rows[rows["category"] == COMM], Counter(), Counter()
    numbers = len(OP) * rows["group"] + rows["op"]
    kinds, first, kind_of = np.unique(numbers, return_index=True, return_inverse=True)
    for kind in np.argsort(first):
        group, op = divmod(int(kinds[kind]), len(OP))
        found = rows["bytes"][kind_of == kind]
        calls[axes[group], OP[op]] += len(found)
        received[axes[group], OP[op]] += int(found.sum()) * (op != SEND)
    return {key: (calls[key], received[key]) for key in calls}


def predict(
    config: Config, vocabulary: int, coords: Mapping[str, int], program: Program | None = None
) -> Prediction:
    """Predict the second training step of the rank at mesh coordinates `coords`.

    `coords` maps each axis to a coordinate. Raises ValueError for scheme 3d-broadcast, in which
    blocks have owner ranks, because a single rank then does not know all shapes.
    """
    mesh = abstract_mesh(config.sizes(), coords, pool_of(config))
    return predict_on(mesh, config, vocabulary, program)


def predict_on(
    mesh: Mesh, config: Config, vocabulary: int, program: Program | None = None
) -> Prediction:
    """Run at most two training steps on an abstract `mesh`; return the counts of the last one."""
    recorder = MemoryRecorder(mesh.rank, lambda: 0)
    program = program or program_of(config)
    trainer = Trainer(mesh.traced(recorder), config, vocabulary, None, program, feed=ZeroBatches)
    for number in range(min(2, config.train.steps)):
        recorder.clear()
        trainer.step(number)
    axes = [group["axis"] for group in recorder.header["groups"]]
    return Prediction(recorder.rows(), axes, dict(mesh.pool.peak))


def every_rank(config: Config, vocabulary: int) -> list[Prediction]:
    """Return a list with the Prediction of each rank, in rank order.

    Ranks are simulated one after another, or concurrently in threads if blocks have owner ranks.
    """
    grid, program = config.grid(), program_of(config)
    if any(split.own for split in config.splits.values()):
        rank = partial(predict_on, config=config, vocabulary=vocabulary, program=program)
        return threads.run(grid.sizes, rank, partial(pool_of, config))
    all_coords = map(grid.coords, range(grid.size))
    return [predict(config, vocabulary, coords, program) for coords in all_coords]
