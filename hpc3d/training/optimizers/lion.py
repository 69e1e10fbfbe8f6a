"""Lion optimizer: updates by the sign of an interpolated momentum (arXiv:2302.06675)."""

from __future__ import annotations

from hpc3d.ops.update import lion
from hpc3d.training.optimizers.optimizer import Optimizer, StateSpec


class Lion(Optimizer):
    """Lion optimizer (Chen et al., arXiv:2302.06675), with half as much state as AdamW.

    Every element changes by the learning rate in each step. Therefore, use a tenth to a third of
    AdamW's learning rate, and a weight decay that is larger by the same factor (section 5 of the
    paper).
    """

    STATES = (StateSpec("momentum"),)

    def update(self, learning_rate: float, scale: float) -> None:
        """Update the parameters, using `scale` times the gradients.

        w = (1 - lr decay) w - lr sign(b1 m + (1 - b1) g);  m = b2 m + (1 - b2) g
        """
        self.steps += 1
        for arrays, states, keep in self.pieces(learning_rate * self.weight_decay):
            lion(*arrays, states["momentum"], self.constants, (scale, learning_rate, keep))
