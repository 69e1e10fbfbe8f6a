"""What the engine asks of a stage, whatever it is made of.

`model.stage.Stage` is one from layers of this house, `predict.simulation.replay.ReplayedStage` one
whose passes are mostly played.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol


class PipelineStage(Protocol):
    """A part of a model on one rank, which runs in one go: a chunk of a pipeline stage.

    A block between stages is this rank's part of what crosses: the arrays that `incoming` names,
    in a tuple where they are not exactly one.
    A stage keeps nothing of a pass in itself but its `auxiliary_loss`: what backward needs is in
    `saved`, so any number of microbatches may be in flight, and their backward passes may come in
    any order.  All ranks of the stage make the same calls in the same order.
    """

    @property
    def units(self) -> list[str]:
        """The names of its parts that `finished` is called with, those of their parameters'
        `unit`: the gradient of each is summed over replicas when it is whole."""

    @property
    def auxiliary_loss(self) -> Any:
        """What the last forward pass adds to the summed loss beside the last part's: this rank's
        share of the losses of routers."""

    def incoming(self, kind: str, micro: Any) -> Sequence[tuple[tuple[int, ...], Any]]:
        """Shape and type of each array of the block that comes in for a microbatch: F from the
        part before, B the gradient from the part after."""

    def forward(self, x: Any, micro: Any) -> tuple[Any, Any]:
        """Y, and what `backward` needs of this microbatch (`model.stage.Microbatch`).

        x is a block, to read and not to write into; None for the model's first part, which reads
        `micro.tokens`.  Y is the block for the next part; the last part returns this rank's share
        of the summed loss instead, a number or a device's array of one.  Where a microbatch is not
        for `training` nothing is kept, and the last part returns its share of [the summed loss,
        the tokens that are predicted right].
        """

    def backward(
        self,
        dy: Any,
        saved: Any,
        micro: Any,
        defer: Callable[..., None],
        finished: Callable[[str], None],
    ) -> Any:
        """The gradient of x, of the summed loss times `micro.scale`; None of the first part.

        dy is the gradient of Y, None for the last part.  `saved` is that of this microbatch's
        forward pass; it is used once, and nothing of it may be held on to but by calls that wait.
        The gradients of weights are added to those of the parameters by calls
        `defer(function, *args)`, which makes them at once, or in their order when W comes;
        after those of each of `units` comes `defer(finished, unit)`.
        """
