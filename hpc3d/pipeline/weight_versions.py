"""Weight versions of asynchronous pipeline schedules, which do not flush between updates.

A layer saves a reference to the weights of its forward pass for its backward pass.  Weight
stashing therefore only requires that each update writes to new memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hpc3d.model.parameters import Parameters


class InPlace:
    """In-place updates, for synchronous schedules.

    No microbatch is in flight during an update.
    """

    def __init__(self, parameters: Parameters) -> None:
        self.parameters = parameters

    def before_forward(self, generation: int) -> None:
        """Select the weights for a microbatch of training step `generation` (zero-based)."""

    def before_update(self) -> None:
        """Prepare the next update, which writes to new memory if old weights must be kept."""


class Stashed(InPlace):
    """PipeDream weight stashing (arXiv:1806.03377): forward passes use the newest weights.

    Stage i of p updates its weights after every backward pass, so microbatch k uses the weights
    after k - (p - 1 - i) updates.
    """

    def before_update(self) -> None:
        self.parameters.copy_on_write()


class DoubleBuffered(InPlace):
    """PipeDream-2BW double buffering (arXiv:2006.09503), which delays gradients by one update.

    W(t+1) = W(t) - rate * gradient(W(t-1)), where W(t) are the weights after t updates. All stages
    use W(t-1) for the microbatches of training step t, and W(0) for t = 0. At most two weight
    versions are stored.
    """

    def __init__(self, parameters: Parameters) -> None:
        super().__init__(parameters)
        self.updates, self.versions = 0, {0: parameters.value}

    def before_forward(self, generation: int) -> None:
        self.parameters.use(self.versions[max(0, generation - 1)])

    def before_update(self) -> None:
        self.parameters.use(self.versions[self.updates])
        self.versions.pop(self.updates - 1, None)
        self.parameters.copy_on_write()
        self.updates += 1
        self.versions[self.updates] = self.parameters.value
