"""What a call costs: `alpha` seconds a message and `beta` seconds a byte, by algorithm.

Every cost takes (alpha, beta, g, nbytes): the g members of the group, and the bytes that a trace
counts, which is what one member receives at least.  Of all_gather, reduce_scatter and all_to_all
that is (1 - 1/g) of the whole, of all_reduce twice that, otherwise the block.  Additions cost
nothing of their own: a measured beta has them in it.

Thakur, Rabenseifner, Gropp, "Optimization of Collective Communication Operations in MPICH"
(IJHPCA 19(1), 2005) has all of them but the chain; MPICH's src/mpi/coll repeats them.
"""

from __future__ import annotations

from math import ceil, floor, log2, sqrt
from typing import NamedTuple

from hpc3d.trace.schema import MESSAGES

_SHORT = 512 * 1024  # bytes: MPICH gathers and scatters by doubling up to here


def message(alpha: float, beta: float, g: int, nbytes: float) -> float:
    """One message from one member to another."""
    return alpha + nbytes * beta


def ring(alpha: float, beta: float, g: int, nbytes: float) -> float:
    """All-gather or reduce-scatter from neighbor to neighbor around a ring."""
    return (g - 1) * alpha + nbytes * beta


def pairwise(alpha: float, beta: float, g: int, nbytes: float) -> float:
    """All-to-all with a new partner in every step."""
    return (g - 1) * alpha + nbytes * beta


def doubling(alpha: float, beta: float, g: int, nbytes: float) -> float:
    """All-gather with partners 1, 2, 4, ... away (Bruck's for any g), and its mirror image:
    reduce-scatter by recursive halving, for powers of two."""
    return ceil(log2(g)) * alpha + nbytes * beta


def bruck(alpha: float, beta: float, g: int, nbytes: float) -> float:
    """All-to-all in log2 g steps, each of which sends half of everything."""
    return ceil(log2(g)) * (alpha + nbytes * g / (g - 1) / 2 * beta)


def ring_all_reduce(alpha: float, beta: float, g: int, nbytes: float) -> float:
    """A reduce-scatter and an all-gather around a ring."""
    return 2 * (g - 1) * alpha + nbytes * beta


def rabenseifner(alpha: float, beta: float, g: int, nbytes: float) -> float:
    """All-reduce: a reduce-scatter by halving and an all-gather by doubling.

    The members beyond a power of two hand their block to a neighbor and get the sum back.
    """
    odd = not _power_of_two(g)
    return 2 * (floor(log2(g)) + odd) * alpha + (nbytes + 2 * odd * _summed(g, nbytes)) * beta


def doubling_all_reduce(alpha: float, beta: float, g: int, nbytes: float) -> float:
    """All-reduce that exchanges the whole block in every one of log2 g steps."""
    steps = floor(log2(g)) + 2 * (not _power_of_two(g))
    return steps * (alpha + _summed(g, nbytes) * beta)


def binomial(alpha: float, beta: float, g: int, nbytes: float) -> float:
    """Broadcast or reduce along a tree."""
    return ceil(log2(g)) * (alpha + nbytes * beta)


def scatter_all_gather(alpha: float, beta: float, g: int, nbytes: float) -> float:
    """Broadcast: scatter along a tree, then all-gather around a ring; backwards a reduce."""
    return (ceil(log2(g)) + g - 1) * alpha + 2 * (1 - 1 / g) * nbytes * beta


def chain(alpha: float, beta: float, g: int, nbytes: float) -> float:
    """Broadcast or reduce from neighbor to neighbor in k segments: (g - 2 + k)(alpha + n beta/k)
    with the best k = sqrt((g - 2) n beta / alpha), and at least 1."""
    fill = (g - 2) * nbytes * beta
    if fill <= alpha:
        return (g - 1) * (alpha + nbytes * beta)
    return (g - 2) * alpha + 2 * sqrt(alpha * fill) + nbytes * beta


def _power_of_two(g: int) -> bool:
    return g & (g - 1) == 0


def _summed(g: int, nbytes: float) -> float:
    """The bytes of the block that is all-reduced."""
    return nbytes * g / (2 * (g - 1))


def always(g: int, nbytes: float) -> bool:
    return True


def short(g: int, nbytes: float) -> bool:
    return nbytes <= _SHORT


def short_power_of_two(g: int, nbytes: float) -> bool:
    return nbytes <= _SHORT and _power_of_two(g)


# Of each call the algorithms and when libraries take them: doubling sends far, so that long
# messages would meet on the same links.
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


_NEIGHBOURS = {ring, ring_all_reduce, chain}  # algorithms of which no message goes far


def best(
    op: str, g: int, nbytes: float, alpha: float, beta: float, hop: float | None = None
) -> float:
    """Seconds of a call by the cheapest algorithm that libraries would take.

    `hop` is the latency between neighbors, where it is not alpha.
    """
    if g == 1:
        return 0.0
    hop = alpha if hop is None else hop
    return min(
        cost(hop if cost in _NEIGHBOURS else alpha, beta, g, nbytes)
        for cost, fits in ALGORITHMS[op]
        if fits(g, nbytes)
    )


class Level(NamedTuple):
    """Members that are joined alike: seconds a message and seconds a byte."""

    members: int
    alpha: float
    beta: float


def hierarchical_all_reduce(nbytes: float, inside: Level, across: Level) -> float:
    """Seconds of a reduce-scatter inside of nodes, an all-reduce across, an all-gather inside.

    `inside` and `across` are (g, alpha, beta) of the members on one node, and of the nodes.
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
