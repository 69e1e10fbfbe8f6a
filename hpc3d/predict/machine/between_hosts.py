"""Calls between hosts without devices: what their cores do, and what their cards carry.

Where groups have r members on each of h hosts, a call goes in two levels: inside the hosts by
shared memory, and across, where each member carries 1/r of the block.  So the card of a host
carries what that of one member of h would, however many members the host has.  Groups with more
members on one host than on another are taken for such, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from hpc3d.comm.communicator import received_share
from hpc3d.predict.machine.collective_costs import best
from hpc3d.trace.schema import MESSAGES

# Of each call what is done inside the hosts; across it is the call itself.
_INSIDE = {
    "all_gather": ("all_gather",),
    "reduce_scatter": ("reduce_scatter",),
    "all_reduce": ("reduce_scatter", "all_gather"),
    "broadcast": ("broadcast",),
    "reduce": ("reduce",),
    **dict.fromkeys(("all_to_all", *MESSAGES), ()),
}


class Crossing(NamedTuple):
    """A group on several `hosts`: its members on one of them, and `alpha` seconds a message and
    `beta` seconds a byte that this host's card carries for the group, while the others of the
    host carry theirs."""

    size: int
    hosts: int
    local: tuple
    alpha: float
    beta: float


class Legs(NamedTuple):
    """Seconds of a call: those of a core, and those of the wire."""

    work: float
    wired: float


def crossing(machine: Any, members: Sequence[int]) -> Crossing | None:
    """The Crossing of a group; None if all of it are on one host."""
    hosts = machine.by_node(members)
    if len(hosts) == 1:
        return None
    local, link = tuple(max(hosts, key=len)), machine.link(members)
    # Of a pipeline's stages those send that are next to another host.
    apart = max(members) - min(members) if len(members) == 2 else machine.ranks_per_node
    beta = link.beta(len(local), min(apart, machine.ranks_per_node))
    return Crossing(len(members), len(hosts), local, link.alpha_s, beta)


def carried(op: str, nbytes: float, there: Crossing) -> float:
    """Bytes that a host's card receives for a call of a group with this Crossing."""
    block = nbytes / received_share(op, there.size)
    if op == "all_to_all":  # to each member on another host a part of its own
        block *= len(there.local)
    return block * received_share(op, there.hosts)


def legs(machine: Any, op: str, nbytes: float, members: Sequence[int]) -> Legs:
    """The Legs of a call whose trace counts `nbytes`; all of it is work where no card is."""
    there = machine.crossing(members) if machine.cores else None
    if there is None:
        return Legs(machine.call(op, nbytes, members), 0.0)
    block, local = nbytes / received_share(op, there.size), len(there.local)
    inside = _INSIDE[op] if local > 1 else ()
    work = sum(
        machine.call(each, block * received_share(each, local), there.local) for each in inside
    )
    across = carried(op, nbytes, there)
    work += _handed(machine, op, across / local, there.hosts)
    return Legs(work, best(op, there.hosts, across, there.alpha, there.beta))


def _handed(machine: Any, op: str, nbytes: float, hosts: int) -> float:
    """Seconds of a core that hands a card its part of a call and takes what comes: those
    that the call takes among as many members in memory, if that was measured."""
    table = machine.anywhere.get((op, hosts))
    return table(nbytes) if table else machine.launch_s + nbytes / machine.memory_bandwidth
