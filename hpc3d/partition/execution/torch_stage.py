"""Adapter that runs a model chunk of a torch module on the engine of hpc3d.pipeline."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from hpc3d.arrays.pool import writeable
from hpc3d.partition.capture import is_trained, shape_of
from hpc3d.partition.capturing.opaque_modules import OpaqueModule
from hpc3d.partition.capturing.torch_errors import data_errors
from hpc3d.partition.execution.random_numbers import Draw
from hpc3d.partition.execution.saved_tensors import SavedBytes, SavedTensor, SavedTensors
from hpc3d.partition.execution.stage_program import StageProgram, on_device
from hpc3d.partition.execution.torch_weights import TorchWeights
from hpc3d.partition.shared_arrays import array_of, array_type, tensor_of

if TYPE_CHECKING:
    from torch import fx

    from hpc3d.partition.execution.sample_batches import SampleRows


class _Kept(NamedTuple):
    """State of a microbatch that is saved for the backward pass.

    `leaves` accumulate the gradients of the received tensors. `edges` contains the autograd edges
    of the results, so that the results themselves can be freed. `edges` is `None` if the backward
    pass recomputes the chunk. In this case, `received` contains the received tensors, and
    `buffers` contains copies of the buffers that the chunk modifies. Otherwise, `counter` counts
    the saved bytes.
    """

    leaves: Sequence[torch.Tensor | None]
    edges: Sequence[GradientEdge] | None
    received: Sequence[SavedTensor]
    buffers: dict[str, torch.Tensor]
    counter: SavedBytes | None


class TorchStage:
    """Implementation of `PipelineStage` for a StageProgram.

    `saving` stores the tensors that are saved for the backward pass. Only the last model chunk has
    a `loss`; the first tensor-parallel rank returns it, and the others return 0. If `recompute` is
    True, only the received tensors and the modified buffers are saved for each microbatch. In an
    evaluation, nothing is saved and no buffer is modified.
    """

    def __init__(
        self,
        program: StageProgram,
        weights: TorchWeights,
        graded: Collection[fx.Node],
        seed: int,
        saving: SavedTensors,
        loss: fx.Node | None = None,
        recompute: bool = False,
    ) -> None:
        self.saving, self.trace = saving, saving.mesh.trace
        self.program = on_device(program, weights.device)
        self.weights, self.seed, self.recompute = weights, seed, recompute
        self.graded_in = [node in graded for node in program.received]
        self.returned = [node for node in program.sent if node in graded]
        self.loss = None if loss is None else program.outputs.index(loss)
        self.loss_type = None if loss is None else loss.meta["val"].dtype
        self.recorded: dict[int, SavedBytes] = {}  # by the number of samples

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
        ends = self.program.received if kind == "F" else self.returned
        values = [node.meta["val"] for node in ends]
        return [(tuple(shape_of(like, micro.samples)), array_type(like.dtype)) for like in values]

    def forward(
        self, x: Any, micro: SampleRows, starting: Callable[[str], None] | None = None
    ) -> tuple[Any, _Kept]:
        received = [*map(_tensor, _arrays(x), self.program.received)]
        keeps = micro.training and not self.recompute
        # Recomputation and evaluation write to these copies, so that each buffer is updated once.
        names = () if keeps else self.program.written
        buffers = {name: self.weights.tensors[name].clone() for name in names}
        tensors = self.weights.tensors if micro.training else {**self.weights.tensors, **buffers}
        leaves = [
            _leaf(tensor) if has_gradient else None
            for tensor, has_gradient in zip(received, self.graded_in, strict=True)
        ]
        context, counter = self._saving(received, micro) if keeps else (nullcontext(), None)
        with (
            self.saving.computing("operations"),
            torch.set_grad_enabled(keeps),
            context,
        ):
            made = self._run(_entered(leaves, received), micro, tensors)
        if counter:
            counter.mark()
        again: Sequence[SavedTensor] = ()
        if self.recompute and micro.training:
            again = self.saving.microbatch(self._held(micro), received).all(received)
        kept = _Kept(leaves, _edges(made) if keeps else None, again, buffers, counter)
        if self.loss is not None:
            self.weights.pool.synchronize()
            counted = micro.samples * (self.weights.ranks.rank == 0)
            return counted * float(made[-1].detach()), kept
        return self._arrays_of(tensor.detach() for tensor in made), kept

    def _saving(self, received, micro):
        """Return a context manager that saves a forward pass's tensors, and its SavedBytes."""
        if known := self.recorded.get(micro.samples):
            return nullcontext(), SavedBytes(self.saving.mesh.pool, known, received)
        written = [self.weights.tensors[name] for name in self.program.written]
        saved = self.saving.microbatch(self._held(micro), received, written)
        return saved.saving(), saved.counter

    def _repeats(self, counter):
        """Return True if later passes can count the same bytes at the same times without hooks."""
        program, nodes = self.program, self.program.module.graph.nodes
        moves = self.saving.rounds or self.saving.offload
        if moves or counter.copies or program.split or program.sharding:
            return False
        return not any(isinstance(node.target, OpaqueModule) for node in nodes)

    def _arrays_of(self, tensors):
        return tuple(array_of(tensor.contiguous(), self.weights.pool) for tensor in tensors)

    def _held(self, micro):
        """Return the tensors that stay in memory until the end of the step."""
        return *map(self.weights.tensors.get, self.program.weights), *micro.inputs.values()

    def _run(self, received, micro, tensors):
        """Run the chunk; return the values to send, or the mean loss if this is the last chunk."""
        draw = Draw(
            self.seed,
            micro.step,
            micro.first,
            micro.samples,
            micro.batch_values,
            self.weights.device,
        )
        given = micro.inputs, tensors, self._later, self.weights.ranks
        kind = "step" if micro.training else "validation batch"
        with data_errors(self.program.module, f"{kind} {micro.step}"):
            sent, outputs = self.program.run(draw, received, *given)
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
            received = [each.value() for each in saved.received]
            tensors = {**self.weights.tensors, **saved.buffers}
            held = (*self._held(micro), *received)
            with self.saving.computing("operations again"), self.saving.recomputed(held):
                edges = _edges(self._run(_entered(saved.leaves, received), micro, tensors))
        gradients = [*map(_tensor, _arrays(dy), self.returned)]
        if self.loss is not None:
            share = micro.samples * micro.scale
            gradients = [torch.tensor(share, dtype=self.loss_type, device=self.weights.device)]
        self.weights.defer = defer
        self.weights.completed = partial(self._completed, saved.counter, defer, finished)
        if edges:
            with self.saving.computing("gradients"):
                torch.autograd.backward(edges, gradients)
        if saved.counter:
            saved.counter.mark()
            if micro.samples not in self.recorded and self._repeats(saved.counter):
                self.recorded[micro.samples] = saved.counter
        for unit in self.units:
            defer(finished, unit)
        if not self.program.received:
            return None
        return self._arrays_of(_gradient(leaf) for leaf in saved.leaves if leaf is not None)

    def _completed(self, counter, defer, finished, name):
        if counter:
            counter.mark()
        defer(finished, name)


def _edges(made):
    return [get_gradient_edge(tensor) for tensor in made if tensor.requires_grad]


def _arrays(block):
    return block if isinstance(block, tuple) else () if block is None else (block,)


def _tensor(array, node):
    return tensor_of(array if writeable(array) else array.copy(), node.meta["val"].dtype)


def _gradient(leaf):
    """Return the gradient of a tensor, or zeros if the loss does not depend on the tensor."""
    none = leaf.grad is None
    return torch.zeros(leaf.shape, dtype=leaf.dtype, device=leaf.device) if none else leaf.grad


def _leaf(tensor):
    """Return a leaf of the same shape, with one element of memory, that accumulates a gradient."""
    return tensor.new_zeros(()).expand(tensor.shape).requires_grad_()


def _entered(leaves, received):
    """Return the received tensors with a gradient that is accumulated in the leaves."""
    return [
        tensor if leaf is None else _Entered.apply(leaf, tensor)
        for leaf, tensor in zip(leaves, received, strict=True)
    ]


class _Entered(torch.autograd.Function):
    """Received tensor whose gradient goes to a leaf, so that no leaf keeps the tensor alive."""

    @staticmethod
    def forward(ctx, leaf, tensor):
        return tensor

    @staticmethod
    def backward(ctx, dy):
        return dy, None
