"""Routing statistics of a rank in a training step, summed over its microbatches."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from hpc3d.arrays.pool import on_host

if TYPE_CHECKING:
    from hpc3d.arrays.array import Array

ExpertRow = tuple[int, int, int, int, int, int]
RouterRow = tuple[int, int, int, float, float]


class RouterSums:
    """Per-layer sums of routing statistics, stored on the same device as the routing arrays.

    The memory addresses of the sums never change, because replayed CUDA graphs add to them. The
    host reads the sums at the end of a step.
    """

    def __init__(self) -> None:
        self.layers: dict[int, list[Any]] = {}

    def add(self, layer: int, *parts: Array | float) -> None:
        """Add values to the sums of a layer.

        `parts` consists of four values: the number of tokens routed to each expert (int64
        [experts]), the number of these tokens within the expert's capacity (int64 [experts]), the
        balance loss, and the z-loss.
        """
        if layer not in self.layers:
            # start from zeros, so that the kernel of `+=` is compiled before CUDA graph capture
            self.layers[layer] = [np.zeros_like(part) for part in parts]
        for total, part in zip(self.layers[layer], parts, strict=True):
            total += part

    def take(self, rank: int, step: int) -> tuple[list[ExpertRow], list[RouterRow]]:
        """Return a step's rows of the tables /experts and /routers, and reset the sums to 0."""
        experts: list[ExpertRow] = []
        routers: list[RouterRow] = []
        for layer, totals in sorted(self.layers.items()):
            chosen, kept, balance, z = (on_host(total).ravel().tolist() for total in totals)
            experts += [
                (rank, step, layer, number, *each) for number, each in enumerate(zip(chosen, kept))
            ]
            routers.append((rank, step, layer, *balance, *z))
            for total in totals:
                total.fill(0)
        return experts, routers
