"""Which weights a microbatch meets: what pipelines that do not drain between updates must keep.

A layer saves the weights of its forward for its backward.  So a microbatch keeps the version that
it met for as long as an update writes its result elsewhere: that is all of weight stashing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hpc3d.model.parameters import Parameters


class InPlace:
    """Synchronous schedules: no microbatch is in flight while the weights change."""

    def __init__(self, parameters: Parameters) -> None:
        self.parameters = parameters

    def before_forward(self, generation: int) -> None:
        """Show the weights for a microbatch of this generation (a batch, counted from 0)."""

    def before_update(self) -> None:
        """Make room for the next version."""


class Stashed(InPlace):
    """PipeDream (arXiv:1806.03377): forward takes the newest weights of its stage.

    Stage i of p updates after every backward, so microbatch k meets k - (p - 1 - i) updates.
    """

    def before_update(self) -> None:
        self.parameters.copy_on_write()


class DoubleBuffered(InPlace):
    """PipeDream-2BW (arXiv:2006.09503): W(t+1) = W(t) - nu grad f(W(t-1)), two versions in all.

    Generation t takes W(t-1) on every stage; those before the first are the first.
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
