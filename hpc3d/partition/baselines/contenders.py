"""Pipeline arrangements of other planners, evaluated with the same cost model as hpc3d's plans.

Some systems leave settings to the user: the number of microbatches, the number of replicas, and
activation checkpointing in all stages or none. For these systems, the fastest combination that
fits in memory is used; numbers of microbatches are powers of two. GPipe checkpoints all stages, as
published.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from math import gcd
from typing import NamedTuple

import numpy as np

from hpc3d.comm.grid import divisors
from hpc3d.partition.baselines.layer_cuts import balanced, even, layer_runs
from hpc3d.partition.baselines.pipedream import ChainCosts, WorkerLevel, asynchronous
from hpc3d.partition.evaluation import (
    Evaluated,
    ModelCosts,
    PipelineChoice,
    StageChoice,
    evaluated,
)
from hpc3d.partition.model_graph import costs_of
from hpc3d.partition.operation_costs import Operations
from hpc3d.pipeline.schedule import DEFAULT, GPIPE
from hpc3d.predict.machine.machine import Machine

_Stepper = Callable[[ModelCosts, PipelineChoice, float], Evaluated]

_MOST_MICROBATCHES = 128  # largest number of microbatches tried
_SAMPLE = 64  # stages are balanced with layer times for 1/64 of the batch
_LONG = 64_000_000  # message size in bytes at which the bandwidth is computed


class Contender(NamedTuple):
    """Pipeline arrangement chosen by a planner, with its predicted step time and memory.

    `choice` and `step` are `None` if the planner finds no solution; `note` then gives the reason.
    Each replica consists of `ways` tensor-parallel ranks. If the planner reorders the atoms of
    the model, the stages of `choice` refer to the order in `costs`.
    """

    name: str
    choice: PipelineChoice | None
    step: Evaluated | None
    note: str = ""
    ways: int = 1
    costs: ModelCosts | None = None


class Task(NamedTuple):
    """Planning task: a model, its costs, the number of ranks, and the usable bytes per rank."""

    operations: Operations
    costs: ModelCosts
    ranks: int
    memory: float

    @classmethod
    def of(
        cls, operations: Operations, machine: Machine, batch: int, ranks: int, memory: float
    ) -> Task:
        """Return the planning task for a model on a machine."""
        return cls(operations, costs_of(operations, machine, batch), ranks, memory)


def data_parallel(task: Task) -> Contender:
    """Return the data-parallel arrangement, with the full model on every rank."""
    ends = [task.costs.count]
    return fastest("data parallel", task, pipelines(task, lambda _: ends, DEFAULT, [1]))


def gpipe(task: Task) -> Contender:
    """Return GPipe's arrangement: one stage per rank and equal numbers of layers per stage.

    Reference: arXiv:1811.06965.
    """
    runs = layer_runs(task.costs.graph(1))
    stages = max(1, min(task.ranks, sum(run.numbered for run in runs)))
    return fastest("GPipe, even layers", task, _alone(task, even(runs, stages)))


def torchgpipe(task: Task) -> Contender:
    """Return torchgpipe's arrangement: GPipe with one stage per rank and balanced stage times.

    The stages are balanced as in torchgpipe's balance_by_time (arXiv:2004.09910).
    """
    stages = min(task.ranks, len(layer_runs(task.costs.graph(1))))
    cut = _by_weight(task.costs, lambda chain: chain.forward + chain.backward)
    return fastest("GPipe, by time", task, _alone(task, cut(stages)))


def gpipe_hybrid(task: Task) -> Contender:
    """Return the fastest GPipe plan whose stages have equal numbers of layers and replicas."""
    cut = partial(even, layer_runs(task.costs.graph(1)))
    counts = divisors(task.ranks)[1:]
    return fastest("GPipe hybrid", task, pipelines(task, cut, GPIPE, counts))


def by_parameters(task: Task) -> Contender:
    """Balance the parameter counts of the stages, as in DeepSpeed's PipelineModule."""
    cut = _by_weight(task.costs, _trained)
    return fastest("by parameters", task, pipelines(task, cut, DEFAULT, divisors(task.ranks)))


def pipedream(task: Task) -> Contender:
    """Return PipeDream's partition, evaluated with a synchronous pipeline schedule.

    PipeDream optimizes the partition for its asynchronous pipeline. The note reports the
    throughput that PipeDream predicts for the asynchronous pipeline.
    """
    costs = task.costs
    share = max(1, costs.batch // task.ranks)
    chain, ends = costs.chain(share), [run.end for run in layer_runs(costs.graph(share))]
    sums = chain.forward + chain.backward, _trained(chain)
    units = ChainCosts(*(np.diff(each[[0, *ends]]) for each in sums), chain.crossing[ends])
    seconds, found = asynchronous(units, _levels(costs.machine, task.ranks))
    stages = [StageChoice(ends[stage.end - 1], stage.replicas) for stage in found]
    note = f"predicted for its asynchronous pipeline: {share / seconds:.4g} samples/s"
    return fastest("PipeDream", task, _searched(costs, stages, DEFAULT))._replace(note=note)


def _levels(machine, ranks):
    """Return the network levels: first the links within a node, then the links between nodes."""
    node = gcd(ranks, machine.ranks_per_node)
    inside = machine.ranks_per_node > 1
    found = [WorkerLevel(node, _bandwidth(machine, (0, 1)))] if node > 1 and inside else []
    if ranks > node or not found:
        ends = machine.ranks_per_node - 1, machine.ranks_per_node
        found.append(WorkerLevel(ranks // node, _bandwidth(machine, ends)))
    return tuple(found)


def _bandwidth(machine, ends):
    return _LONG / machine.call("send", _LONG, ends)


def _trained(chain):
    """Return the cumulative parameter sizes in bytes; entry i covers the first i atoms."""
    return np.array([chain.trained(0, end) for end in range(chain.count)])


def _by_weight(costs, weights):
    """Return a function that partitions the model into a given number of balanced stages.

    The function returns the exclusive ends of the stages, which are layer boundaries, or `None` if
    the model has too few layers. `weights(chain)` returns the cumulative weights of the atoms to
    be balanced.
    """
    runs = [run.end for run in layer_runs(costs.graph(1))]
    units = np.diff(weights(costs.chain(max(1, costs.batch // _SAMPLE)))[[0, *runs]])

    def cut(stages):
        found = balanced(units, stages)
        return found and [runs[end - 1] for end in found]

    return cut


def _alone(task, ends):
    """Yield GPipe arrangements of the stages that end at `ends`, with one rank per stage."""
    return _searched(task.costs, [StageChoice(end) for end in ends], GPIPE)


def pipelines(
    task: Task,
    cut: Callable[[int], Sequence[int] | None],
    schedule: str,
    counts: Iterable[int],
    most: int = _MOST_MICROBATCHES,
) -> Iterator[PipelineChoice]:
    """Yield the pipeline arrangements to evaluate for each number of stages in `counts`.

    `cut(stages)` returns the exclusive ends of the given number of stages, or `None` if the model
    cannot be partitioned into that many stages. All stages have the same number of ranks, and a
    step has at most `most` microbatches.
    """
    for stages in counts:
        ends = cut(stages)
        if ends is not None:
            parts = [StageChoice(end, task.ranks // stages) for end in ends]
            yield from _searched(task.costs, parts, schedule, most)


def _searched(costs, stages, schedule, most=_MOST_MICROBATCHES):
    """Yield pipeline arrangements of the given stages with 1, 2, 4, ... microbatches.

    Each number of microbatches is tried with and without recomputation. GPipe, however, recomputes
    if and only if there are several microbatches.
    """
    replicas = max(stage.replicas for stage in stages)
    micros = 1
    while micros <= min(most, costs.batch) and replicas <= costs.rows(micros, 1):
        for again in (micros > 1,) if schedule == GPIPE else (False, True):
            parts = tuple(stage._replace(recompute=again) for stage in stages)
            yield PipelineChoice(parts, micros, schedule)
        micros *= 2


def fastest(
    name: str, task: Task, choices: Iterable[PipelineChoice], step: _Stepper = evaluated
) -> Contender:
    """Return the fastest arrangement that fits in memory.

    If none fits, the arrangement that needs the least memory is returned.
    """
    found = [Contender(name, choice, step(task.costs, choice, task.memory)) for choice in choices]
    few = "no arrangement exists: too few layers for the stages, or too few samples for the ranks"
    none = Contender(name, None, None, few)
    return min(found, key=rank_of, default=none)


def rank_of(contender: Contender) -> tuple[int, float]:
    """Return the sort key of a planner's result; the best result has the smallest key.

    Results that fit in memory come first, sorted by step time; the others follow, sorted by peak
    memory per rank.
    """
    step = contender.step
    if step is None:
        return 2, 0.0
    return (0, step.seconds) if step.fits else (1, max(step.held))


def layer_by_layer(costs: ModelCosts, choice: PipelineChoice, memory: float) -> Evaluated:
    """Evaluate an arrangement with activation checkpointing of each layer.

    A stage with recomputation saves the input of every layer for each microbatch in flight. At any
    time, the stage stores the other activations of only one layer and one microbatch.
    """
    step = evaluated(costs, choice, memory)
    runs, before, held = layer_runs(costs.graph(1)), 0, []
    for stage, flights, nbytes in zip(choice.stages, step.in_flight, step.held):
        rows = costs.rows(choice.microbatches, stage.replicas)
        whole = costs.part(rows, before, stage.end)
        ends = [run.end for run in runs if before < run.end < stage.end]
        borders = pairwise((before, *ends, stage.end))
        layers = [costs.part(rows, first, end) for first, end in borders]
        if stage.recompute:
            received = sum(layer.received for layer in layers) - whole.received
            nbytes += flights * received + max(layer.saved for layer in layers) - whole.saved
        held.append(nbytes)
        before = stage.end
    return step._replace(held=tuple(held), fits=max(held) <= memory)
