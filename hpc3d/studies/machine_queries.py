"""Record the operations in the forward and backward passes of a model chunk.

The recorded operations can be timed with many machine models without repeating the passes. In
contrast, `Clock` computes the time of each operation immediately.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from hpc3d.arrays.abstract import AbstractPool, CostMeter
from hpc3d.comm.grid import Grid
from hpc3d.model.families import GPT2
from hpc3d.model.microbatch import microbatches
from hpc3d.model.parameters import Parameters
from hpc3d.model.spec import ModelSpec
from hpc3d.model.stage import build
from hpc3d.predict.simulation.simulated_clock import representative
from hpc3d.tensor.split import Split


class Tally(CostMeter):
    """Cost meter that counts the operations of a model.

    `asked` counts the occurrences of each operation. An operation is identified by the `Machine`
    method that predicts its time, and by the arguments of this method.
    """

    def __init__(self) -> None:
        self.asked = Counter()

    def product(self, m: int, n: int, k: int, dtype: np.dtype, batch: int = 1) -> None:
        self.asked["product", (m, n, k, dtype.name, batch)] += 1

    def kernel(self, name: str, nbytes: int) -> None:
        self.asked["kernel", (name, nbytes)] += 1

    def post(self, op: str, nbytes: int, members: Sequence[int], queue: str) -> None:
        self.asked["call", (op, nbytes, tuple(members))] += 1

    def until(self, end: float, pending: Any) -> Any:
        return pending

    def taken(self) -> Counter:
        """Return the operation counts since the last call, and reset the counters."""
        asked, self.asked = self.asked, Counter()
        return asked


class PartWork(NamedTuple):
    """Parameter count and operations of a model chunk on one rank.

    `forward` and `backward` contain the operation counts of one pass, as returned by
    `Tally.taken`.
    """

    parameters: int
    forward: Counter
    backward: Counter


def work_of(
    model: Any,
    split: Split,
    sizes: Mapping[str, int],
    sequences: int,
    dtype: np.dtype,
    part: Any,
    recompute: str = "none",
) -> PartWork:
    """Record the work of the model chunk `part` (hpc3d.model.stage) on one rank of a mesh.

    `sizes` is the shape of the mesh without pipeline stages. Each pass processes one microbatch of
    `sequences` sequences. The backward pass includes recomputation.
    """
    tally = Tally()
    mesh = representative(Grid(sizes), AbstractPool(tally))
    parameters = Parameters(mesh, dtype)
    spec = ModelSpec(GPT2, model, {"dense": split}, recompute=recompute)
    (stage,) = build(mesh, parameters, spec, [part])
    parameters.allocate(seed=0)
    tokens = np.zeros((sequences, model.sequence), np.int32)
    (micro,) = microbatches(0, tokens, tokens, 1)
    x = None if part.first else mesh.empty(stage.block_of(tokens.size), dtype)
    tally.taken()
    y, saved = stage.forward(x, micro)
    forward = tally.taken()
    stage.backward(None if part.last else y, saved, micro)
    return PartWork(parameters.value.size, forward, tally.taken())
