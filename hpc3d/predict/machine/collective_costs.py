"""Cost models of collective algorithms: `alpha` seconds per message and `beta` seconds per byte.

Every cost function takes (alpha, beta, g, nbytes) and returns seconds. g is the number of members
of the group. `nbytes` is the number of bytes counted in a trace: the minimum number that a member
must receive. It is a fraction 1 - 1/g of the full array for all_gather, reduce_scatter and
all_to_all, twice that for all_reduce, and the size of the block for other operations. The time of
reduction arithmetic is not modeled separately, because a measured beta includes it.

Thakur, Rabenseifner, Gropp, "Optimization of Collective Communication Operations in MPICH"
(IJHPCA 19(1), 2005) describes all algorithms except the chain; MPICH implements them in
src/mpi/coll. Between GPUs, `fastest` follows NCCL instead.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import ceil, floor, log2, sqrt
from typing import NamedTuple

from hpc3d.config.input_file import STRICT
from hpc3d.trace.schema import MESSAGES

_SHORT = 512 * 1024  # maximum size in bytes for recursive doubling and halving in MPICH


def message(alpha: float, beta: float, g: int, nbytes: float) -> float:
    """Cost of a single message from one member to another."""
    return alpha + nbytes * beta


def ring(alpha: float, beta: float, g: int, nbytes: float) -> float:
    """Ring all-gather or reduce-scatter."""
    return (g - 1) * alpha + nbytes * beta


def pairwise(alpha: float, beta: float, g: int, nbytes: float) -> float:
    """Pairwise all-to-all, with a different partner in every step."""
    return (g - 1) * alpha + nbytes * beta


def doubling(alpha: float, beta: float, g: int, nbytes: float) -> float:
    """All-gather by recursive doubling, or by Bruck's algorithm if g is not a power of two.

    A reduce-scatter by recursive halving has the same cost; it requires that g is a power of two.
    """
    return ceil(log2(g)) * alpha + nbytes * beta


def bruck(alpha: float, beta: float, g: int, nbytes: float) -> float:
    """Bruck all-to-all: each of ceil(log2 g) steps sends half of the array."""
    return ceil(log2(g)) * (alpha + nbytes * g / (g - 1) / 2 * beta)


def ring_all_reduce(alpha: float, beta: float, g: int, nbytes: float) -> float:
    """Ring all-reduce: a ring reduce-scatter followed by a ring all-gather."""
    return 2 * (g - 1) * alpha + nbytes * beta


def rabenseifner(alpha: float, beta: float, g: int, nbytes: float) -> float:
    """Rabenseifner all-reduce: recursive-halving reduce-scatter, recursive-doubling all-gather.

    If g is not a power of two, the excess members first send their blocks to a neighbor, and
    receive the sum from it at the end.
    """
    odd = not _power_of_two(g)
    return 2 * (floor(log2(g)) + odd) * alpha + (nbytes + 2 * odd * _summed(g, nbytes)) * beta


def doubling_all_reduce(alpha: float, beta: float, g: int, nbytes: float) -> float:
    """Recursive-doubling all-reduce, which exchanges the full array in each of log2 g steps."""
    steps = floor(log2(g)) + 2 * (not _power_of_two(g))
    return steps * (alpha + _summed(g, nbytes) * beta)


def binomial(alpha: float, beta: float, g: int, nbytes: float) -> float:
    """Binomial-tree broadcast or reduce."""
    return ceil(log2(g)) * (alpha + nbytes * beta)


def scatter_all_gather(alpha: float, beta: float, g: int, nbytes: float) -> float:
    """Broadcast as a binomial-tree scatter followed by a ring all-gather.

    A reduce by the reverse algorithm has the same cost.
    """
    return (ceil(log2(g)) + g - 1) * alpha + 2 * (1 - 1 / g) * nbytes * beta


def chain(alpha: float, beta: float, g: int, nbytes: float) -> float:
    """Pipelined broadcast or reduce along a chain of neighbors, in k segments.

    The cost is (g - 2 + k)(alpha + n beta / k) for n bytes. The optimal number of segments is
    k = sqrt((g - 2) n beta / alpha), but at least 1.
    """
    fill = (g - 2) * nbytes * beta
    if fill <= alpha:
        return (g - 1) * (alpha + nbytes * beta)
    return (g - 2) * alpha + 2 * sqrt(alpha * fill) + nbytes * beta


def _power_of_two(g: int) -> bool:
    return g & (g - 1) == 0


def _summed(g: int, nbytes: float) -> float:
    """Return the array size in bytes of an all-reduce in which each rank receives `nbytes`."""
    return nbytes * g / (2 * (g - 1))


def always(g: int, nbytes: float) -> bool:
    return True


def short(g: int, nbytes: float) -> bool:
    return nbytes <= _SHORT


def short_power_of_two(g: int, nbytes: float) -> bool:
    return nbytes <= _SHORT and _power_of_two(g)


# For each operation, pairs (algorithm, condition under which MPI libraries use it). Recursive
# doubling is limited to short messages, because long ones between distant ranks would contend for
# the same links.
ALGORITHMS = {
    "all_gather": ((ring, always), (doubling, short)),
    "reduce_scatter": ((ring, always), (doubling, short_power_of_two)),
    "all_reduce": (
        (ring_all_reduce, always),
        (rabenseifner, always),
        (doubling_all_reduce, short),
    ),
    "broadcast": ((binomial, always), (scatter_all_gather, always), (chain, always)),
    "reduce": ((binomial, always), (scatter_all_gather, always), (chain, always)),
    "all_to_all": ((pairwise, always), (bruck, short)),
    **dict.fromkeys(MESSAGES, ((message, always),)),
}
_NEIGHBORS = {ring, ring_all_reduce, chain}  # algorithms that send to neighbors only


def best(
    op: str, g: int, nbytes: float, alpha: float, beta: float, hop: float | None = None
) -> float:
    """Return the time in seconds of a collective call, using the fastest eligible algorithm.

    `hop` is the latency between neighboring ranks in seconds; it defaults to `alpha`.
    """
    if g == 1:
        return 0.0
    hop = alpha if hop is None else hop
    return min(
        cost(hop if cost in _NEIGHBORS else alpha, beta, g, nbytes)
        for cost, fits in ALGORITHMS[op]
        if fits(g, nbytes)
    )


@dataclass(frozen=True)
class Protocol:
    """Protocol of NCCL: latencies in seconds, and the fraction of the bandwidth that it reaches.

    The latency of a ring is `base_s`, plus `intra_node_s` for each step within a node and
    `inter_node_s` for each step between nodes. If a group has one member per node,
    `single_member_fraction` replaces `fraction`. `max_bandwidth` limits the bandwidth between
    nodes, in bytes/s per member (0: no limit). The `tree_` fields describe all-reduces by trees;
    if `tree_fraction` is 0, trees are not used. The `nvls_` fields describe all-reduces on one
    node by NVLink SHARP; if `nvls_fraction` is 0, NVLink SHARP is not used.
    """

    __pydantic_config__ = STRICT
    name: str
    base_s: float
    intra_node_s: float
    inter_node_s: float
    fraction: float = 1.0
    single_member_fraction: float = 1.0
    max_bandwidth: float = 0.0
    tree_base_s: float = 0.0
    tree_intra_node_s: float = 0.0
    tree_inter_node_s: float = 0.0
    tree_fraction: float = 0.0
    nvls_base_s: float = 0.0
    nvls_fraction: float = 0.0

    def ring(self, op: str, nbytes: float, members: int, nodes: int, beta: float) -> float:
        """Return the time in seconds of a ring all-gather, reduce-scatter or all-reduce."""
        rounds = 2 if op == "all_reduce" else 1
        far = nodes - 1
        lone = members == nodes
        rate = (self.single_member_fraction if lone else self.fraction) / beta
        if nodes > 1 and self.max_bandwidth:
            rate = min(rate, self.max_bandwidth)
        steps = (members - 1 - far) * self.intra_node_s + far * self.inter_node_s
        return self.base_s + rounds * steps + nbytes / rate

    def tree(self, nbytes: float, members: int, nodes: int, beta: float) -> float:
        """Return the time in seconds of an all-reduce by a double binary tree.

        The full array moves up the tree, and down again.
        """
        chain, depth = members // nodes - 1, floor(log2(nodes))
        rate = self.tree_fraction / beta
        if nodes > 1 and self.max_bandwidth:
            rate = min(rate, self.max_bandwidth)
        steps = chain * self.tree_intra_node_s + depth * self.tree_inter_node_s
        return self.tree_base_s + 2 * steps + 2 * _summed(members, nbytes) / rate

    def nvls(self, nbytes: float, members: int, beta: float) -> float:
        """Return the time in seconds of an all-reduce on one node by NVLink SHARP.

        The switches add the arrays. In each direction, a link carries the full array, and the
        share 1/g of it that the member requests from, or returns to, the switches. The algorithm
        bandwidth is therefore g / (g + 1) times that of the link (NVIDIA/nccl-tests PR 239).
        """
        moved = (1 + 1 / members) * _summed(members, nbytes)
        return self.nvls_base_s + moved * beta / self.nvls_fraction


RING_OPS = "all_gather", "reduce_scatter", "all_reduce"


def fastest(
    protocols: Iterable[Protocol], op: str, nbytes: float, shape: tuple[int, int], beta: float
) -> float:
    """Return the time in seconds of NCCL's fastest algorithm and protocol.

    NCCL predicts the time of each combination with these formulas, and runs the fastest one
    (src/graph/tuning.cc). `shape` is the number of members of the group and the number of nodes.
    """
    times = [each.ring(op, nbytes, *shape, beta) for each in protocols]
    members, nodes = shape
    if op == "all_reduce":
        times += [each.tree(nbytes, *shape, beta) for each in protocols if each.tree_fraction]
        switches = (each for each in protocols if each.nvls_fraction and nodes == 1)
        times += [each.nvls(nbytes, members, beta) for each in switches]
    return min(times)


class Level(NamedTuple):
    """One level of a network hierarchy.

    It has `members` members, with `alpha` seconds per message and `beta` seconds per byte.
    """

    members: int
    alpha: float
    beta: float


def hierarchical_all_reduce(nbytes: float, inside: Level, across: Level) -> float:
    """Return the time of a hierarchical all-reduce in seconds.

    It consists of a reduce-scatter within the nodes, an all-reduce across the nodes, and an
    all-gather within the nodes. `inside` is the Level within a node, and `across` is the Level
    between nodes.
    """
    (members, alpha, beta), (nodes, far_alpha, far_beta) = inside, across
    block = _summed(members * nodes, nbytes)
    part = (1 - 1 / members) * block
    between = 2 * (1 - 1 / nodes) * block / members
    return (
        best("reduce_scatter", members, part, alpha, beta)
        + best("all_reduce", nodes, between, far_alpha, far_beta)
        + best("all_gather", members, part, alpha, beta)
    )
