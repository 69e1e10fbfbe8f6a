"""Order of the samples in the batch dimension of each tensor in a traced program.

Operations such as `flatten` merge the batch dimension with other dimensions. The row `i` of the
merged dimension then belongs to the sample `b` with

    i = (block * samples + b) * inner + row,    0 <= block < outer,    0 <= row < inner

The rows of each sample are contiguous only if outer = 1. In time-major order, for example, the
[T, B] rows have outer = T and inner = 1.
"""

from __future__ import annotations

import operator
from math import prod
from typing import Any, NamedTuple

import torch
from torch import fx

_aten = torch.ops.aten
_RESHAPES = {
    *(_aten.view, _aten.reshape, _aten._unsafe_view, _aten.flatten, _aten.unflatten),
    *(_aten.squeeze, _aten.unsqueeze, _aten.view_as, _aten.reshape_as),
}
_SLICES = _aten.slice, _aten.split, _aten.split_with_sizes, _aten.chunk, _aten.tensor_split


class SampleLayout(NamedTuple):
    """Batch dimension `dim` of a tensor; the module docstring defines `outer` and `inner`."""

    dim: int
    outer: int = 1
    inner: int = 1


class Unrelated(ValueError):
    """Error raised if an operation mixes rows of several samples, or selects samples by index."""


def rows_per_sample(size: Any) -> int | None:
    """Return n if a tensor size is n times the batch size, otherwise `None`."""
    if not isinstance(size, torch.SymInt):
        return None
    factor, rest = size.node.expr.as_coeff_Mul()
    return int(factor) if rest.is_Symbol and factor.is_Integer else None


def batch_dim(value: Any) -> int | None:
    """Return the dimension of a tensor whose size depends on the batch size, or `None`."""
    if isinstance(value, torch.Tensor):
        for dim, size in enumerate(value.shape):
            if isinstance(size, torch.SymInt):
                return dim
    return None


def arguments_of(node: fx.Node) -> dict[str, Any]:
    """Return all arguments of an operation by name, including default values."""
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return {}
    arguments = schema.arguments
    given = {each.name: each.default_value for each in arguments if each.has_default_value()}
    return given | {each.name: value for each, value in zip(arguments, node.args)} | node.kwargs


class SampleLayouts:
    """Sample layouts of all tensors in a graph.

    `known` maps a node to its layout, or to a list of layouts if the node has several results.
    Nodes without a batch dimension and nodes with an unknown layout are not included. `mixed` maps
    an operation that combines rows of different samples to an explanation.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self.known: dict[fx.Node, Any] = {}
        self.mixed: dict[fx.Node, str] = {}
        for node in graph.nodes:
            layout = self._layout(node)
            if layout is not None:
                self.known[node] = layout

    def outer(self, node: fx.Node) -> int:
        """Return the number of blocks of a tensor; it is 1 if the layout is unknown."""
        layout = self.known.get(node)
        return layout.outer if isinstance(layout, SampleLayout) else 1

    def _layout(self, node):
        value = node.meta.get("val")
        if node.op == "placeholder":
            dim = batch_dim(value)
            return None if dim is None else SampleLayout(dim)
        if node.op != "call_function":
            return None
        if node.target is operator.getitem:
            source, number = node.args
            return self.known[source][number] if source in self.known else None
        operands = [each for each in node.all_input_nodes if each in self.known]
        if isinstance(value, tuple | list):
            return [self._result(node, operands, each) for each in value]
        return self._result(node, operands, value)

    def _result(self, node, operands, value):
        """Return the layout of one result of an operation, or `None`."""
        dim = batch_dim(value)
        operands = [each for each in operands if isinstance(self.known[each], SampleLayout)]
        if dim is None or not operands:
            return None
        packet = getattr(node.target, "overloadpacket", None)
        source = operands[0]
        try:
            if packet in _RESHAPES:
                return reshaped(self.known[source], source.meta["val"].shape, value.shape)
            if packet in _SLICES:
                return self._sliced(node, source, value)
        except Unrelated as error:
            self.mixed[node] = str(error)
            return None
        if packet is _aten.cat:
            return self._concatenated(node, operands, dim)
        if packet in (_aten.repeat, _aten.repeat_interleave):
            return self._repeated(packet, source, value)
        return self._inherited(node, operands, value)

    def _inherited(self, node, operands, value):
        """Return the common layout of all operands with as many rows per sample as the result."""
        dim = batch_dim(value)
        rows = rows_per_sample(value.shape[dim])
        found = {
            self.known[each]._replace(dim=dim)
            for each in operands
            if rows is not None and self._rows(each) == rows
        }
        if len(found) > 1 and torch.Tag.pointwise in getattr(node.target, "tags", ()):
            self.mixed[node] = "an operation combines tensors with different sample orders"
        return found.pop() if len(found) == 1 else None

    def _rows(self, node):
        return rows_per_sample(node.meta["val"].shape[self.known[node].dim])

    def _sliced(self, node, source, value):
        """Return the layout of a slice, which must contain complete blocks."""
        layout, dim = self.known[source], batch_dim(value)
        before, after = source.meta["val"].shape[layout.dim], value.shape[dim]
        if before.node.expr == after.node.expr:
            return layout._replace(dim=dim)
        rows, inner = rows_per_sample(after), layout.inner
        start, step = (
            arguments_of(node).get(name, default) for name, default in (("start", 0), ("step", 1))
        )
        if step != 1:
            return None
        start = start.meta["val"] if isinstance(start, fx.Node) else start
        first = rows_per_sample(start) if start else 0
        if rows is None or rows % inner or first is None or first % inner:
            raise Unrelated("a slice along the batch dimension selects samples by their index")
        return SampleLayout(dim, rows // inner, inner)

    def _concatenated(self, node, operands, dim):
        """Return the layout of concatenated tensors."""
        given, value = arguments_of(node), node.meta["val"]
        if given["dim"] % value.dim() != dim:
            return self._inherited(node, operands, value)
        layouts = [self.known.get(each) for each in given["tensors"]]
        if None in layouts or len({each.inner for each in layouts}) > 1:
            return None
        return SampleLayout(dim, sum(each.outer for each in layouts), layouts[0].inner)

    def _repeated(self, packet, source, value):
        layout, dim = self.known[source], batch_dim(value)
        before, after = self._rows(source), rows_per_sample(value.shape[dim])
        if not before or not after or after % before:
            return None
        times = after // before
        if packet is _aten.repeat:
            return SampleLayout(dim, layout.outer * times, layout.inner)
        return SampleLayout(dim, layout.outer, layout.inner * times)


def reshaped(layout: SampleLayout, before: torch.Size, after: torch.Size) -> SampleLayout | None:
    """Return the sample layout of a reshaped tensor.

    Returns `None` if the layout cannot be determined. Raises Unrelated if a row of the result
    contains elements of different samples.
    """
    dim = next(dim for dim, size in enumerate(after) if isinstance(size, torch.SymInt))
    rows = rows_per_sample(after[dim])
    if rows is None:
        return None
    outside = prod(before[: layout.dim]) * layout.outer
    inside = layout.inner * prod(before[layout.dim + 1 :])
    outer, rest = divmod(outside, prod(after[:dim]) or 1)
    inner, others = divmod(inside, prod(after[dim + 1 :]) or 1)
    if rest or others or outer * inner != rows:
        raise Unrelated("a reshaped tensor has rows with elements of different samples")
    return SampleLayout(dim, outer, inner)
