"""RaNNC's plan for a model, evaluated with hpc3d's cost model."""

from __future__ import annotations

from itertools import accumulate, chain, pairwise
from math import gcd

import numpy as np

from hpc3d.partition.atom_graph import contracted
from hpc3d.partition.baselines.contenders import Contender, Task
from hpc3d.partition.baselines.rannc_blocks import blocks
from hpc3d.partition.baselines.rannc_search import (
    MOST_MICROBATCHES,
    POINT_TO_POINT,
    Devices,
    first_feasible,
)
from hpc3d.partition.downsets import Chain
from hpc3d.partition.evaluation import (
    Evaluated,
    PipelineChoice,
    StageChoice,
    evaluated,
    parts_of,
)
from hpc3d.pipeline.schedule import GPIPE


def rannc(task: Task) -> Contender:
    """Return RaNNC's partition, found with RaNNC's own estimates of time and memory.

    RaNNC's stages offload their inputs to host memory; offloading is assumed to take no time. The
    plan is evaluated with GPipe's schedule, which is no slower than RaNNC's lock-step waves.
    """
    costs = task.costs
    least = costs.graph(max(1, costs.batch // (task.ranks * MOST_MICROBATCHES)))
    groups = blocks(least, task.memory, POINT_TO_POINT)
    node = gcd(task.ranks, costs.machine.ranks_per_node)
    devices = Devices(task.ranks, node, task.memory)
    plan = first_feasible(lambda rows: _of_blocks(costs.graph(rows), groups), costs.batch, devices)
    if plan is None:
        return Contender(
            "RaNNC", None, None, "RaNNC's search finds no partition that fits in memory"
        )
    ends = np.cumsum([len(group) for group in groups])
    stages = tuple(
        StageChoice(int(ends[end - 1]), replicas, plan.microbatches > 1)
        for end, replicas in zip(plan.ends, plan.replicas, strict=True)
    )
    choice = PipelineChoice(stages, plan.microbatches, GPIPE)
    ordered = costs.reordered([*chain.from_iterable(groups)])
    step = _offloaded(ordered, choice, task.memory)
    note = f"RaNNC's own estimate of the step time: {plan.seconds:.4g} s"
    return Contender("RaNNC", choice, step, note, costs=ordered)


def _offloaded(costs, choice, memory) -> Evaluated:
    """Evaluate a step in which stages offload all but two microbatches' inputs to the host."""
    step, offloaded = evaluated(costs, choice, memory), max(0, choice.microbatches - 2)
    parts = zip(step.held, parts_of(costs, choice), strict=True)
    held = [nbytes - offloaded * part.received for nbytes, part in parts]
    return step._replace(held=tuple(held), fits=max(held) <= memory)


def _of_blocks(graph, groups):
    """Return the graph as a `Chain` of blocks; each block merges a group of atoms."""
    ordered = graph.ordered([*chain.from_iterable(groups)])
    ends = pairwise(accumulate(map(len, groups), initial=0))
    together = [range(first, end) for first, end in ends]
    return Chain(contracted(ordered.atoms, ordered.values, together, ordered.shared))
