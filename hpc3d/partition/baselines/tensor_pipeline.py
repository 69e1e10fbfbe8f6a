"""Megatron-LM's parallel layouts: 1-D tensor and data parallelism (arXiv:1909.08053), with and
without a pipeline (arXiv:2104.04473).

In the rank order, tensor parallelism is innermost, followed by replicas and then stages. Of the
layouts with 1, 2, 4 or 8 tensor-parallel ranks, the fastest one that fits in memory is used.
Activations are recomputed layer by layer. The first version of Megatron-LM had neither a pipeline
nor microbatches.
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
    """Costs of a model whose replicas are groups of `ways` adjacent tensor-parallel ranks."""

    def __init__(self, operations: SplitOperations, costs: ModelCosts) -> None:
        self.ways = operations.ways
        super().__init__(partial(graph_of, operations, costs.machine), costs.machine, costs.batch)

    def message(self, nbytes: float, senders: range, receivers: range) -> float:
        """Return the time in seconds to send a microbatch's activations to the next stage.

        `senders` and `receivers` are replica indices; the first rank of replica r is `ways` * r.
        """
        ways = self.ways
        apart = [range(ways * each[0], ways * each[-1] + 1, ways) for each in (senders, receivers)]
        return super().message(nbytes, apart[0], apart[1])

    def summed(self, nbytes: float, ranks: range | tuple[int, ...]) -> float:
        """Return the time in seconds of an all-reduce over the first rank of each replica.

        The other ranks of the replicas all-reduce their shards at the same time.
        """
        return super().summed(nbytes, tuple(self.ways * rank for rank in ranks))


def megatron(task: Task) -> Contender:
    """Return Megatron-LM's fastest layout with tensor and data parallelism only."""
    return _fastest_split("Megatron-LM", task, pipeline=False)


def megatron_pipeline(task: Task) -> Contender:
    """Return Megatron-LM's fastest pipeline layout with equal numbers of layers per stage."""
    return _fastest_split("Megatron-LM, pipeline", task, pipeline=True)


def _fastest_split(name, task, pipeline):
    found = []
    for ways in (ways for ways in _WAYS if task.ranks % ways == 0):
        part = _split(task, ways)
        if part is None:
            return Contender(name, None, None, "the model has no pairs of linear layers to shard")
        cut = partial(even, layer_runs(part.costs.graph(1)))
        counts, most = (divisors(part.ranks), 128) if pipeline else ([1], 1)
        choices = pipelines(part, cut, DEFAULT, counts, most)
        found.append(fastest(name, part, choices, layer_by_layer)._replace(ways=ways))
    return min(found, key=rank_of)


def _split(task, ways):
    """Return the planning task for replicas that consist of `ways` tensor-parallel ranks.

    Returns `None` if `ways` is 1 and the model has no linear layers that could be sharded.
    """
    if ways == 1:
        return task if split_roles(task.operations.captured, 2).rows else None
    operations = SplitOperations(task.operations, ways)
    costs = TensorCosts(operations, task.costs)
    return task._replace(costs=costs, ranks=task.ranks // ways)
