"""The partition whose heaviest stage is lightest: the objective of the literature on placement
("max-load" in Tarnawski et al. 2020, arXiv:2006.16423), one device per stage.

T[I, r] = min over J > I of max(T[J, r - 1], load(J - I)), where r stages share what a downset I
leaves.  Over all downsets it is exact; a chain of sorted atoms is the fast path.
"""

from __future__ import annotations

import numpy as np

from hpc3d.partition.downsets import Chain, Downsets
from hpc3d.partition.stages import Limits


def lightest(cuts: Downsets | Chain, limits: Limits) -> list[int] | None:
    """The downsets behind the stages of the partition into at most `limits.ranks` with the least
    load of the heaviest stage, and of those one with few; None if none fits the memory."""
    following, load = table(cuts, limits)
    least = load[0].min()
    return None if np.isinf(least) else path(following, int((load[0] <= least).argmax()))


def path(following: np.ndarray, stages: int) -> list[int]:
    """The downsets behind so many stages, from the first on, by a `table`."""
    at, ends = 0, []
    for left in range(stages, 0, -1):
        at = int(following[at, left])
        ends.append(at)
    return ends


def table(cuts: Downsets | Chain, limits: Limits) -> tuple[np.ndarray, np.ndarray]:
    """By downset and number of stages behind it: the next downset of the optimum, and T."""
    width = min(limits.ranks, cuts.count - 1) + 1
    load = np.full((cuts.count, width), np.inf)
    following = np.full((cuts.count, width), -1, np.int32)
    load[-1, 0] = 0.0
    seconds = cuts.forward + cuts.backward
    in_flight = np.minimum(np.arange(1, width), limits.microbatches)
    if limits.all_in_flight:
        in_flight = np.full(width - 1, limits.microbatches)
    for before in range(cuts.count - 2, -1, -1):
        after = cuts.after(before)
        stage = seconds[after] - seconds[before] + limits.seconds(cuts.moved(before, after))
        candidates = np.maximum(load[after, :-1], stage[:, None])
        if limits.memory is not None:
            received = cuts.crossing[before] if limits.keeps_received else 0.0
            saved = (cuts.saved[after] - cuts.saved[before] + received)[:, None] * in_flight
            fixed = cuts.fixed(before, after)[:, None]
            candidates[fixed + saved > limits.memory] = np.inf
        chosen = candidates.argmin(0)
        load[before, 1:] = candidates[chosen, np.arange(width - 1)]
        following[before, 1:] = after[chosen]
    return following, load
