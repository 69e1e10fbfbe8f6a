"""Cost model of communication calls between hosts without GPUs: CPU time and NIC time.

If a group has r members on each of h hosts, a call has two levels: shared memory within each host,
and the network between the hosts, over which each member transfers 1/r of the block.  The traffic
of a host's NIC is therefore independent of r, as if the group had one member per host.  The model
is also used if the hosts have different numbers of members.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from hpc3d.comm.communicator import pieces_passed_on, received_share
from hpc3d.predict.machine.collective_costs import best
from hpc3d.predict.machine.uplinks import uplink_cost
from hpc3d.trace.schema import MESSAGES

# Maps each collective between hosts to the collectives within each host that are part of it.
_INSIDE = {
    "all_gather": ("all_gather",),
    "reduce_scatter": ("reduce_scatter",),
    "all_reduce": ("reduce_scatter", "all_gather"),
    "broadcast": ("broadcast",),
    "reduce": ("reduce",),
    **dict.fromkeys(("all_to_all", *MESSAGES), ()),
}


class Crossing(NamedTuple):
    """Group of `size` ranks on several `hosts`.

    `local` lists the members on the host with the most members.  `alpha` (seconds per message) and
    `beta` (seconds per byte) are the costs of this group on that host's NIC while the other ranks
    of the host communicate in their own groups.  In an all-to-all, a byte takes `spread` seconds.
    """

    size: int
    hosts: int
    local: tuple
    alpha: float
    beta: float
    spread: float


class Legs(NamedTuple):
    """CPU time `work` and network time `wired` of a communication call, in seconds."""

    work: float
    wired: float


def crossing(machine: Any, members: Sequence[int]) -> Crossing | None:
    """Return the Crossing (communication costs between hosts) of a group of ranks.

    The result is `None` if all members are on one host.
    """
    (hosts, local), size = machine.nodes(members), len(members)
    if hosts == 1:
        return None
    link = machine.link(members)
    # If adjacent pipeline stages are on one host, only the first and the last of them use the NIC.
    apart = max(members) - min(members) if size == 2 else machine.ranks_per_node
    beta = link.beta(len(local), min(apart, machine.ranks_per_node))
    up = uplink_cost(machine, members)
    # The NIC carries the data that all local members exchange with the other members.
    spread = up.spread * (size - 1) / (size - len(local)) / len(local)
    betas = max(beta, up.beta), max(beta, spread)
    return Crossing(size, hosts, tuple(local), link.alpha_s, *betas)


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

    If the group is on one host, or if the ranks have GPUs, the network time is 0 and the total
    time counts as CPU time.
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
    return Legs(work, _on_wire(op, there, across))


def _on_wire(op: str, there: Crossing, nbytes: float) -> float:
    """Return the network time of a call in which each NIC receives `nbytes`.

    In a broadcast to 2 to 7 other hosts, the root sends pieces to the other hosts, and they
    exchange these pieces while the root sends the next ones (hpc3d.comm.all_pairs).
    """
    each = pieces_passed_on(there.hosts, nbytes) if op == "broadcast" else 0
    if not each:
        beta = there.spread if op == "all_to_all" else there.beta
        return best(op, there.hosts, nbytes, there.alpha, beta)
    passed_on = (there.hosts - 2) / (there.hosts - 1) / each
    return 2 * there.alpha + (1 + passed_on) * nbytes * there.beta


def _handed(machine: Any, op: str, nbytes: float, hosts: int) -> float:
    """Return a member's CPU time, in seconds, to transfer `nbytes` to and from the NIC.

    If the time of the operation has been measured in shared memory with `hosts` members, this
    measured time is returned.
    """
    table = machine.anywhere.get((op, hosts))
    return table(nbytes) if table else machine.launch_s + nbytes / machine.memory_bandwidth
