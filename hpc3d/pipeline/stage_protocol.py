"""Protocol between the engine and the stages.

`model.stage.Stage` implements it with the layers of hpc3d, and
`predict.simulation.replay.ReplayedStage` by replaying most passes.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol


class PipelineStage(Protocol):
    """Model chunk of a pipeline stage on one rank, which runs as one unit.

    A block between stages is this rank's shard of the transferred arrays: the arrays that
    `incoming` describes, in a tuple unless there is exactly one.
    A stage stores no state of a pass except its `auxiliary_loss`.  The data for backward is in
    `saved`, so any number of microbatches may be in flight, with backward passes in any order.
    All ranks of the stage make the same calls in the same order.
    """

    @property
    def units(self) -> list[str]:
        """Names of the units that `finished` receives, the `unit` of their parameters.

        The gradient of each unit is reduced over replicas when it is complete.
        """

    @property
    def auxiliary_loss(self) -> Any:
        """This rank's share of the router losses of the last forward pass, which are added to the
        summed loss of the last part."""

    def incoming(self, kind: str, micro: Any) -> Sequence[tuple[tuple[int, ...], Any]]:
        """Return the shape and type of each array of an incoming block of a microbatch.

        F is the activation from the previous part, B the gradient from the next part.
        """

    def forward(self, x: Any, micro: Any) -> tuple[Any, Any]:
        """Return Y and the data saved for `backward` of this microbatch
        (`model.stage.Microbatch`).

        x is a read-only block, or None for the first part of the model, which reads
        `micro.tokens`. Y is the block for the next part.  The last part returns this rank's share
        of the summed loss instead, as a number or a device array of one.  If a microbatch is not
        for `training`, nothing is saved, and the last part returns its share of [the summed loss,
        the number of correctly predicted tokens].
        """

    def backward(
        self,
        dy: Any,
        saved: Any,
        micro: Any,
        defer: Callable[..., None],
        finished: Callable[[str], None],
    ) -> Any:
        """Return the gradient of x for the summed loss times `micro.scale`; None for the first
        part.

        dy is the gradient of Y, None for the last part.  `saved` is from the forward pass of this
        microbatch.  It is used once, and only deferred calls may keep references to it.  Calls
        `defer(function, *args)` add the weight gradients to the parameters' gradients, at once or
        in order at W.  After the calls of each of `units` comes `defer(finished, unit)`.
        """
