"""The plan of a captured module on a machine: replicas, microbatches, schedule and stages at once.

All numbers of replicas and microbatches are looked at with one cut each, the one whose heaviest
stage is lightest; those that come out best are searched.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from math import inf
from typing import NamedTuple

from hpc3d.partition.capture import Captured
from hpc3d.partition.model_graph import graph_of
from hpc3d.partition.operation_costs import Operations
from hpc3d.partition.planner import GraphPlan, planned, rough
from hpc3d.partition.stages import Limits, Wire
from hpc3d.predict.machine.machine import Machine

_MOST_MICROBATCHES = 64  # that are tried
_SEARCHED = 2  # pairs of replicas and microbatches
_LONG = 64_000_000  # bytes of a message that shows the bandwidth


class Wanted(NamedTuple):
    """What is asked for: `ranks`, bytes of each (None: the machine's), the samples of a step
    (None: those of the example inputs), and, where they are not None, `replicas` of every stage,
    `microbatches` of each replica, and the `schedule`."""

    ranks: int
    memory: float | None = None
    batch: int | None = None
    replicas: int | None = None
    microbatches: int | None = None
    schedule: str | None = None
    objective: str = "time"


class ModulePlan(NamedTuple):
    """Stages, `replicas` of each of them, and what was kept to."""

    stages: GraphPlan
    replicas: int
    limits: Limits


def planned_module(captured: Captured, machine: Machine, wanted: Wanted) -> ModulePlan:
    """The quickest ModulePlan of a step.

    ValueError if nothing fits the memory of a rank, with what the nearest needs, and for numbers
    that do not divide each other.
    """
    ways = [*_ways(captured, wanted)]
    operations = Operations(captured)
    graph = cache(lambda samples: graph_of(operations, machine, samples))
    _refuse_few(graph(_samples(captured, wanted, *ways[0])), wanted)

    def given(way):
        samples = _samples(captured, wanted, *way)
        return graph(samples), _limits(machine, wanted, *way), wanted.schedule

    times = {way: _about(*given(way)) for way in ways}
    fitting = [way for way in sorted(ways, key=times.get) if times[way] < inf]
    found = []
    for way in fitting[:_SEARCHED] or ways[-1:]:
        model, limits, schedule = given(way)
        plan = planned(model, limits, wanted.objective, schedule)
        found.append(ModulePlan(plan, way[0], limits))
    return min(found, key=lambda each: getattr(each.stages, wanted.objective))


def _about(graph, limits, schedule):
    """The seconds of `rough`; inf also for what is too large to search."""
    try:
        return rough(graph, limits, schedule)
    except ValueError:
        return inf


def _ways(captured: Captured, wanted: Wanted) -> Iterator[tuple[int, int]]:
    """Pairs of replicas and microbatches, those that need the least memory last."""
    batch = wanted.batch or captured.batch
    most = range(wanted.ranks, 0, -1)
    fixed = wanted.replicas
    pairs = [
        (replicas, micros)
        for replicas in ([fixed] if fixed else most)
        if wanted.ranks % replicas == 0 and batch % replicas == 0
        for micros in _counts(batch // replicas, wanted.microbatches)
    ]
    if not pairs:
        if fixed and wanted.ranks % fixed:
            raise ValueError(f"--replicas {fixed} does not divide {wanted.ranks} ranks")
        shares = [f"{fixed} replicas"] if fixed else []
        shares += [f"{wanted.microbatches} microbatches"] if wanted.microbatches else []
        raise ValueError(f"{' of '.join(shares)} cannot share {batch} samples evenly: use --batch")
    return iter(pairs)


def _counts(samples, wanted):
    """Of microbatches: what is wanted, or powers of two, that divide the samples of a replica."""
    if wanted:
        return [wanted] if samples % wanted == 0 else []
    powers = (2**power for power in range(_MOST_MICROBATCHES.bit_length()))
    return [count for count in powers if samples % count == 0]


def _samples(captured, wanted, replicas, micros):
    """Of a microbatch."""
    return (wanted.batch or captured.batch) // (replicas * micros)


def _limits(machine, wanted, replicas, micros):
    """Replicas of a stage are neighbours; where there are several nodes, all messages between
    stages go between nodes."""
    room, node = wanted.memory or machine.memory_gb * 1e9, machine.ranks_per_node
    stages, wire = wanted.ranks // replicas, Wire(0.0, inf)
    if stages > 1:
        ends = (0, replicas) if wanted.ranks <= node else (node - 1, node)
        wire = _wire(machine, "send", ends)
    sums = _wire(machine, "all_reduce", range(replicas)) if replicas > 1 else None
    limits = Limits(stages, room, wire.bandwidth, micros, latency=wire.latency)
    return limits._replace(sums=sums, keeps_received=True)


def _wire(machine, op, members):
    short, long = (machine.call(op, nbytes, members) for nbytes in (0, _LONG))
    return Wire(short, _LONG / (long - short))


def _refuse_few(graph, wanted):
    if not len(graph):
        raise ValueError("the model computes nothing from its inputs")
    stages = wanted.ranks // (wanted.replicas or wanted.ranks)
    if len(graph) < stages:
        raise ValueError(
            f"too few pieces for a pipeline of {stages} stages: it has {len(graph)}, between "
            "which the batch crosses in dimension 0; use --replicas, or fewer ranks"
        )
