"""Who receives how much from whom, and how fast.

Sizes and rates are those of nccl-tests (doc/PERFORMANCE.md): S is the whole array, of an
all-gather what comes out and of a reduce-scatter what goes in; algbw = S / t; busbw = algbw times
a factor for the n members, which makes it the rate of each member's link.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from hpc3d.analyze.metrics.columns import combinations, event_values, labelled, named
from hpc3d.comm.communicator import EXCHANGES, received_share
from hpc3d.trace.schema import item_sizes

if TYPE_CHECKING:
    from hpc3d.analyze.metrics.wait_states import CallInstances
    from hpc3d.trace.table import Table


def communication_matrix(calls: CallInstances, axis: str | None = None) -> np.ndarray:
    """Bytes a step that go from each rank to each other, [sender, receiver], along a mesh axis or
    along all: whose data it is, whatever way the library sends it.

    A message counts where it is received.  What is broadcast comes from the root, and what is
    reduced goes to it; what a rank receives in other collectives comes from the other members in
    equal parts.
    """
    events, groups = calls.trace.events, calls.trace.groups
    ranks, row = calls.trace.attrs["world_size"], calls.row[calls.inside]
    along = np.array([axis in (None, group.axis) for group in groups], bool)
    row = row[along[events["group"][row]]]
    peer, rank, received = (events[key][row] for key in ("peer", "rank", "bytes"))
    arrives, leaves, equal = (
        labelled(events, "op", ops)[row] for ops in (("recv", "broadcast"), ("reduce",), EXCHANGES)
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
    """The size of the blocks that went into calls."""
    return events["count"][row] * item_sizes(events.labels("dtype"))[events["dtype"][row]]


def bandwidth_rows(calls: CallInstances) -> list[dict[str, Any]]:
    """Number, median time and rates of what happened inside of steps, by axis, operation, members
    and size in bytes; a message has the operation send.

    The time is from the last arrival to the last end, of a message to the end of the receive, on
    rank 0's clock.  Where a member does something else between its call and its wait the end may
    be late: `later` is the share of such calls.  A time that is not positive, because clocks
    disagree, has no rate.
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
    values = zip(*(column.tolist() for column in columns.values()))
    what = named(calls.trace, ("axis", "op"), kinds)
    rows = [names | dict(zip(columns, each)) for names, each in zip(what, values)]
    return [row | _rates(row) for row in rows]


def _rates(row):
    """Bytes a second, None where they are not known."""
    if row["size"] <= 0 or row["seconds"] <= 0:
        return {"algbw": None, "busbw": None}
    algbw = row["size"] / row["seconds"]
    return {"algbw": algbw, "busbw": algbw * received_share(row["op"], row["members"])}


def _instances_in_steps(calls):
    """The kinds (axis, op, members, size), and of each instance that is whole and inside of steps
    its kind, its time in ns, and the share of calls that were not waited for at once."""
    events, row, first = calls.trace.events, calls.row, calls.first
    axis, members = event_values(calls.trace, "axis", row[first]), calls.members
    op = np.minimum.reduceat(events["op"][row], first)  # the code of send is below that of recv
    size, size_of = np.unique(_sizes(calls, members), return_inverse=True)
    whole = np.add.reduceat(calls.inside & calls.ending, first, dtype=int) == members
    kinds, kind = combinations([each[whole] for each in (axis, op, members, size_of)])
    kinds[:, 3] = size[kinds[:, 3]]
    # A send ends when its rank has time for it.
    ending = calls.ending & ~labelled(events, "op", ["send"])[row]
    time = np.maximum.reduceat(np.where(ending, calls.end, calls.posted), first) - calls.last
    later = ending & (calls.posted < calls.start)
    later, ends = (np.add.reduceat(each, first, dtype=int) for each in (later, ending))
    return kinds, kind, time[whole], (later / np.maximum(1, ends))[whole]


def _sizes(calls, members):
    """S of each instance, in bytes: the largest block that went in, of all-gathers all of them."""
    events, row, first = calls.trace.events, calls.row, calls.first
    block = np.maximum.reduceat(block_bytes(events, row), first)
    return block * np.where(labelled(events, "op", ["all_gather"])[row[first]], members, 1)
