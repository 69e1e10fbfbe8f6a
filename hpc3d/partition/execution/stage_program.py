"""Separate programs for the model chunks of a captured module.

A chunk runs its own pieces and duplicates the cheap operations whose results these pieces need. A
value needed by a later chunk passes through all intermediate chunks, so each chunk boundary has a
single list of values, in program order. The rows of each sample are contiguous in these values.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from hpc3d.model.layers import immediately
from hpc3d.partition.capture import (
    Captured,
    is_size,
    memory_of,
    outputs_of,
    size_of,
    state_of,
    without_values,
    written_memory,
)
from hpc3d.partition.capturing.sample_layout import SampleLayouts, rows_per_sample
from hpc3d.partition.execution.loss_terms import LossTerms
from hpc3d.partition.execution.random_numbers import Draw
from hpc3d.partition.execution.random_operations import make_reproducible
from hpc3d.partition.execution.split_backward import split_backward
from hpc3d.partition.tensor_parallel.local_graph import LocalGraph
from hpc3d.partition.tensor_parallel.propagation import Sharding, sharding_of

if TYPE_CHECKING:
    from hpc3d.comm.communicator import Communicator

_aten = torch.ops.aten


class StageProgram(NamedTuple):
    """Program of one model chunk.

    The arguments of `module` are, in this order: the `Draw` (seed and sample range) of a
    microbatch; if the backward pass is `split`, the function that defers weight gradients; if
    there is a `sharding`, the communicator of the tensor-parallel ranks; the `sizes` as integers;
    and the tensors `received` from the previous chunk, the model `inputs`, and the `weights`. It
    returns the values `sent` to the next chunk and the model `outputs` computed by this chunk. It
    modifies the buffers in `written` in place.
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
    sharding: Sharding | None

    def run(
        self,
        draw: Draw,
        received: Sequence,
        inputs: Mapping,
        weights: Mapping,
        later: Callable[..., None] = immediately,
        ranks: Communicator | None = None,
    ) -> tuple[tuple, tuple]:
        """Run the chunk on one microbatch; return the values to send and the outputs.

        `draw` identifies the samples of the microbatch and determines their random numbers.
        `inputs` maps the input nodes of the model to values, and `weights` maps names to tensors.
        If the program is `split`, its backward pass defers calls with `later(function, *args)`.
        `ranks` is the communicator of the tensor-parallel ranks.
        """
        sizes = [size_of(size, draw.samples) for size in self.sizes]
        tensors = [inputs[node] for node in self.inputs] + [weights[name] for name in self.weights]
        hooks = [later] * self.split + [ranks] * bool(self.sharding)
        made = self.module(draw, *hooks, *sizes, *received, *tensors)
        return made[: len(self.sent)], made[len(self.sent) :]


def stage_programs(
    captured: Captured,
    chunks: Sequence[Sequence[int]],
    redraw: bool = True,
    split: bool = False,
    ways: int = 1,
) -> list[StageProgram]:
    """Return one program per model chunk, in model order.

    `chunks` lists the indices of the pieces of each chunk. If `redraw` is True, random operations
    depend on the step and the sample (the argument `Draw`), and losses that average over valid
    targets use the denominators of the step. Otherwise, both are computed as in torch. If `split`
    is True, the weight gradients of matrix products and convolutions are deferred. The weights
    are split over `ways` tensor-parallel ranks. Raises ValueError if an earlier chunk needs a
    value of a later chunk, or if a random operation is not supported.
    """
    chunk_of = {piece: number for number, chunk in enumerate(chunks) for piece in chunk}
    crossing = dict(_crossing(captured, chunk_of))
    how = _How(
        crossing,
        SampleLayouts(captured.program.graph),
        LossTerms(captured) if redraw else None,
        split,
        sharding_of(captured, ways, {*crossing, *outputs_of(captured)}) if ways > 1 else None,
    )
    return [_program(captured, chunk, number, how) for number, chunk in enumerate(chunks)]


class _How(NamedTuple):
    """Information that all model chunks share.

    `layouts` determines the order of the rows in each message.
    """

    crossing: Mapping[fx.Node, tuple[int, int]]
    layouts: SampleLayouts
    terms: LossTerms | None
    split: bool
    sharding: Sharding | None


def _crossing(captured: Captured, chunk_of: Mapping[int, int]) -> Iterator:
    """Yield (value, (producing chunk, last reading chunk)) for values read by later chunks."""
    for node in captured.program.graph.nodes:
        if node in captured.readers:
            first = chunk_of[captured.piece_of[node]]
            readers = [chunk_of[piece] for piece in captured.readers[node]]
            if min(readers) < first:
                raise ValueError(
                    f"chunk {min(readers)} reads {node.name}, which the later chunk {first} "
                    "computes; assign the operation to the same or an earlier chunk"
                )
            if max(readers) > first:
                yield node, (first, max(readers))


def _program(captured, chunk, number, how):
    """Return the program of model chunk `number`.

    The chunk's operations are copied into a new graph with placeholders for external operands.
    """
    pieces = [captured.pieces[index] for index in chunk]
    wanted = {node for piece in pieces for node in (*piece.nodes, *piece.copies)}
    order = [node for node in captured.program.graph.nodes if node in wanted]
    sizes = [*filter(is_size, order)]
    received = [node for node, (first, last) in how.crossing.items() if first < number <= last]
    sent = [node for node, (first, last) in how.crossing.items() if first <= number < last]
    outputs = [node for node in outputs_of(captured) if node in wanted]
    needed = {source for node in order for source in node.all_input_nodes}
    inputs = [node for node in captured.inputs if node in needed]
    weights = {node: name for node, name in captured.weights.items() if node in needed}
    graph, layouts = fx.Graph(), how.layouts
    draw = graph.placeholder("draw")
    later = graph.placeholder("later") if how.split else None
    ranks = graph.placeholder("ranks") if how.sharding else None
    given = (*sizes, *received, *inputs, *weights)
    copies = {node: graph.placeholder(node.name) for node in given}
    messages = {node: copies[node] for node in received}
    for node in received:
        copies[node] = _reordered(graph, copies[node], node, -1, layouts.outer(node))
        copies[node] = _laid_out(graph, copies[node], node)
    _copy(order, draw, later, how, LocalGraph(graph, copies, how.sharding, ranks))
    for node in (each for each in sent if each not in messages):
        messages[node] = _reordered(graph, copies[node], node, layouts.outer(node), -1)
    graph.output((*(messages[node] for node in sent), *(copies[node] for node in outputs)))
    module = fx.GraphModule(torch.nn.Module(), graph)
    values = tuple(node.meta["val"] for node in sizes)
    fields = received, inputs, weights.values(), sent, outputs, _written(order, weights)
    return StageProgram(module, values, *map(tuple, fields), how.split, how.sharding)


def _copy(order, draw, later, how, local):
    """Copy the operations in `order` to a LocalGraph."""
    for node in (each for each in order if each not in local.copies):
        copy = local.add(node)
        if how.terms:
            shard = local.split_of(node), local.ranks
            make_reproducible(copy, node, draw, how.layouts.outer(node), shard)
            how.terms.weigh(copy, node, draw)
        if how.split:
            split_backward(copy, later)
        local.copies[node] = local.finish(node, copy)


def on_device(program: StageProgram, device: torch.device) -> StageProgram:
    """Return a program whose operations create their tensors on `device`.

    A captured program creates tensors on the CPU, and contains this device as a constant.
    """
    if device == torch.device("cpu"):
        return program

    def moved(value):
        return device if isinstance(value, torch.device) else value

    module = copy.deepcopy(program.module)
    for node in module.graph.nodes:
        node.args, node.kwargs = (
            fx.node.map_aggregate(each, moved) for each in (node.args, node.kwargs)
        )
    module.recompile()
    return program._replace(module=module)


def _written(order, weights):
    """Return the names of the weights that the operations in `order` modify."""
    targets = {number for node in order for number in written_memory(node)}
    return [name for node, name in weights.items() if targets & memory_of(node)]


def _reordered(graph, copy, node, *sizes):
    """Convert a value between block-major and sample-major order of its rows.

    Messages are in sample-major order, because replicas split them by samples. The leading
    dimensions of the value have the `sizes` (blocks, -1) or (-1, blocks) before the conversion,
    where -1 is the number of samples.
    """
    blocks = max(sizes)
    if blocks == 1:
        return copy
    rows, *others = node.meta["val"].shape
    shape = [*sizes, rows_per_sample(rows) // blocks, *others]
    blocked = graph.call_function(_aten.reshape.default, (copy, shape))
    swapped = graph.call_function(_aten.transpose.int, (blocked, 0, 1))
    return graph.call_function(_aten.reshape.default, (swapped, [-1, *others]))


def _laid_out(graph, copy, node):
    """Restore the order of a value's dimensions in memory.

    Messages are contiguous, but some operations, such as `view`, require the captured strides.
    """
    strides = [size_of(stride, 2) for stride in node.meta["val"].stride()]
    order = sorted(range(len(strides)), key=strides.__getitem__, reverse=True)
    if order == sorted(order):
        return copy
    moved = graph.call_function(_aten.permute.default, (copy, order))
    how = {"memory_format": torch.contiguous_format}
    dense = graph.call_function(_aten.clone.default, (moved,), how)
    return graph.call_function(_aten.permute.default, (dense, [*map(order.index, sorted(order))]))


def graded(captured: Captured, programs: Sequence[StageProgram]) -> set[fx.Node]:
    """Return the model outputs and inter-chunk values that require a gradient."""
    found, rows = {}, 2
    with FakeTensorMode():
        weights = {name: without_values(each, rows) for name, each in state_of(captured).items()}
        inputs = {node: without_values(node.meta["val"], rows) for node in captured.inputs}
        for program in programs:
            received = [found[node] for node in program.received]
            sent, outputs = program.run(Draw(0, 0, 0, rows), received, inputs, weights)
            found.update(zip(program.sent, sent, strict=True))
            found.update(zip(program.outputs, outputs, strict=True))
    return {node for node, value in found.items() if value.requires_grad}
