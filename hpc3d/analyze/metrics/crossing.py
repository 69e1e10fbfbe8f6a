"""Inter-host traffic: calls and bytes of each host, and the bytes received by its NIC.

A group with the same number of ranks on each of its h hosts uses two-level collectives, within and
between hosts. The NIC of a host therefore receives as much data as one member of a group of h
ranks: (h - 1)/h of the complete block for an all-gather or reduce-scatter, twice as much for an
all-reduce, and one block per host for a broadcast or reduction. If the hosts have different
numbers of ranks, the group uses MPI's own collectives. In these collectives and in an all-to-all,
each rank is assumed to receive its data separately.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import numpy as np

from hpc3d.analyze.metrics.collectives import block_bytes, communication_matrix
from hpc3d.analyze.metrics.columns import combinations, hosts, rows_of
from hpc3d.trace.schema import MESSAGES

if TYPE_CHECKING:
    from hpc3d.analyze.metrics.wait_states import CallInstances

_LEVELS = ("all_gather", "reduce_scatter", "all_reduce")
_UNKNOWN = "unknown"


def host_traffic_rows(calls: CallInstances) -> list[dict[str, Any]]:
    """Return one row per host with its traffic per step, or no rows if there is only one host.

    The columns are the number of ranks on the host, the number of calls by these ranks that
    involve ranks on other hosts, the bytes received by these ranks (in total, and from other
    hosts), and the bytes received by the NIC.
    """
    matrix, names, host_of = _host_matrix(calls)
    if len(names) < 2:
        return []
    called, received = _nic_traffic(calls, host_of, len(names))
    columns = {
        "host": np.array(names, object),
        "ranks": np.bincount(host_of),
        "calls": called,
        "bytes": matrix.sum(0),
        "crossing": matrix.sum(0) - matrix.diagonal(),
        "on_cards": received,
    }
    return rows_of(columns)


def host_pair_rows(calls: CallInstances) -> list[dict[str, Any]]:
    """Return one row per pair of hosts with traffic: sender, receiver, and bytes per step."""
    matrix, names, _ = _host_matrix(calls)
    if len(names) < 2:
        return []
    pairs = zip(np.argwhere(matrix).tolist(), matrix[matrix.nonzero()].tolist())
    keys = ("sender_host", "receiver_host", "bytes")
    return [dict(zip(keys, (names[a], names[b], amount))) for (a, b), amount in pairs]


def _host_matrix(calls: CallInstances) -> tuple[np.ndarray, list[str], np.ndarray]:
    """Return the traffic between hosts, the host names, and the host index of each rank.

    The traffic is in bytes per step, with shape [sender host, receiver host].
    """
    of_ranks = [host or _UNKNOWN for host in hosts(calls.trace).values()]
    names = [*dict.fromkeys(of_ranks)]
    host_of = np.array([names.index(host) for host in of_ranks], int)
    matrix = np.zeros((len(names), len(names)))
    if len(names) > 1:
        np.add.at(matrix, (host_of[:, None], host_of[None, :]), communication_matrix(calls))
    return matrix, names, host_of


def _nic_traffic(calls, host_of, count):
    """For each host, return the inter-host calls and the bytes received by its NIC, per step."""
    events, groups = calls.trace.events, calls.trace.groups
    row = calls.row[calls.inside]
    kinds, kind = combinations([events[key][row] for key in ("group", "op", "rank", "peer")])
    columns = events["bytes"][row], block_bytes(events, row), np.ones(len(row))
    amounts = np.transpose([np.bincount(kind, values, len(kinds)) for values in columns])
    ops = events.labels("op")
    called, received = np.zeros((2, count))
    for (group, op, rank, peer), (nbytes, block, times) in zip(kinds.tolist(), amounts):
        of_group = Counter(host_of[[*groups[group].members]].tolist())
        here, there = host_of[rank], host_of[peer] if peer >= 0 else None
        message = ops.get(op) in MESSAGES
        inter_host = there != here if message else len(of_group) > 1
        if inter_host:
            called[here] += times
            host = there if ops.get(op) == "reduce" else here
            share = _share(ops.get(op), here == there, of_group, here)
            received[host] += share * (block if ops.get(op) == "reduce" else nbytes)
    steps = len(np.unique(calls.trace.steps["step"]))
    return called / steps, received / steps


def _share(op, with_root, of_group, here):
    """Return the ratio of the bytes that a NIC receives to the bytes of one rank's call.

    The rank is on host `here`. For a reduction, the ratio compares the bytes received by the NIC
    of the root's host with the bytes sent by the rank. For any other call, it compares the bytes
    received by the NIC of `here` with the bytes received by the rank. `of_group` maps each host to
    its number of group members.
    """
    size, level = sum(of_group.values()), len({*of_group.values()}) == 1
    if op in ("broadcast", "reduce"):
        return 0 if with_root else 1 / of_group[here] if level else 1
    if op in MESSAGES:
        return int(op == "recv")
    if op in _LEVELS and level:
        return (len(of_group) - 1) / (size - 1)
    return (size - of_group[here]) / (size - 1)
