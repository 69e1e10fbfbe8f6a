"""Communication matrix, and bandwidth of collectives and messages.

Sizes and rates are defined as in nccl-tests (doc/PERFORMANCE.md). S is the size of the complete
array: the result of an all-gather, or the input of a reduce-scatter. For a call that takes t
seconds, algbw = S / t. busbw is algbw times a factor that depends on the number of members, so
that it is comparable to the bandwidth of each member's link.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from hpc3d.analyze.metrics.columns import combinations, event_values, named, rows_of, with_label
from hpc3d.comm.communicator import EXCHANGES, received_share
from hpc3d.trace.schema import item_sizes

if TYPE_CHECKING:
    from hpc3d.analyze.metrics.wait_states import CallInstances
    from hpc3d.trace.table import Table


def communication_matrix(calls: CallInstances, axis: str | None = None) -> np.ndarray:
    """Return the number of bytes sent per step from rank to rank, shape [sender, receiver].

    The matrix attributes the data received by a rank to the rank where the data originated,
    regardless of the route chosen by the MPI library. Messages are counted at the receiver. The
    root is the only sender of a broadcast and the only receiver of a reduction. In other
    collectives, a rank receives equal shares from all other members.

    Parameters
    ----------
    axis
        Only count communication along this mesh axis; by default, along all axes.
    """
    events, groups = calls.trace.events, calls.trace.groups
    ranks, row = calls.trace.attrs["world_size"], calls.row[calls.inside]
    along = np.array([axis in (None, group.axis) for group in groups], bool)
    row = row[along[events["group"][row]]]
    peer, rank, received = (events[key][row] for key in ("peer", "rank", "bytes"))
    arrives, leaves, equal = (
        with_label(events, "op", ops)[row]
        for ops in (("recv", "broadcast"), ("reduce",), EXCHANGES)
    )
    arrives, leaves = arrives & (peer >= 0), leaves & (peer >= 0) & (peer != rank)
    matrix = np.zeros((ranks, ranks))
    np.add.at(matrix, (peer[arrives], rank[arrives]), received[arrives])
    np.add.at(matrix, (rank[leaves], peer[leaves]), block_bytes(events, row[leaves]))
    pairs, pair = combinations([events["group"][row[equal]], rank[equal]])
    amounts = np.bincount(pair, received[equal], len(pairs)).tolist()
    for (number, receiver), amount in zip(pairs.tolist(), amounts):
        others = [member for member in groups[number].members if member != receiver]
        matrix[others, receiver] += amount / max(1, len(others))
    return matrix / len(np.unique(calls.trace.steps["step"]))


def block_bytes(events: Table, row: np.ndarray) -> np.ndarray:
    """Return the input block size in bytes of each call in the given rows of /events."""
    return events["count"][row] * item_sizes(events.labels("dtype"))[events["dtype"][row]]


def bandwidth_rows(calls: CallInstances) -> list[dict[str, Any]]:
    """Return the count, median time and bandwidth of communication calls.

    There is one row per mesh axis, operation, group size and message size. The send and the
    receive of a message count as one `send`. A call is timed from when the last rank enters the
    call until the last rank leaves it (for a message, until the receive completes), on the clock
    of rank 0. This time is overestimated if a rank does other work between the call and the wait;
    `later` is the share of calls for which this is the case. If the clocks disagree, the median
    time can be zero or negative; in this case, no bandwidth is computed.
    """
    kinds, kind, time, later = _instances_in_steps(calls)
    order = np.lexsort((time, kind))
    count = np.bincount(kind, minlength=len(kinds))
    first = np.cumsum(count) - count
    low, high = (time[order[first + half]] for half in ((count - 1) // 2, count // 2))
    columns = {
        "members": kinds[:, 2],
        "size": kinds[:, 3],
        "count": count,
        "seconds": (low + high) * 0.5e-9,
        "later": np.bincount(kind, later, len(kinds)) / count,
    }
    rows = []
    for names, row in zip(named(calls.trace, ("axis", "op"), kinds), rows_of(columns)):
        known = row["size"] > 0 and row["seconds"] > 0
        algbw = row["size"] / row["seconds"] if known else None
        busbw = algbw * received_share(names["op"], row["members"]) if known else None
        rows.append(names | row | {"algbw": algbw, "busbw": busbw})
    return rows


def _instances_in_steps(calls):
    """Classify the complete call instances by axis, operation, number of members and size.

    An instance is complete if the calls of all members are recorded and in completed steps.

    Returns
    -------
    kinds
        Distinct (axis, op, members, size) tuples, one per row.
    kind
        Row index in `kinds` for each instance.
    time
        Duration of each instance in ns.
    later
        For each instance, the share of its calls that have a deferred wait (nonblocking calls).
    """
    events, row, first = calls.trace.events, calls.row, calls.first
    axis, members = event_values(calls.trace, "axis", row[first]), calls.members
    # A message, which consists of a send and a recv, is listed as a send (the lower op code).
    op = np.minimum.reduceat(events["op"][row], first)
    size, size_of = np.unique(_sizes(calls, members), return_inverse=True)
    complete = np.add.reduceat(calls.inside & calls.ending, first, dtype=int) == members
    kinds, kind = combinations([each[complete] for each in (axis, op, members, size_of)])
    kinds[:, 3] = size[kinds[:, 3]]
    # Exclude sends, because a send's recorded end time only depends on when the sender waits.
    ending = calls.ending & ~with_label(events, "op", ["send"])[row]
    time = np.maximum.reduceat(np.where(ending, calls.end, calls.posted), first) - calls.last
    later = ending & (calls.posted < calls.start)
    later, ends = (np.add.reduceat(each, first, dtype=int) for each in (later, ending))
    return kinds, kind, time[complete], (later / np.maximum(1, ends))[complete]


def _sizes(calls, members):
    """Return the size S of each instance in bytes.

    For an all-gather, S is the size of the largest input block multiplied by the number of
    members. For any other operation, S is the size of the largest input block.
    """
    events, row, first = calls.trace.events, calls.row, calls.first
    block = np.maximum.reduceat(block_bytes(events, row), first)
    return block * np.where(with_label(events, "op", ["all_gather"])[row[first]], members, 1)
