"""Megatron-LM's arrangements: 1-D tensor parallelism with data parallelism (arXiv:1909.08053), and
with a pipeline too (arXiv:2104.04473).

Ranks that share layers are neighbours, then come replicas, then stages.  Of 1, 2, 4 and 8 ways to
split, the fastest that fits is taken; what is computed again is so layer by layer.  The first code
had neither pipeline nor microbatches.
"""

from __future__ import annotations

from functools import partial

from hpc3d.partition.baselines.contenders import (
    Contender,
    Task,
    divisors,
    fastest,
    layer_by_layer,
    pipelines,
    rank_of,
)
from hpc3d.partition.baselines.layer_cuts import even, layer_runs
from hpc3d.partition.baselines.tensor_split import SplitOperations, split_roles
from hpc3d.partition.evaluation import ModelCosts
from hpc3d.partition.model_graph import graph_of
from hpc3d.pipeline.schedule import DEFAULT

_WAYS = (1, 2, 4, 8)


class TensorCosts(ModelCosts):
    """The costs of a model whose replicas are `ways` neighbouring ranks each."""

    def __init__(self, operations: SplitOperations, costs: ModelCosts) -> None:
        self.ways = operations.ways
        super().__init__(partial(graph_of, operations, costs.machine), costs.machine, costs.batch)

    def message(self, nbytes: float, senders: range, receivers: range) -> float:
        """As without, between ranks that are so much farther apart."""
        senders, receivers = (self._apart(each) for each in (senders, receivers))
        return super().message(nbytes, senders, receivers)

    def summed(self, nbytes: float, ranks: range | tuple[int, ...]) -> float:
        """The first of the ranks of every replica sum their parts, and so do the others."""
        return super().summed(nbytes, tuple(self.ways * rank for rank in ranks))

    def _apart(self, ranks):
        return range(self.ways * ranks[0], self.ways * ranks[-1] + 1, self.ways)


def megatron(task: Task) -> Contender:
    """The fastest without a pipeline, on all of the batch at once."""
    return _fastest_split("Megatron-LM", task, pipeline=False)


def megatron_pipeline(task: Task) -> Contender:
    """The fastest with stages of equally many layers, or one, and microbatches."""
    return _fastest_split("Megatron-LM, pipeline", task, pipeline=True)


def _fastest_split(name, task, pipeline):
    found = []
    for ways in (ways for ways in _WAYS if task.ranks % ways == 0):
        part = _split(task, ways)
        if part is None:
            return Contender(name, None, None, "no pairs of linear layers that it would split")
        cut = partial(even, layer_runs(part.costs.graph(1)))
        counts, most = (divisors(part.ranks), 128) if pipeline else ([1], 1)
        choices = pipelines(part, cut, DEFAULT, counts, most)
        found.append(fastest(name, part, choices, layer_by_layer)._replace(ways=ways))
    return min(found, key=rank_of)


def _split(task, ways):
    """The task of the replicas; None where they have nothing to share."""
    if ways == 1:
        return task if split_roles(task.operations.captured, 2).rows else None
    operations = SplitOperations(task.operations, ways)
    costs = TensorCosts(operations, task.costs)
    return task._replace(costs=costs, ranks=task.ranks // ways)
