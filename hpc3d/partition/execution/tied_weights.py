"""Weights shared by several pipeline stages.

Their gradients are summed over the stages and counted once in the gradient norm.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from hpc3d.comm.stage_mesh import Line, ranks_of
from hpc3d.pipeline.gradient_buckets import Buckets

if TYPE_CHECKING:
    from hpc3d.comm.communicator import Communicator
    from hpc3d.model.parameters import Parameter, Parameters

Owners = dict[str, tuple[int, ...]]  # weight name -> stages that hold a copy


def owners_of(names: Iterable[Iterable[str]]) -> Owners:
    """Return the stages that hold each weight, given the weight names of each stage."""
    found = defaultdict(list)
    for stage, here in enumerate(names):
        for name in dict.fromkeys(here):
            found[name].append(stage)
    return {name: tuple(stages) for name, stages in found.items()}


def lines_of_owners(
    owners: Owners, replicas: Sequence[int], stage: int, line: Line
) -> dict[tuple[int, ...], Communicator]:
    """Create a communicator for each group of stages that shares weights.

    The communicator contains all ranks of these stages. Only groups that contain `stage` are
    included.
    """
    ranks = ranks_of(replicas)
    groups = sorted({stages for stages in owners.values() if len(stages) > 1 and stage in stages})
    return {
        stages: line([rank for number in stages for rank in ranks[number]]) for stages in groups
    }


class TiedBuckets(Buckets):
    """Gradient buckets that also all-reduce the gradients of shared weights.

    They are reduced over all ranks that hold the weights. No other reduction includes them,
    because the `partial` field of these parameters names no axis.
    """

    def __init__(
        self,
        parameters: Parameters,
        size: int,
        shared: Sequence[tuple[Communicator, Sequence[Parameter]]],
    ) -> None:
        super().__init__(parameters, size)
        self.shared = shared

    def wait(self) -> None:
        super().wait()
        for line, items in self.shared:
            mine = np.concatenate([item.grad.reshape(-1) for item in items])
            total, start = line.all_reduce(mine).wait(), 0
            for item in items:
                item.grad.reshape(-1)[...] = total[start : start + item.grad.size]
                start += item.grad.size
