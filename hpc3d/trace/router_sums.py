"""Routing decisions of a rank in a training step, summed over its microbatches."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from hpc3d.arrays.pool import on_host

if TYPE_CHECKING:
    from hpc3d.arrays.array import Array

ExpertRow = tuple[int, int, int, int, int, int]
RouterRow = tuple[int, int, int, float, float]


class RouterSums:
    """Sums by layer, on the device of the arrays.

    Their addresses stay the same for the full run, because a replayed CUDA graph adds to them. The
    host reads them at the end of a step.
    """

    def __init__(self) -> None:
        self.layers: dict[int, list[Any]] = {}

    def add(self, layer: int, *parts: Array | float) -> None:
        """Add values to the sums of a layer.

        `parts` are the tokens routed to each expert and those within its capacity, int64 [experts]
        each, the balance loss and the z-loss.
        """
        if layer not in self.layers:  # zeros: the addition below is compiled before a capture
            self.layers[layer] = [np.zeros_like(part) for part in parts]
        for total, part in zip(self.layers[layer], parts, strict=True):
            total += part

    def take(self, rank: int, step: int) -> tuple[list[ExpertRow], list[RouterRow]]:
        """Return the rows of /experts and /routers of a step; reset the sums to 0."""
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
