"""Cost of communication calls between hosts without GPUs: CPU time and NIC time.

A call of a group with r members on each of h hosts has two levels: shared memory within each host,
and the network between the hosts, over which each member transfers 1/r of the block.  The NIC of a
host therefore carries the same volume for any r, as if the group had one member per host.  The
model is also used if the hosts have different numbers of members.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from hpc3d.comm.communicator import received_share
from hpc3d.predict.machine.collective_costs import best
from hpc3d.trace.schema import MESSAGES

# Dict from each collective between hosts to the collectives that it performs within a host.
_INSIDE = {
    "all_gather": ("all_gather",),
    "reduce_scatter": ("reduce_scatter",),
    "all_reduce": ("reduce_scatter", "all_gather"),
    "broadcast": ("broadcast",),
    "reduce": ("reduce",),
    **dict.fromkeys(("all_to_all", *MESSAGES), ()),
}


class Crossing(NamedTuple):
    """Group of `size` members on several `hosts`.

    `local` lists the members on the host with the most members.  The NIC of that host needs
    `alpha` seconds per message and `beta` seconds per byte for this group, while it also serves
    the groups of the other ranks on the host.
    """

    size: int
    hosts: int
    local: tuple
    alpha: float
    beta: float


class Legs(NamedTuple):
    """CPU time (`work`) and network time (`wired`) of a call, in seconds."""

    work: float
    wired: float


def crossing(machine: Any, members: Sequence[int]) -> Crossing | None:
    """Return the Crossing of a group, or None if all members are on one host."""
    hosts = machine.by_node(members)
    if len(hosts) == 1:
        return None
    local, link = tuple(max(hosts, key=len)), machine.link(members)
    # If a host runs adjacent pipeline stages, only the first and the last of them use the NIC.
    apart = max(members) - min(members) if len(members) == 2 else machine.ranks_per_node
    beta = link.beta(len(local), min(apart, machine.ranks_per_node))
    return Crossing(len(members), len(hosts), local, link.alpha_s, beta)


def carried(op: str, nbytes: float, there: Crossing) -> float:
    """Return the number of bytes received by the NIC of one host during a communication call.

    `nbytes` is the number of bytes received by one member of the group.
    """
    block = nbytes / received_share(op, there.size)
    if op == "all_to_all":  # each remote member receives a different block
        block *= len(there.local)
    return block * received_share(op, there.hosts)


def legs(machine: Any, op: str, nbytes: float, members: Sequence[int]) -> Legs:
    """Return the CPU and network time of a call in which each member receives `nbytes` bytes.

    If the group is on one host, or if the ranks have GPUs, all of the time counts as CPU time.
    """
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
    """Return the CPU time in seconds that a member needs to pass `nbytes` to and from the NIC.

    If the operation has been measured in shared memory with `hosts` members, the result is the
    measured time.
    """
    table = machine.anywhere.get((op, hosts))
    return table(nbytes) if table else machine.launch_s + nbytes / machine.memory_bandwidth
