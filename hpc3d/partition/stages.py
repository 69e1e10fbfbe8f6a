"""Stages of a graph on a pipeline: what each takes and holds."""

from typing import NamedTuple

from hpc3d.partition.atom_graph import Graph


class Limits(NamedTuple):
    """What a plan may use: stages at most, bytes of a rank and bytes/s of a link (None: any), the
    microbatches of a step, whether all of them are in flight on every stage (GPipe), or no more
    than there are stages from there on (1F1B), and the seconds of a message without bytes."""

    ranks: int
    memory: float | None = None
    bandwidth: float | None = None
    microbatches: int = 1
    all_in_flight: bool = False
    latency: float = 0.0

    def seconds(self, nbytes: float) -> float:
        """Of a transfer."""
        moved = nbytes / self.bandwidth if self.bandwidth else 0.0
        return self.latency * (nbytes > 0) + moved


def load(graph: Graph, members: int, limits: Limits) -> float:
    """Seconds of a stage for a microbatch: what it computes forward and backward, and once per
    value the transfer of each that enters it and of each that leaves it."""
    computed = graph.total("forward", members) + graph.total("backward", members)
    moved = graph.bytes_in(members) + graph.bytes_out(members)
    return computed + limits.seconds(moved)


def held(graph: Graph, members: int, in_flight: float) -> float:
    """Bytes that a stage holds with so many microbatches in flight."""
    return graph.total("memory", members) + in_flight * graph.total("saved", members)
