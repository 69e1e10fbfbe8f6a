"""Reject models in which the result for one sample depends on other samples.

Each replica runs the program on its samples of one microbatch. An operation along the batch
dimension would process fewer samples than in torch, and a statistic of the batch would have a
different value. BatchNorm is allowed, although it computes its statistics over a microbatch.
Statistics that a module stores in its buffers and operations that are unknown to this module are
also allowed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram

from hpc3d.partition.capturing.flat_export import where
from hpc3d.partition.capturing.sample_layout import SampleLayouts, arguments_of, batch_dim

_aten = torch.ops.aten
_ORDERED = {
    *(_aten.roll, _aten.flip, _aten.cumsum, _aten.cumprod, _aten.cummax, _aten.cummin),
    *(_aten.cumsum_, _aten.cumprod_, _aten.logcumsumexp, _aten.softmax, _aten._softmax),
    *(_aten.log_softmax, _aten._log_softmax, _aten.special_softmax),
    *(_aten.sort, _aten.argsort, _aten.msort, _aten.diff, _aten.unfold, _aten.fft_fft),
    *(_aten.fft_ifft, _aten.fft_rfft, _aten.fft_irfft, _aten.glu),
}
_SORTS = _aten.sort, _aten.argsort, _aten.msort
_RECURRENT = _aten.lstm, _aten.gru, _aten.rnn_tanh, _aten.rnn_relu
CONVOLUTIONS = (
    *(_aten.conv1d, _aten.conv2d, _aten.conv3d),
    *(_aten.conv_transpose1d, _aten.conv_transpose2d, _aten.conv_transpose3d),
)
_SELECTIONS = _aten.index, _aten.index_select, _aten.gather, _aten.take_along_dim
_POSITIONS = {  # operations whose results may be valid row indices in every microbatch
    *(_aten.arange, _aten.sort, _aten.argsort, _aten.topk, _aten.nonzero, _aten.cumsum),
}
_WITHOUT_VALUES = {  # operations that read only the shape and the dtype of their operands
    *(_aten.zeros_like, _aten.ones_like, _aten.full_like, _aten.empty_like, _aten.rand_like),
    *(_aten.randn_like, _aten.new_zeros, _aten.new_ones, _aten.new_full, _aten.new_empty),
    *(_aten.new_empty_strided, _aten.sym_size, _aten.sym_numel),
}
_ADVICE = (
    "compute each sample from its own inputs, because each microbatch is processed separately"
)


class BatchValues:
    """Dependencies of the values in a traced program on the samples of the batch.

    `relevant` contains the operations on which `loss` depends. If `loss` is `None`, it contains
    all operations. `follows` contains the values that depend on the batch, `real` the values that
    depend on floating-point values of the batch, and `differentiable` the values that have a
    gradient with respect to a trained parameter.
    """

    def __init__(self, program: ExportedProgram, loss: fx.Node | None) -> None:
        self.nodes = [node for node in program.graph.nodes if node.op == "call_function"]
        self.relevant = _relevant(program.graph, loss)
        self.follows: set[fx.Node] = set()
        self.real: set[fx.Node] = set()
        self.differentiable = _trained(program)
        for node in program.graph.nodes:
            if node.op == "placeholder" and batch_dim(node.meta.get("val")) is not None:
                self.follows.add(node)
                self.real |= {node} if node.meta["val"].is_floating_point() else set()
            elif node.op == "call_function":
                self._add(node)

    def _add(self, node):
        sources = values_of(node)
        floating = [each for each in results_of(node) if each.is_floating_point()]
        if floating and packet_of(node) is not _aten.detach:
            self.differentiable |= {node} if self.differentiable & {*sources} else set()
        if not self.follows & {*sources} or _updates_buffer(node):
            return
        self.follows.add(node)
        other = [node for node in sources if _is_floating(node) and node.op != "get_attr"]
        if self.real & {*sources} or (floating and other):
            self.real.add(node)

    def is_statistic(self, node: fx.Node) -> bool:
        """Return True if a value depends on the batch but has no batch dimension."""
        value = node.meta.get("val")
        return (
            node in self.follows and isinstance(value, torch.Tensor) and batch_dim(value) is None
        )

    def has_rows(self, node: fx.Node) -> bool:
        """Return True if a value depends on the batch and has a batch dimension."""
        return node in self.follows and batch_dim(node.meta.get("val")) is not None


class RelatedSamples(ValueError):
    """Error raised if the result for one sample depends on other samples."""


def refuse_related_samples(values: BatchValues, layouts: SampleLayouts) -> None:
    """Raise RelatedSamples if an operation other than a mean combines different samples."""
    for node in values.nodes:
        if node not in values.relevant:
            continue
        what = layouts.mixed.get(node) or _relation(node, values)
        if what:
            raise RelatedSamples(
                f"the model relates different samples: {what}: {node.name}{where(node)}; {_ADVICE}"
            )


def _relation(node, values):
    """Return an explanation if an operation combines different samples, otherwise `None`."""
    sources = values_of(node)
    results = results_of(node)
    real = [each for each in sources if each in values.real and _is_floating(each)]
    statistics = [*filter(values.is_statistic, real)]
    rows = [each for each in sources if values.has_rows(each)]
    if statistics and (rows or any(batch_dim(each) is not None for each in results)):
        return "a statistic of the batch is combined with single samples"
    if rows and _is_along_batch(node, rows):
        return "an operation along the batch dimension"
    return None


def _is_along_batch(node, rows):
    packet, given = packet_of(node), arguments_of(node)
    dim = batch_dim(rows[0].meta["val"])
    if packet in _ORDERED:
        unsorted = packet in _SORTS and not _is_floating(rows[0])
        return not unsorted and dim in _dims(given, rows[0].meta["val"].dim())
    if packet is _aten.embedding:
        return given["weight"] in rows
    if packet in _SELECTIONS:
        return _selects_samples(packet, given, rows, dim)
    if packet is _aten.scaled_dot_product_attention:
        return given["query"] in rows and dim == rows[0].meta["val"].dim() - 2
    if packet in _RECURRENT and given.get("input") in rows and "batch_first" in given:
        return dim != (0 if given["batch_first"] else 1) or rows[0].meta["val"].dim() < 3
    if packet in (*CONVOLUTIONS, _aten.convolution):
        return given.get("input") in rows and dim > 0
    return packet is _aten.einsum and _mixes_subscripts(given, rows)


def _dims(given, count):
    """Yield the dimensions along which an operation works; an empty list stands for all."""
    names = [name for name in ("dim", "dims", "dimension") if name in given]
    found = given[names[0]] if names else 0
    found = found if isinstance(found, list | tuple) else [found]
    for dim in found or range(count):
        yield (-1 if dim is None else dim) % count


def _selects_samples(packet, given, rows, dim):
    """Return True if samples are selected by indices that are only valid in the full batch."""
    source = given["self"]
    if source not in rows or not _is_floating(source):
        return False
    dim = batch_dim(source.meta["val"])
    if packet is _aten.index:
        indices = given["indices"]
        index = indices[dim] if dim < len(indices) else None
    else:
        count = source.meta["val"].dim()
        index = given["index" if "index" in given else "indices"]
        index = index if given.get("dim") is not None and given["dim"] % count == dim else None
    return index is not None and not _has_positions(index)


def _has_positions(index):
    todo, seen = [index], set()
    while todo:
        node = todo.pop()
        if packet_of(node) in _POSITIONS:
            return True
        if node not in seen:
            seen.add(node)
            todo += node.all_input_nodes
    return False


def _mixes_subscripts(given, rows):
    """Return True if the operands of einsum have different subscripts for the batch dimension."""
    subscripts = given["equation"].replace(" ", "").partition("->")[0].split(",")
    found = set()
    for each, names in zip(given["tensors"], subscripts, strict=True):
        if each in rows and "." not in names:
            found.add(names[batch_dim(each.meta["val"])])
    return len(found) > 1


def packet_of(node: fx.Node) -> Any:
    """Return the operation of a node without its overload, or `None`."""
    return getattr(node.target, "overloadpacket", None)


def values_of(node: fx.Node) -> list[fx.Node]:
    """Return the operands whose values an operation reads, and not only their shapes."""
    if packet_of(node) in _WITHOUT_VALUES:
        return []
    sources = node.all_input_nodes
    if packet_of(node) in (_aten.type_as, _aten.view_as, _aten.reshape_as, _aten.expand_as):
        return sources[:1]
    return sources


def _is_floating(node: fx.Node) -> bool:
    """Return True if the value of a node is a floating-point tensor."""
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def results_of(node: fx.Node) -> list[torch.Tensor]:
    """Return the tensors that an operation returns."""
    value = node.meta.get("val")
    values = value if isinstance(value, tuple | list) else [value]
    return [each for each in values if isinstance(each, torch.Tensor)]


def _relevant(graph, loss):
    """Return the operations on which the loss depends, including writes to their operands."""
    found: set[fx.Node] = {loss} if loss is not None else {*graph.nodes}
    for node in reversed(graph.nodes):
        if node in found or (_writes(node) and node.args[0] in found):
            found |= {node, *node.all_input_nodes}
    return found


def _writes(node):
    """Return True if an operation modifies its first operand in place."""
    alias = _first_alias(node)
    return alias is not None and alias.is_write


def _first_alias(node):
    """Return the alias information of an operation's first operand, or `None`."""
    schema = getattr(node.target, "_schema", None)
    return schema.arguments[0].alias_info if schema and schema.arguments and node.args else None


def _updates_buffer(node):
    """Return True if an operation writes to a buffer, or to a view of a buffer."""
    if not _writes(node):
        return False
    while _first_alias(node) and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node.op == "placeholder" and batch_dim(node.meta.get("val")) is None


def _trained(program):
    state = program.state_dict
    found = set()
    for spec, node in zip(program.graph_signature.input_specs, program.graph.nodes):
        tensor = state.get(spec.target) if spec.target else None
        if isinstance(tensor, torch.nn.Parameter) and tensor.requires_grad:
            found.add(node)
    return found
