"""Adapter that runs a model chunk of a torch module on the engine of hpc3d.pipeline."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from hpc3d.comm.mesh import NullRecorder
from hpc3d.partition.capture import is_trained, shape_of
from hpc3d.partition.execution.random_numbers import Draw
from hpc3d.partition.execution.stage_program import StageProgram
from hpc3d.partition.execution.torch_weights import TorchWeights

if TYPE_CHECKING:
    from torch import fx

    from hpc3d.comm.mesh import MeshRecorder
    from hpc3d.partition.execution.sample_batches import SampleRows


class _Kept(NamedTuple):
    """State of a microbatch that is saved for the backward pass.

    `edges` contains the autograd edges of the results, so that the results themselves can be
    freed. `edges` is `None` if the backward pass recomputes the chunk. In this case, `buffers`
    contains copies of the buffers that the chunk modifies.
    """

    received: Sequence[torch.Tensor]
    edges: Sequence[GradientEdge] | None
    buffers: dict[str, torch.Tensor]


class TorchStage:
    """Implementation of `PipelineStage` for a StageProgram.

    Only the last model chunk has a `loss`. If `recompute` is True, only the received tensors and
    the modified buffers are saved for each microbatch. In an evaluation, nothing is saved and no
    buffer is modified.
    """

    def __init__(
        self,
        program: StageProgram,
        weights: TorchWeights,
        graded: Collection[fx.Node],
        seed: int,
        loss: fx.Node | None = None,
        recompute: bool = False,
        trace: MeshRecorder | None = None,
    ) -> None:
        self.trace = trace or NullRecorder()
        self.program, self.weights, self.seed, self.recompute = program, weights, seed, recompute
        self.graded_in = [node in graded for node in program.received]
        self.graded_out = [node in graded for node in program.sent]
        self.loss = None if loss is None else program.outputs.index(loss)

    @property
    def auxiliary_loss(self) -> float:
        return 0.0

    @property
    def units(self) -> list[str]:
        like = self.weights.like
        return [name for name in self.program.weights if is_trained(like[name])]

    def incoming(
        self, kind: str, micro: SampleRows
    ) -> list[tuple[tuple[int, ...], np.dtype[Any]]]:
        ends = (self.program.received, self.program.sent)[kind == "B"]
        graded = [True] * len(ends) if kind == "F" else self.graded_out
        values = [node.meta["val"] for node, wanted in zip(ends, graded, strict=True) if wanted]
        return [
            (tuple(shape_of(like, micro.samples)), torch.empty(0, dtype=like.dtype).numpy().dtype)
            for like in values
        ]

    def forward(self, x: Any, micro: SampleRows) -> tuple[Any, _Kept]:
        received = [_tensor(array) for array in _arrays(x)]
        for tensor, has_gradient in zip(received, self.graded_in, strict=True):
            tensor.requires_grad_(has_gradient)
        keeps = micro.training and not self.recompute
        # Recomputation and evaluation write to these copies, so that each buffer is updated once.
        names = () if keeps else self.program.written
        buffers = {name: self.weights.tensors[name].clone() for name in names}
        tensors = self.weights.tensors if micro.training else {**self.weights.tensors, **buffers}
        with self.trace.span("operations", "gemm"), torch.set_grad_enabled(keeps):
            made = self._run(received, micro, tensors)
        kept = _Kept(received, _edges(made) if keeps else None, buffers)
        if self.loss is not None:
            return micro.samples * float(made[-1].detach()), kept
        return tuple(tensor.detach().contiguous().numpy() for tensor in made), kept

    def _run(self, received, micro, tensors):
        """Run the chunk; return the values to send, or the mean loss if this is the last chunk."""
        draw = Draw(self.seed, micro.step, micro.first, micro.samples, micro.batch_values)
        sent, outputs = self.program.run(draw, received, micro.inputs, tensors, self._later)
        return sent if self.loss is None else [outputs[self.loss]]

    def _later(self, function, *args):
        self.weights.defer(self._add, function, *args)

    def _add(self, function, *args):
        with self.trace.span("gradients of weights", "gemm"):
            function(*args)

    def backward(
        self,
        dy: Any,
        saved: _Kept,
        micro: SampleRows,
        defer: Callable[..., None],
        finished: Callable[[str], None],
    ) -> Any:
        edges = saved.edges
        if edges is None:
            with self.trace.span("operations again", "gemm"):
                tensors = {**self.weights.tensors, **saved.buffers}
                edges = _edges(self._run(saved.received, micro, tensors))
        gradients = [_tensor(array) for array in _arrays(dy)]
        if self.loss is not None:
            gradients = [torch.tensor(micro.samples * micro.scale, dtype=self.weights.dtype)]
        self.weights.defer = defer
        self.weights.completed = lambda name: defer(finished, name)
        if edges:
            with self.trace.span("gradients", "gemm"):
                torch.autograd.backward(edges, gradients)
        for unit in self.units:
            defer(finished, unit)
        if not self.program.received:
            return None
        leaves = [leaf for leaf in saved.received if leaf.requires_grad]
        return tuple(_gradient(leaf).numpy() for leaf in leaves)


def _edges(made):
    return [get_gradient_edge(tensor) for tensor in made if tensor.requires_grad]


def _arrays(block):
    return block if isinstance(block, tuple) else () if block is None else (block,)


def _tensor(array):
    return torch.from_numpy(array if array.flags.writeable else array.copy())


def _gradient(leaf):
    """Return the gradient of a tensor, or zeros if the loss does not depend on the tensor."""
    return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad.contiguous()
