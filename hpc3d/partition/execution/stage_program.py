"""Separate programs for the model chunks of a captured module.

A chunk runs its own pieces and duplicates the cheap operations whose results they need. A value
needed by a later chunk passes through all intermediate chunks, so each chunk boundary has a single
list of values, in program order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from hpc3d.model.layers import immediately
from hpc3d.partition.capture import Captured, outputs_of, size_of, written_by
from hpc3d.partition.execution.random_operations import Draw, make_reproducible
from hpc3d.partition.execution.split_backward import split_backward


class StageProgram(NamedTuple):
    """Program of one model chunk.

    The arguments of `module` are a Draw, a function that takes deferred weight gradients if the
    backward pass is `split`, the `sizes` as numbers, and tensors: the values `received` from the
    previous chunk, the model `inputs`, and the `weights`. It returns the values `sent` to the next
    chunk and the model `outputs` computed by this chunk. It writes to the buffers in `written`.
    """

    module: fx.GraphModule
    sizes: tuple[torch.SymInt | int, ...]
    received: tuple[fx.Node, ...]
    inputs: tuple[fx.Node, ...]
    weights: tuple[str, ...]
    sent: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]
    written: tuple[str, ...]
    split: bool

    def run(
        self,
        draw: Draw,
        received: Sequence,
        inputs: Mapping,
        weights: Mapping,
        later: Callable[..., None] = immediately,
    ) -> tuple[tuple, tuple]:
        """Return the values sent and the model outputs for the samples of a Draw.

        `inputs` maps the input nodes of the model to values, and `weights` maps names to tensors.
        If the program is `split`, its backward pass defers calls with `later(function, *args)`.
        """
        sizes = [size_of(size, draw.samples) for size in self.sizes]
        tensors = [inputs[node] for node in self.inputs] + [weights[name] for name in self.weights]
        deferred = [later] if self.split else []
        made = self.module(draw, *deferred, *sizes, *received, *tensors)
        return made[: len(self.sent)], made[len(self.sent) :]


def stage_programs(
    captured: Captured,
    parts: Sequence[Sequence[int]],
    redraw: bool = True,
    split: bool = False,
) -> list[StageProgram]:
    """Return one program per model chunk, in model order.

    `parts` lists the indices of the pieces of each chunk. If `redraw` is False, random operations
    use torch's generator and ignore the Draw. If `split` is True, the weight gradients of matrix
    products and convolutions are deferred. Raises ValueError if a value would flow backward, or if
    random operations are not supported.
    """
    part_of = {piece: number for number, part in enumerate(parts) for piece in part}
    crossing = dict(_crossing(captured, part_of))
    emitters = (_emitter(captured, part, crossing, number) for number, part in enumerate(parts))
    return [emitter.emitted(redraw, split) for emitter in emitters]


def _crossing(captured: Captured, part_of: Mapping[int, int]) -> Iterator:
    """Yield (value, (producing chunk, last reading chunk)) for values that other chunks read."""
    for node in captured.program.graph.nodes:
        if node in captured.readers:
            first = part_of[captured.piece_of[node]]
            readers = [part_of[piece] for piece in captured.readers[node]]
            if min(readers) < first:
                raise ValueError(
                    f"{node.name} of stage {first} is needed on stage {min(readers)}: values only "
                    "flow forward"
                )
            if max(readers) > first:
                yield node, (first, max(readers))


def _emitter(captured, part, crossing, number):
    """Return the builder of the program of model chunk `number`."""
    received = [node for node, (first, last) in crossing.items() if first < number <= last]
    sent = [node for node, (first, last) in crossing.items() if first <= number < last]
    wanted = set()
    for piece in (captured.pieces[number] for number in part):
        wanted |= {*piece.nodes, *piece.copies}
    order = [node for node in captured.program.graph.nodes if node in wanted]
    outputs = [node for node in outputs_of(captured) if node in wanted]
    return _Emitter(captured, order, received, sent, outputs)


class _Emitter:
    """Builder that copies operations into a new graph with placeholders for external operands."""

    def __init__(self, captured, order, received, sent, outputs):
        self.order, self.captured, self.sent, self.outputs = order, captured, sent, outputs
        self.sizes = [node for node in order if _is_size(node)]
        needed = dict.fromkeys(source for node in order for source in node.all_input_nodes)
        self.inputs = [node for node in captured.inputs if node in needed]
        self.weights = [node for node in captured.weights if node in needed]
        self.names = [captured.weights[node] for node in self.weights]
        self.received = received
        self.graph, self.copies = fx.Graph(), {}

    def emitted(self, redraw, split):
        draw = self.graph.placeholder("draw")
        later = self.graph.placeholder("later") if split else None
        for node in (*self.sizes, *self.received, *self.inputs, *self.weights):
            self.copies[node] = self.graph.placeholder(node.name)
        for node in self.order:
            if node not in self.copies:
                self.copies[node] = self.graph.node_copy(node, self.copies.__getitem__)
                if redraw:
                    make_reproducible(self.copies[node], node, draw)
                if split:
                    split_backward(self.copies[node], later)
        self.graph.output(tuple(self.copies[node] for node in (*self.sent, *self.outputs)))
        module = fx.GraphModule(torch.nn.Module(), self.graph)
        sizes = tuple(node.meta["val"] for node in self.sizes)
        targets = {each for node in self.order for each in written_by(node)}
        written = [self.captured.weights[node] for node in self.weights if node in targets]
        ends = self.received, self.inputs, self.names, self.sent, self.outputs, written
        return StageProgram(module, sizes, *map(tuple, ends), split)


def _is_size(node):
    return isinstance(node.meta.get("val"), (torch.SymInt, int))


def graded(captured: Captured, programs: Sequence[StageProgram]) -> set[fx.Node]:
    """Return the values with a gradient, among values sent between chunks and model outputs."""
    found = {}
    state = {**captured.program.state_dict, **captured.program.constants}
    with FakeTensorMode() as fake:
        weights = {name: _like(fake, state[name]) for name in captured.weights.values()}
        inputs = {node: _like(fake, node.meta["val"]) for node in captured.inputs}
        for program in programs:
            received = [found[node] for node in program.received]
            sent, put_out = program.run(Draw(0, 0, 0, _ROWS), received, inputs, weights)
            found.update(zip(program.sent, sent, strict=True))
            found.update(zip(program.outputs, put_out, strict=True))
    return {node for node, value in found.items() if value.requires_grad}


_ROWS = 2


def _like(fake, value):
    """Return a fake copy of a tensor for `_ROWS` samples; return other values unchanged."""
    if not isinstance(value, torch.Tensor):
        return value
    shape = [size_of(size, _ROWS) for size in value.shape]
    like = torch.empty(shape, dtype=value.dtype)
    return like.requires_grad_(isinstance(value, torch.nn.Parameter) and value.requires_grad)
