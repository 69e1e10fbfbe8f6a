"""Stages of a graph on a pipeline: what each takes and holds."""

from math import inf
from typing import NamedTuple

from hpc3d.partition.atom_graph import Graph


class Wire(NamedTuple):
    """What something that moves takes: seconds for nothing, and bytes/s."""

    latency: float
    bandwidth: float

    def seconds(self, nbytes: float) -> float:
        return self.latency * (nbytes > 0) + nbytes / self.bandwidth


class Limits(NamedTuple):
    """What a plan may use: stages at most, bytes of a rank and bytes/s of a link (None: any), the
    microbatches of a step, and whether all of them are in flight on every stage (GPipe), or no
    more than there are stages from there on (1F1B).

    `latency` is that of a message, and `sums` what replicas take at the end of a step to sum the
    gradients of a stage (None: there is one of each).  With `keeps_received` a stage also holds
    what crossed the border before it, for every microbatch in flight.
    """

    ranks: int
    memory: float | None = None
    bandwidth: float | None = None
    microbatches: int = 1
    all_in_flight: bool = False
    latency: float = 0.0
    sums: Wire | None = None
    keeps_received: bool = False

    def seconds(self, nbytes: float) -> float:
        """Of a transfer."""
        return Wire(self.latency, self.bandwidth or inf).seconds(nbytes)


def load(graph: Graph, members: int, limits: Limits) -> float:
    """Seconds of a stage for a microbatch: what it computes forward and backward, and once per
    value the transfer of each that enters it and of each that leaves it."""
    computed = graph.total("forward", members) + graph.total("backward", members)
    moved = graph.bytes_in(members) + graph.bytes_out(members)
    return computed + limits.seconds(moved)


def held(graph: Graph, members: int, in_flight: float) -> float:
    """Bytes that a stage holds with so many microbatches in flight."""
    return graph.total("memory", members) + in_flight * graph.total("saved", members)


def as_size(nbytes: float) -> str:
    """A size as an option takes it, not below `nbytes`."""
    unit, name = (1e6, "MB") if nbytes >= 1e7 else (1, "B")
    return f"{-(-nbytes // unit):.0f}{name}"
