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
        """Select the weights for a microbatch of batch number `generation`, counted from 0."""

    def before_update(self) -> None:
        """Make the next update write to new memory, if old weight versions must be kept."""


class Stashed(InPlace):
    """Weight stashing of PipeDream (arXiv:1806.03377): forward uses the stage's newest weights.

    Stage i of p updates its weights after every backward pass, so microbatch k uses the weights
    after k - (p - 1 - i) updates.
    """

    def before_update(self) -> None:
        self.parameters.copy_on_write()


class DoubleBuffered(InPlace):
    """PipeDream-2BW (arXiv:2006.09503): W(t+1) = W(t) - nu grad f(W(t-1)), with two versions.

    Microbatches of batch t use W(t-1) on every stage, or W(0) for t = 0.
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
