"""Stretches of time: the union of many, and what two unions have in common."""

from __future__ import annotations

import numpy as np

Stretches = tuple[np.ndarray, np.ndarray]  # starts and ends


def merged(start: np.ndarray, end: np.ndarray) -> Stretches:
    """The union of stretches as disjoint ones, in order: their starts and their ends."""
    order = np.argsort(start, kind="stable")
    start, end = start[order], np.maximum.accumulate(end[order])
    first = np.flatnonzero(np.append(True, start[1:] > end[:-1])[: len(start)])
    return start[first], end[np.append(first[1:], len(start))[: len(first)] - 1]


def before(stretches: Stretches, times: np.ndarray) -> np.ndarray:
    """How much of disjoint stretches (starts, ends) lies before each of the times."""
    start, end = stretches
    if not len(start):
        return np.zeros_like(times)
    past = np.cumsum(end - start) - (end - start)
    place = np.maximum(np.searchsorted(start, times, "right") - 1, 0)
    return past[place] + np.clip(times, start[place], end[place]) - start[place]


def in_common(one: Stretches, other: Stretches) -> int:
    """The time in both of two lists of disjoint stretches."""
    start, end = one
    return (before(other, end) - before(other, start)).sum()
