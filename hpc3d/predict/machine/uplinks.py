"""Cost of oversubscribed network levels, whose uplinks all groups of ranks share.

A `Link` connects blocks of consecutive ranks: each block has the size of the previous link. If the
link is oversubscribed by a ratio r, the uplinks of a block carry 1/r of the bandwidth that the
ranks of the block have together on this link.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple


class UplinkCost(NamedTuple):
    """Time per byte of a group's traffic on the uplinks of a block of ranks, in seconds.

    `beta` applies to rings and messages, and `spread` to all-to-alls. Both are 0 if the group uses
    no oversubscribed uplinks.
    """

    beta: float = 0.0
    spread: float = 0.0


def uplink_cost(machine: Any, members: Sequence[int]) -> UplinkCost:
    """Return the UplinkCost of a group on the slowest level that it crosses.

    All ranks of a block are assumed to communicate concurrently in their own groups. A group with
    k members in a block of n ranks has a share of k/n of the uplinks: n/k rings leave the block.
    In an all-to-all, each member sends to all members in other blocks. Between pairs of ranks at a
    distance of less than n, such as adjacent pipeline stages, only as many ranks of a block as the
    distance send to another block.
    """
    costs = [UplinkCost()]
    for inner, outer in pairwise(machine.links):
        if outer.oversubscription == 1:
            continue
        blocks, here = machine.nodes(members, inner.ranks)
        if blocks == 1:
            continue
        size, part = len(members), 1 / len(here)
        if size == 2:
            part = min(1.0, (max(members) - min(members)) / inner.ranks)
        shared = outer.oversubscription * outer.beta(1, machine.ranks_per_node)
        costs.append(UplinkCost(part * shared, (size - len(here)) / (size - 1) * shared))
    return UplinkCost(*map(max, zip(*costs, strict=True)))
