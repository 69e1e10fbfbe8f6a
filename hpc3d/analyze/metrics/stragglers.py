"""Wait times caused by each rank, and a significance test for stragglers.

Even if all ranks are identical, some rank arrives last at each call. Therefore, a rank is
considered a straggler only if both of these conditions hold:

* The rank has the longest busy time (time not blocked in calls) in k of n steps, and the
  probability that this happens to any rank by chance is at most CHANCE. For R identical ranks,
  Chernoff's bound on this probability is R exp(-n D(k/n || 1/R)).
* The median busy time of the rank exceeds the median over the other ranks by at least a fraction
  LEAST of the median step time.
"""

from __future__ import annotations

from math import exp, log
from typing import TYPE_CHECKING, Any

import numpy as np

from hpc3d.analyze.metrics.columns import hosts
from hpc3d.analyze.metrics.step import step_seconds

if TYPE_CHECKING:
    from hpc3d.analyze.metrics.wait_states import CallInstances

CHANCE = 0.05
LEAST = 0.01


def straggler_rows(calls: CallInstances) -> list[dict[str, Any]]:
    """Return one row per rank, sorted by the wait time that the rank imposes on other ranks.

    `meetings` is the number of communication calls in which the rank took part, and `last` is the
    number of these calls at which it arrived last. `imposed_s` is the total time per step that
    other ranks spend waiting for this rank; `wait_s` is the time per step that this rank spends
    waiting. A wait is attributed to the rank that arrived last, even if that rank was delayed by
    an earlier wait. The critical path shows such chains. `work_s` is the median busy time.
    `straggler` is yes or no, or None if there are too few steps for the test.
    """
    inside, ranks = calls.inside, calls.trace.attrs["world_size"]
    steps = len(np.unique(calls.trace.steps["step"]))
    meetings = np.bincount(calls.rank[inside & calls.ending], minlength=ranks)
    later = np.minimum.reduceat(calls.posted, calls.first) < calls.last
    late = np.bincount(calls.late[inside[calls.first] & later], minlength=ranks)
    wait = calls.wait[inside] * 1e-9 / steps
    imposed, waited = (np.bincount(rank[inside], wait, ranks) for rank in (calls.by, calls.rank))
    host, work = hosts(calls.trace), work_of(calls)
    slow = straggler(work, float(np.median(step_seconds(calls.trace))))
    decidable = chance(work.shape[1], work.shape[1], ranks) <= CHANCE if work.size else False
    median = np.median(work, axis=1) if work.size else np.zeros(ranks)
    return [
        {
            "rank": rank,
            "host": host.get(rank),
            "meetings": int(meetings[rank]),
            "last": int(late[rank]),
            "imposed_s": float(imposed[rank]),
            "wait_s": float(waited[rank]),
            "work_s": float(median[rank]),
            "straggler": ("yes" if rank == slow else "no") if decidable else None,
        }
        for rank in np.argsort(-imposed, kind="stable").tolist()
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


def straggler(work: np.ndarray, step: float) -> int | None:
    """Return the rank that is a straggler, or None if no rank is a straggler.

    Parameters
    ----------
    work
        Busy time in seconds, shape [ranks, steps].
    step
        Median step time in seconds.
    """
    ranks, steps = work.shape
    if ranks < 2 or not steps:
        return None
    median = np.median(work, axis=1)
    rank = int(median.argmax())
    longest = int((work[rank] > np.delete(work, rank, axis=0).max(axis=0)).sum())
    more = median[rank] - np.median(np.delete(median, rank))
    return rank if more >= LEAST * step and chance(longest, steps, ranks) <= CHANCE else None


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
