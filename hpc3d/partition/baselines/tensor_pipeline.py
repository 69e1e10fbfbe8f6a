"""Megatron-LM's parallel layouts: 1-D tensor and data parallelism (arXiv:1909.08053), with and
without a pipeline (arXiv:2104.04473).

In the rank order, tensor parallelism is innermost, followed by replicas and then stages. Of the
layouts with 1, 2, 4 or 8 tensor-parallel ranks, the fastest one that fits in memory is used.
Activations are recomputed layer by layer. The first version of Megatron-LM had neither a pipeline
nor microbatches.
"""

from __future__ import annotations

from functools import partial

from hpc3d.comm.grid import divisors
from hpc3d.partition.baselines.contenders import (
    Contender,
    Task,
    fastest,
    layer_by_layer,
    pipelines,
    rank_of,
)
from hpc3d.partition.baselines.layer_cuts import even, layer_runs
from hpc3d.partition.baselines.tensor_split import MegatronOperations, split_roles
from hpc3d.partition.model_graph import costs_of
from hpc3d.partition.tensor_parallel.split_costs import TensorCosts
from hpc3d.pipeline.schedule import DEFAULT

_WAYS = (1, 2, 4, 8)


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
    operations = MegatronOperations(task.operations, ways)
    costs = TensorCosts(costs_of(operations, task.costs.machine, task.costs.batch), ways)
    return task._replace(costs=costs, ranks=task.ranks // ways)
