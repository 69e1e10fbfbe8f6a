"""Wait times caused by each rank, and a significance test for stragglers.

A straggler is looked for among peers: ranks that do the same work, because they have the same
pipeline stage and the same share of the experts. Differences between stages are stage imbalance
(breakdown.py). Even if all peers are identical, some rank arrives last at each call. Therefore, a
rank is considered a straggler only if both of these conditions hold:

* The rank has the longest busy time (time not blocked in calls) of its peers in k of n steps, and
  the probability that this happens to any rank by chance is at most CHANCE. For R identical peers,
  Chernoff's bound on this probability is R exp(-n D(k/n || 1/R)). CHANCE is divided by the number
  of groups of peers.
* The median busy time of the rank exceeds the median over its peers by at least a fraction LEAST
  of the median step time.
"""

from __future__ import annotations

from math import exp, log
from typing import TYPE_CHECKING, Any

import numpy as np

from hpc3d.analyze.metrics.columns import hosts, peers
from hpc3d.analyze.metrics.step import step_seconds

if TYPE_CHECKING:
    from hpc3d.analyze.metrics.wait_states import CallInstances

CHANCE = 0.05
LEAST = 0.01


def straggler_rows(calls: CallInstances) -> list[dict[str, Any]]:
    """Return one row per rank: stragglers first, then by the wait time imposed on peers.

    `peers` is the number of other ranks that do the same work. `meetings` is the number of
    communication calls in which the rank took part, and `last` is the number of these calls at
    which it arrived last. `imposed_s` is the total time per step that peers spend waiting for this
    rank; `wait_s` is the time per step that this rank spends waiting for any rank. A wait is
    attributed to the rank that arrived last, even if that rank was delayed by an earlier wait. The
    critical path shows such chains. `work_s` is the median busy time. `straggler` is yes or no, or
    None if there are too few steps or no peers for the test.
    """
    inside, ranks = calls.inside, calls.trace.attrs["world_size"]
    group = peers(calls.trace)
    steps = len(np.unique(calls.trace.steps["step"]))
    meetings = np.bincount(calls.rank[inside & calls.ending], minlength=ranks)
    later = np.minimum.reduceat(calls.posted, calls.first) < calls.last
    late = np.bincount(calls.late[inside[calls.first] & later], minlength=ranks)
    wait = calls.wait[inside] * 1e-9 / steps
    waited = np.bincount(calls.rank[inside], wait, ranks)
    among = group[calls.by[inside]] == group[calls.rank[inside]]
    imposed = np.bincount(calls.by[inside], wait * among, ranks)
    host, work = hosts(calls.trace), work_of(calls)
    found = stragglers(work, float(np.median(step_seconds(calls.trace))), group)
    median = np.median(work, axis=1) if work.size else np.zeros(ranks)
    order = sorted(range(ranks), key=lambda rank: (not found.get(rank), -imposed[rank]))
    return [
        {
            "rank": rank,
            "host": host.get(rank),
            "peers": int((group == group[rank]).sum()) - 1,
            "meetings": int(meetings[rank]),
            "last": int(late[rank]),
            "imposed_s": float(imposed[rank]),
            "wait_s": float(waited[rank]),
            "work_s": float(median[rank]),
            "straggler": ("yes" if found[rank] else "no") if rank in found else None,
        }
        for rank in order
    ]


def work_of(calls: CallInstances) -> np.ndarray:
    """Return the busy time in seconds, shape [ranks, steps], of steps completed by all ranks."""
    trace, inside = calls.trace, calls.inside
    steps, index = np.unique(trace.steps["step"], return_inverse=True)
    shape = trace.attrs["world_size"], len(steps)
    spent = np.full(shape, np.nan)
    spent[trace.steps["rank"], index] = step_seconds(trace)
    step = np.searchsorted(steps, trace.events["step"][calls.row[inside]])
    blocked = np.zeros(shape)
    np.add.at(blocked, (calls.rank[inside], step), calls.blocked[inside] * 1e-9)
    return (spent - blocked)[:, ~np.isnan(spent).any(axis=0)]


def stragglers(work: np.ndarray, step: float, group: np.ndarray) -> dict[int, bool]:
    """Return a dict from rank to True if the rank is a straggler.

    Ranks without peers, and ranks of a group with too few steps for the test, are omitted.

    Parameters
    ----------
    work
        Busy time in seconds, shape [ranks, steps].
    step
        Median step time in seconds.
    group
        Group of peers of each rank, shape [ranks].
    """
    numbers, steps, found = np.unique(group), work.shape[1], {}
    for number in numbers.tolist():
        members = np.flatnonzero(group == number)
        limit = CHANCE / len(numbers)
        if len(members) > 1 and steps and chance(steps, steps, len(members)) <= limit:
            slow = straggler(work[members], step, limit)
            found |= {rank: index == slow for index, rank in enumerate(members.tolist())}
    return found


def straggler(work: np.ndarray, step: float, limit: float = CHANCE) -> int | None:
    """Return the index of the rank that is a straggler among its peers, or None.

    Parameters
    ----------
    work
        Busy time in seconds, shape [ranks, steps].
    step
        Median step time in seconds.
    limit
        Maximum probability of a false positive.
    """
    ranks, steps = work.shape
    if ranks < 2 or not steps:
        return None
    median = np.median(work, axis=1)
    rank = int(median.argmax())
    longest = int((work[rank] > np.delete(work, rank, axis=0).max(axis=0)).sum())
    more = median[rank] - np.median(np.delete(median, rank))
    return rank if more >= LEAST * step and chance(longest, steps, ranks) <= limit else None


def chance(count: int, steps: int, ranks: int) -> float:
    """Return the Chernoff bound on the probability of a false positive.

    A false positive means that one of `ranks` identical ranks happens to be the slowest in at
    least `count` of `steps` steps.
    """
    share, even = count / steps, 1 / ranks
    if share <= even:
        return 1.0
    rest = (1 - share) * log((1 - share) / (1 - even)) if share < 1 else 0.0
    return ranks * exp(-steps * (share * log(share / even) + rest))
