"""Unions and intersections of time intervals."""

from __future__ import annotations

import numpy as np

_Intervals = tuple[np.ndarray, np.ndarray]  # start and end times


def merged(start: np.ndarray, end: np.ndarray) -> _Intervals:
    """Return the union of time intervals as sorted, disjoint intervals (starts, ends)."""
    order = np.argsort(start, kind="stable")
    start, end = start[order], np.maximum.accumulate(end[order])
    first = np.flatnonzero(np.append(True, start[1:] > end[:-1])[: len(start)])
    return start[first], end[np.append(first[1:], len(start))[: len(first)] - 1]


def before(intervals: _Intervals, times: np.ndarray) -> np.ndarray:
    """For each time in `times`, return the total length of disjoint `intervals` before it."""
    start, end = intervals
    if not len(start):
        return np.zeros_like(times)
    past = np.cumsum(end - start) - (end - start)
    index = np.maximum(np.searchsorted(start, times, "right") - 1, 0)
    return past[index] + np.clip(times, start[index], end[index]) - start[index]


def in_common(one: _Intervals, other: _Intervals) -> int:
    """Return the total length of the intersection of two sets of disjoint intervals."""
    start, end = one
    return (before(other, end) - before(other, start)).sum()
