"""The seconds of every piece of a module in one pass over all of it, forward and backward.

The pass is that of a run: one program, whose operations find caches and memory as they do there.
A clock is read between operations, and backward between nodes of the autograd graph; these belong
to the operation that made them, the sum of a weight's gradients to the first that reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import numpy as np
import torch

from hpc3d.partition.capture import Captured, loss_of, tensors
from hpc3d.partition.execution.random_operations import Draw
from hpc3d.partition.execution.stage_program import stage_programs

if TYPE_CHECKING:
    from torch import fx

    from hpc3d.partition.execution.sample_batches import SampleRows


class PieceTimer:
    """Of a captured module, on a `clock` in seconds."""

    def __init__(self, captured: Captured, clock: Callable[[], float]) -> None:
        self.clock, self.pieces = clock, len(captured.pieces)
        (self.program,) = stage_programs(captured, [range(self.pieces)])
        self.loss = self.program.outputs.index(loss_of(captured))
        self.seconds = np.zeros((2, self.pieces))
        self.last, self.owners = 0.0, {}  # when the clock was read; node of autograd -> piece
        self._read_clock(captured)

    def _read_clock(self, captured):
        """Call `_made` after every operation of the program."""
        graph = self.program.module.graph
        copies = [node for node in graph.nodes if node.op == "call_function"]
        for copy, piece in zip(copies, _pieces_of(captured), strict=True):
            with graph.inserting_after(copy):
                graph.call_function(self._made, (piece, copy))
        self.program.module.recompile()

    def _made(self, piece, value):
        """An operation of a piece has this result."""
        self.seconds[0, piece] += self.clock() - self.last
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

    def timed(
        self, micro: SampleRows, weights: Mapping[str, torch.Tensor], seed: int = 0
    ) -> np.ndarray:
        """Seconds [forward or backward, piece] of a microbatch; gradients are added to those of
        the weights."""
        self.seconds[...], self.last = 0.0, self.clock()
        draw = Draw(seed, micro.step, micro.first, micro.samples)
        _, outputs = self.program.run(draw, (), micro.inputs, weights)
        loss = outputs[self.loss]
        self._own(loss.grad_fn, self.pieces - 1)
        hooks = [self._hooked(node, piece) for node, piece in self.owners.items()]
        self.last = self.clock()
        torch.autograd.backward([loss], [torch.full_like(loss, micro.samples * micro.scale)])
        for hook in hooks:
            hook.remove()
        self.owners.clear()
        return self.seconds.copy()

    def _hooked(self, node, piece):
        def ended(*_):
            self.seconds[1, piece] += self.clock() - self.last
            self.last = self.clock()

        return node.register_hook(ended)


def _pieces_of(captured: Captured) -> list[int]:
    """The piece of every operation of a program of all pieces, in its order; that of the first
    reader of what several have a copy of."""
    copied: dict[fx.Node, int] = {}
    for number, piece in enumerate(captured.pieces):
        for node in piece.copies:
            copied.setdefault(node, number)
    places = {**copied, **captured.places}
    return [
        places[node]
        for node in captured.program.graph.nodes
        if node in places and not isinstance(node.meta.get("val"), (torch.SymInt, int))
    ]
