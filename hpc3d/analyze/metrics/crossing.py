"""What crosses from host to host: of each host the calls, and the bytes that its card receives.

A group with as many ranks on each of its h hosts sends in two levels, inside of a host and then
between hosts, so a host's card carries what one member of a group of h would: of an all-gather and
a reduce-scatter (h - 1)/h of the whole block, of an all-reduce twice that, of a broadcast and a
reduction the block once a host.  Where hosts have different numbers of its ranks MPI's own
collectives send, and there, as in an all-to-all, a byte crosses as often as ranks want it.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import numpy as np

from hpc3d.analyze.metrics.collectives import block_bytes, communication_matrix
from hpc3d.analyze.metrics.columns import combinations, hosts
from hpc3d.trace.schema import MESSAGES

if TYPE_CHECKING:
    from hpc3d.analyze.metrics.wait_states import CallInstances

_LEVELS = ("all_gather", "reduce_scatter", "all_reduce")
_UNKNOWN = "unknown"


def crossing_rows(calls: CallInstances) -> list[dict[str, Any]]:
    """One row per host, none of one host alone: its ranks and, of a step, their calls that leave
    it, the bytes that they receive, those of them that come from other hosts, and what the card
    receives."""
    matrix, names, place = _host_matrix(calls)
    if len(names) < 2:
        return []
    called, on_cards = _on_cards(calls, place, len(names))
    columns = {
        "host": names,
        "ranks": np.bincount(place).tolist(),
        "calls": called.tolist(),
        "bytes": matrix.sum(0).tolist(),
        "crossing": (matrix.sum(0) - matrix.diagonal()).tolist(),
        "on_cards": on_cards.tolist(),
    }
    return [dict(zip(columns, row)) for row in zip(*columns.values())]


def crossing_pair_rows(calls: CallInstances) -> list[dict[str, Any]]:
    """One row per pair of hosts: whose data goes to whom in a step, in bytes."""
    matrix, names, _ = _host_matrix(calls)
    if len(names) < 2:
        return []
    pairs = zip(np.argwhere(matrix).tolist(), matrix[matrix.nonzero()].tolist())
    keys = ("sender_host", "receiver_host", "bytes")
    return [dict(zip(keys, (names[a], names[b], amount))) for (a, b), amount in pairs]


def _host_matrix(calls: CallInstances) -> tuple[np.ndarray, list[str], np.ndarray]:
    """Bytes a step from host to host, [sender, receiver]; the hosts' names; each rank's host."""
    of_ranks = [host or _UNKNOWN for host in hosts(calls.trace).values()]
    names = [*dict.fromkeys(of_ranks)]
    place = np.array([names.index(host) for host in of_ranks], int)
    matrix = np.zeros((len(names), len(names)))
    if len(names) > 1:
        np.add.at(matrix, (place[:, None], place[None, :]), communication_matrix(calls))
    return matrix, names, place


def _on_cards(calls, place, count):
    """Of each host the calls of a step that go beyond it, and the bytes that its card receives."""
    events, groups = calls.trace.events, calls.trace.groups
    row = calls.row[calls.inside]
    kinds, kind = combinations([events[key][row] for key in ("group", "op", "rank", "peer")])
    amounts = np.transpose(
        [np.bincount(kind, values, len(kinds)) for values in (events["bytes"][row],
         block_bytes(events, row), np.ones(len(row)))]
    )  # fmt: skip
    ops = events.labels("op")
    called, received = np.zeros((2, count))
    for (group, op, rank, peer), (nbytes, block, times) in zip(kinds.tolist(), amounts):
        of_group = Counter(place[[*groups[group].members]].tolist())
        here, there = place[rank], place[peer] if peer >= 0 else None
        message = ops.get(op) in MESSAGES
        beyond = there != here if message else len(of_group) > 1
        called[here] += times * beyond
        if beyond:
            host = there if ops.get(op) == "reduce" else here
            share = _share(ops.get(op), here == there, of_group, here)
            received[host] += share * (block if ops.get(op) == "reduce" else nbytes)
    steps = len(np.unique(calls.trace.steps["step"]))
    return called / steps, received / steps


def _share(op, with_root, of_group, here):
    """Of what a rank on host `here` receives, of a reduction what it gives: the share that a card
    receives.  `of_group` are the numbers of the group's ranks by host."""
    size, level = sum(of_group.values()), len({*of_group.values()}) == 1
    if op in ("broadcast", "reduce"):
        return 0 if with_root else 1 / of_group[here] if level else 1
    if op in MESSAGES:
        return int(op == "recv")
    if op in _LEVELS and level:
        return (len(of_group) - 1) / (size - 1)
    return (size - of_group[here]) / (size - 1)
