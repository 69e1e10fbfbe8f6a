"""Timer that measures each piece of a module in a single forward and backward pass.

All pieces run in one program, as in a training run, so that caches and memory are in the same
state. The clock is read between operations and, in the backward pass, between the nodes of the
autograd graph. The time of an autograd node is assigned to the operation that created the node.
The time to accumulate a weight's gradient is assigned to the first operation that reads the
weight.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from hpc3d.partition.capture import Captured, is_size, loss_of
from hpc3d.partition.capturing.torch_errors import memory_errors
from hpc3d.partition.capturing.user_code import tensors
from hpc3d.partition.execution.random_numbers import Draw
from hpc3d.partition.execution.stage_program import on_device, stage_programs

if TYPE_CHECKING:
    from torch import fx

    from hpc3d.partition.execution.sample_batches import SampleRows

_CPU = torch.device("cpu")


class PieceTimer:
    """Timer for the pieces of a captured module, which run on `device`.

    `clock()` returns a reading, and the difference of two readings is a time in seconds.
    Differences are computed after the pass, because on a GPU, they wait for the device. The clock
    may also read another quantity. `total` combines the differences of a piece's operations.
    """

    def __init__(
        self,
        captured: Captured,
        clock: Callable[[], Any],
        device: torch.device = _CPU,
        total: np.ufunc = np.add,
    ) -> None:
        self.clock, self.device, self.total = clock, device, total
        self.pieces = len(captured.pieces)
        (program,) = stage_programs(captured, [range(self.pieces)])
        self.program = on_device(program, device)
        self.loss = self.program.outputs.index(loss_of(captured))
        # Each entry of `spans` is (pass, piece, first reading, last reading). `last` is the last
        # reading of the clock. `owners` maps autograd nodes to pieces.
        self.spans: list[tuple[int, int, Any, Any]] = []
        self.last, self.owners = None, {}
        self._read_clock(captured)

    def _read_clock(self, captured):
        """Insert a call to `_made`, which reads the clock, after every operation."""
        graph = self.program.module.graph
        copies = [node for node in graph.nodes if node.op == "call_function"]
        for copy, piece in zip(copies, _pieces_of(captured), strict=True):
            with graph.inserting_after(copy):
                graph.call_function(self._made, (piece, copy))
        self.program.module.recompile()

    def _made(self, piece, value):
        """Assign the time since the last clock reading, and the new autograd nodes, to a piece."""
        self.spans.append((0, piece, self.last, self.clock()))
        for tensor in tensors(value):
            self._own(tensor.grad_fn, piece)
        self.last = self.clock()

    def _own(self, root, piece):
        todo = [root]
        while todo:
            node = todo.pop()
            if node is not None and node not in self.owners:
                self.owners[node] = piece
                todo += [source for source, _ in node.next_functions]

    def timed(self, micro: SampleRows, weights: Mapping[str, torch.Tensor]) -> np.ndarray:
        """Run a microbatch and return the times in seconds, as an array [pass, piece].

        Pass 0 is forward, and pass 1 is backward. Weight gradients are accumulated.
        """
        self.spans.clear()
        with memory_errors():
            self._run(micro, weights)
        found = np.zeros((2, self.pieces))
        for number, piece, first, last in self.spans:
            found[number, piece] = self.total(found[number, piece], last - first)
        return found

    def _run(self, micro, weights):
        draw = Draw(0, micro.step, micro.first, micro.samples, device=self.device)
        self.last = self.clock()
        _, outputs = self.program.run(draw, (), micro.inputs, weights)
        loss = outputs[self.loss]
        self._own(loss.grad_fn, self.pieces - 1)
        hooks = [self._hooked(node, piece) for node, piece in self.owners.items()]
        self.last = self.clock()
        torch.autograd.backward([loss], [torch.full_like(loss, micro.samples * micro.scale)])
        for hook in hooks:
            hook.remove()
        self.owners.clear()

    def _hooked(self, node, piece):
        def ended(*_):
            self.spans.append((1, piece, self.last, self.clock()))
            self.last = self.clock()

        return node.register_hook(ended)


def _pieces_of(captured: Captured) -> list[int]:
    """Return the piece index of each operation of the captured module, in program order.

    An operation that is duplicated in several pieces is assigned to the first of them.
    """
    copied: dict[fx.Node, int] = {}
    for number, piece in enumerate(captured.pieces):
        for node in piece.copies:
            copied.setdefault(node, number)
    piece_of = {**copied, **captured.piece_of}
    return [
        piece_of[node]
        for node in captured.program.graph.nodes
        if node in piece_of and not is_size(node)
    ]
