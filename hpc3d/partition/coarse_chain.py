"""Reduce a chain of atoms to a few candidate cuts for a joint search of stage boundaries."""

from __future__ import annotations

from collections.abc import Callable
from math import inf

import numpy as np

from hpc3d.partition.evaluation import ModelCosts, Wire

_SHORT, _LONG = 1e-6, 64e6  # message sizes in bytes for fitting latency and bandwidth


def positions_of(costs: ModelCosts, ranks: int, blocks: int) -> np.ndarray:
    """Return the candidate cuts of the chain as atom indices, including both ends.

    The cuts divide the chain into `blocks` blocks. Starting from single atoms, the algorithm
    repeatedly merges the two adjacent blocks with the lowest score. The score is max(t, m) - s.
    Here, t and m are the merged block's fractions of the model's time and memory, and s is the
    time to send values across the cut between the two blocks, divided by the model's time. Cuts
    crossed by few bytes therefore tend to remain.
    """
    chain = costs.chain(costs.rows(1, 2 * ranks))
    seconds = chain.forward + chain.backward
    border = 2 * border_of(costs, ranks).seconds(chain.crossing) / seconds[-1]
    fixed = np.array([float(chain.fixed(0, end)) for end in range(chain.count)])
    shares = np.stack([seconds / seconds[-1], fixed / max(1.0, fixed[-1])])
    positions = np.arange(chain.count)
    while len(positions) > blocks + 1:
        joined = shares[:, positions[2:]] - shares[:, positions[:-2]]
        joined = joined.max(0) - border[positions[1:-1]]
        positions = np.delete(positions, 1 + joined.argmin())
    return positions


def border_of(costs: ModelCosts, ranks: int) -> Wire:
    """Return the latency and bandwidth of messages across a stage boundary.

    If the ranks span several nodes, the adjacent stages are assumed to be on different nodes.
    """
    last = costs.machine.ranks_per_node if ranks > costs.machine.ranks_per_node else 1
    return _wire(lambda n: costs.message(n, range(last - 1, last), range(last, last + 1)))


def sums_of(costs: ModelCosts, replicas: int) -> Wire:
    """Return the latency and bandwidth of a gradient all-reduce over `replicas` ranks."""
    return _wire(lambda nbytes: costs.summed(nbytes, range(replicas)))


def _wire(seconds: Callable[[float], float]) -> Wire:
    short, long = seconds(_SHORT), seconds(_LONG)
    return Wire(short, _LONG / (long - short) if long > short else inf)


class Ranges:
    """Costs of all possible stages with `rows` samples per microbatch.

    The arrays are indexed [first cut, last cut]; `crossing` has one entry per cut.
    """

    def __init__(self, costs: ModelCosts, rows: int, positions: np.ndarray) -> None:
        chain = costs.chain(rows)
        self.forward, self.backward, self.weight = (
            each[positions][None] - each[positions][:, None]
            for each in (chain.forward, chain.backward, chain.weight)
        )
        self.forward += costs.run.forward
        self.backward += costs.run.backward
        self.fixed = np.array([chain.fixed(position, positions) for position in positions])
        self.trained = np.array([chain.trained(position, positions) for position in positions])
        self.fed = np.array([chain.fed(position, positions) for position in positions])
        self.crossing = chain.crossing[positions]
        self.saved, self.working = np.zeros((2, *self.fixed.shape))
        for last, position in enumerate(positions[1:], 1):
            self.saved[:last, last] = chain.kept(positions[:last], position)
            self.working[:last, last] = chain.working(positions[:last], position)
