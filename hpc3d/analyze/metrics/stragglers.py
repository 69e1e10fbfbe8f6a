"""Who is waited for, and whether a rank is slower than the others by more than their scatter.

Where all ranks are alike, one of them is still the last one to come, most of the time by chance.
So a rank is called a straggler only if

* it works (is not blocked in calls) longer than every other in so many steps that chance would
  have it so for any of the ranks with a probability of CHANCE at most, by Chernoff's bound: the
  longest in k of n steps, each with probability 1/R, P <= exp(-n D(k/n || 1/R)), for R ranks;
* and in the median step it works longer than the median of the others by LEAST of a step.
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
    """Who is waited for, one row per rank, the worst first.

    In `last` of its `meetings` the rank was the last to arrive, after others; `imposed_s` are the
    seconds a step that all others together wait for its arrivals, `wait_s` those that it waits
    itself.  A wait
    counts against the rank that was waited for, although that may have waited for another before:
    the critical path tells.  `work_s` is the median step without what it is blocked in calls.
    `straggler` is yes or no, None where there are too few steps to tell either from chance.
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
    told = chance(work.shape[1], work.shape[1], ranks) <= CHANCE if work.size else False
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
            "straggler": ("yes" if rank == slow else "no") if told else None,
        }
        for rank in np.argsort(-imposed, kind="stable").tolist()
    ]


def work_of(calls: CallInstances) -> np.ndarray:
    """Seconds that each rank was not blocked in calls, [ranks, steps], in steps of all ranks."""
    trace, inside = calls.trace, calls.inside
    steps, place = np.unique(trace.steps["step"], return_inverse=True)
    shape = trace.attrs["world_size"], len(steps)
    spent = np.full(shape, np.nan)
    spent[trace.steps["rank"], place] = step_seconds(trace)
    at = np.searchsorted(steps, trace.events["step"][calls.row[inside]])
    blocked = np.zeros(shape)
    np.add.at(blocked, (calls.rank[inside], at), calls.blocked[inside] * 1e-9)
    return (spent - blocked)[:, ~np.isnan(spent).any(axis=0)]


def straggler(work: np.ndarray, step: float) -> int | None:
    """The rank that `work` [ranks, steps] names, of steps of `step` seconds; None if none."""
    ranks, steps = work.shape
    if ranks < 2 or not steps:
        return None
    median = np.median(work, axis=1)
    rank = int(median.argmax())
    longest = int((work[rank] > np.delete(work, rank, axis=0).max(axis=0)).sum())
    more = median[rank] - np.median(np.delete(median, rank))
    return rank if more >= LEAST * step and chance(longest, steps, ranks) <= CHANCE else None


def chance(count: int, steps: int, ranks: int) -> float:
    """A bound of the probability that any of `ranks` that are alike is the longest in `count` of
    some steps, or in more."""
    part, even = count / steps, 1 / ranks
    if part <= even:
        return 1.0
    rest = (1 - part) * log((1 - part) / (1 - even)) if part < 1 else 0.0
    return ranks * exp(-steps * (part * log(part / even) + rest))
