"""The plan of a captured module on a machine: its microbatches, schedule and stages together."""

from __future__ import annotations

from typing import NamedTuple

from hpc3d.partition.atom_graph import Graph
from hpc3d.partition.capture import Captured
from hpc3d.partition.model_graph import graph_of
from hpc3d.partition.planner import GraphPlan, planned
from hpc3d.partition.stages import Limits
from hpc3d.predict.machine.machine import Machine

_MOST_MICROBATCHES = 64  # that are tried
_LONG = 64_000_000  # bytes of a message that shows the bandwidth


class Wanted(NamedTuple):
    """What is asked for: `ranks` at most, bytes of a rank (None: the machine's), the samples of a
    step (None: those of the example inputs), `microbatches` and `schedule` (None: the best)."""

    ranks: int
    memory: float | None = None
    batch: int | None = None
    microbatches: int | None = None
    schedule: str | None = None
    objective: str = "time"


def planned_module(
    captured: Captured, machine: Machine, wanted: Wanted
) -> tuple[GraphPlan, Limits]:
    """The quickest GraphPlan of a step, and the Limits that it keeps to.

    Where microbatches are searched, their numbers are powers of two that divide the batch.
    ValueError if nothing fits the memory of a rank, with what the nearest needs.
    """
    batch = wanted.batch or captured.batch
    if batch % (wanted.microbatches or 1):
        number = f"{wanted.microbatches} microbatches of {batch} samples"
        raise ValueError(f"{number}: give a number that divides them")
    found, refused = [], None
    for count in [wanted.microbatches] if wanted.microbatches else _powers_dividing(batch):
        limits = _limits(machine, wanted, count)
        graph = graph_of(captured, machine, batch // count)
        _refuse_few(graph, wanted.ranks)
        try:
            found.append((planned(graph, limits, wanted.objective, wanted.schedule), limits))
        except ValueError as error:
            refused = error
    if refused and not found:
        raise refused
    return min(found, key=lambda each: each[0].time)


def _powers_dividing(batch):
    count = 1
    while count <= min(batch, _MOST_MICROBATCHES) and batch % count == 0:
        yield count
        count *= 2


def _limits(machine, wanted, count):
    """Of a number of microbatches; where there are several nodes, all messages go between them."""
    node, room = machine.ranks_per_node, wanted.memory or machine.memory_gb * 1e9
    ends = (0, 1) if wanted.ranks <= node else (node - 1, node)
    short, long = (machine.call("send", nbytes, ends) for nbytes in (0, _LONG))
    return Limits(wanted.ranks, room, _LONG / (long - short), count, latency=short)


def _refuse_few(graph: Graph, ranks: int):
    if len(graph) < ranks:
        raise ValueError(
            f"the model has {len(graph)} pieces that a border can lie between, for {ranks} ranks: "
            "use fewer; only values with the batch in dimension 0 cross a border"
        )
