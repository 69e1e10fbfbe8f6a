"""Overlap of the communication of weights with the matrix products of a block.

If W is sharded along mesh axes that shard dimension m, such as the data axis with ZeRO-3, each
product gathers W, and the backward pass reduces dW.  The weights are known before the pass begins,
so W of the next product is gathered during the current one, as in FSDP (arXiv:2304.11277).  The
reduction of dW overlaps with the next product of the backward pass:

    gather W      1  2  3                  3  2  1
    product          1  2  3            3     2     1
    reduce dW                              3     2     1
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from hpc3d.comm.communicator import Pending

if TYPE_CHECKING:
    from hpc3d.arrays.array import Array
    from hpc3d.tensor.matmul import Matmul

# Linear layer (hpc3d.model.layers), and its saved data, which is None in the forward pass
Weight = tuple[Any, Any]


class Prefetch:
    """Gathers and reductions of `weights`, overlapped with the products of their layers.

    At most one gather and one reduction are in flight.  Both complete within the pass of a block.
    """

    def __init__(self, weights: Iterable[Weight]) -> None:
        self.rest: deque[Weight] = deque()
        self.started: tuple[Matmul, Pending] | None = None
        self.unfinished: Pending | None = None
        for layer, _ in weights:
            if not layer.matmul.complete("m"):
                layer.matmul.prefetch = self

    def begin(self, weights: Iterable[Weight]) -> None:
        """Start a pass that uses `weights` in this order, and start to gather the first one."""
        assert self.started is None
        self.rest = deque(filter(_is_gathered, weights))
        self._start_next()

    def gathered(self, matmul: Matmul, w: Array) -> Pending:
        """Return a `Pending` whose `wait` returns W of a product and starts the next gather."""
        if self.started and self.started[0] is matmul:
            pending, self.started = self.started[1], None
        else:
            pending = matmul.start_gather_w(w)

        def finish():
            block = pending.wait()
            self._start_next()
            return block

        return Pending(finish)

    def later(self, reduction: Pending | None) -> None:
        """Wait for the reduction of the previous call, and store this `reduction`."""
        previous, self.unfinished = self.unfinished, reduction
        if previous:
            previous.wait()

    def _start_next(self) -> None:
        if self.rest and not self.started:
            layer, saved = self.rest.popleft()
            self.started = layer.matmul, layer.matmul.start_gather_w(layer.stored_w(saved))


def _is_gathered(weight: Weight) -> bool:
    layer, saved = weight
    return layer.matmul.moves_w and (saved is None or "w" not in saved.kept)
