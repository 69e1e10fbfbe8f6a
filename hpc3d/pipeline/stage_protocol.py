"""Interface between the pipeline engine and its stages.

`model.stage.Stage` implements the interface with the layers of hpc3d.
`predict.simulation.replay.ReplayedStage` replays recorded costs for most passes.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol


class PipelineStage(Protocol):
    """Model chunk of a pipeline stage on one rank.

    Stages exchange blocks.  A block contains this rank's shards of the arrays that `incoming`
    describes, as a tuple or, if there is only one, as an array.  A stage stores no state between
    passes except its `auxiliary_loss`.  The data for the backward pass is in `saved`, so any
    number of microbatches may be in flight, and their backward passes may run in any order.  All
    ranks of the stage make the same calls in the same order.
    """

    @property
    def units(self) -> list[str]:
        """Names of this chunk's units (`Parameter.unit`), as passed to `starting` and `finished`.

        When the gradient of a unit is complete, it can be reduced over the replicas.
        """

    @property
    def auxiliary_loss(self) -> Any:
        """This rank's share of the MoE routers' auxiliary losses in the last forward pass.

        The engine adds it to the summed loss of the last model chunk.
        """

    def incoming(self, kind: str, micro: Any) -> Sequence[tuple[tuple[int, ...], Any]]:
        """Return the shape and dtype of each array in a received block of a microbatch.

        If `kind` is F, the block is the activation from the previous model chunk.  If `kind` is B,
        the block is the gradient from the next model chunk.
        """

    def forward(self, x: Any, micro: Any, starting: Callable[[str], None]) -> tuple[Any, Any]:
        """Run the forward pass; return Y and the data saved for the backward pass.

        x is a read-only block.  The first model chunk reads `micro.tokens`; its x is `None`.
        Y is the block for the next model chunk.  The last chunk returns this rank's share of the
        summed loss instead, as a number or a device array with one element.  Unless
        `micro.training` is true, nothing is saved, and the last chunk returns this rank's share of
        [summed loss, number of correctly predicted tokens].  The stage calls `starting(unit)`
        before it uses the parameters of a unit, which completes the all-gather of their values.
        """

    def backward(
        self,
        dy: Any,
        saved: Any,
        micro: Any,
        defer: Callable[..., None],
        finished: Callable[[str], None],
    ) -> Any:
        """Run the backward pass; return the gradient of the summed loss times `micro.scale`.

        The result is the gradient with respect to x, or None for the first model chunk.  dy is the
        gradient with respect to Y, or None for the last one.  `saved` comes from the forward pass
        of this microbatch.  It is used once, and only deferred calls may keep references to it.
        The stage accumulates weight gradients with calls `defer(function, *args)`, which run
        either immediately or later, in order, at W.  After the calls for each unit in `units`, the
        stage calls `defer(finished, unit)`.
        """
