"""Graph of the operations that each tensor-parallel rank computes."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from hpc3d.partition.tensor_parallel.propagation import Sharding
from hpc3d.partition.tensor_parallel.shards import Split, copied, gathered, narrowed, reduced


class LocalGraph:
    """Copies of a program's operations in `graph`, with conversions between full and split values.

    `copies` maps the nodes of the program to their copies. `ranks` is the graph input that
    receives the communicator of the tensor-parallel ranks. Without a `sharding`, the operations
    are copied unchanged.
    """

    def __init__(
        self,
        graph: fx.Graph,
        copies: dict[fx.Node, fx.Node],
        sharding: Sharding | None,
        ranks: fx.Node | None,
    ) -> None:
        self.graph, self.copies, self.ranks = graph, copies, ranks
        self.sharding = sharding or Sharding(1, {}, {}, {})
        self.converted: dict[Any, fx.Node] = {}

    def split_of(self, node: fx.Node) -> Split | None:
        """Return how the result of an operation is split; `None` if each rank has all of it."""
        local = self.sharding.operations.get(node)
        return local.result if local else None

    def add(self, node: fx.Node) -> fx.Node:
        """Add a copy of an operation, applied to shards if there is a rule; return the copy."""
        local = self.sharding.operations.get(node)
        if local is None:
            return self.graph.node_copy(node, lambda each: self._operand(each, None, False))

        def operand(each):
            return self._operand(each, local.needs.get(each), bool(local.result))

        if local.target is None:
            return self.graph.node_copy(node, operand)
        args = fx.node.map_arg(local.args, operand)
        args = (*args, self.ranks) if local.ranks else args
        return self.graph.call_function(local.target, args)

    def finish(self, node: fx.Node, copy: fx.Node) -> fx.Node:
        """Return the value for the readers of an operation, given its `copy` in the graph."""
        local = self.sharding.operations.get(node)
        if local and local.partial:
            copy = self.graph.call_function(reduced, (copy, self.ranks))
            if local.bias is not None:
                bias = self._operand(local.bias, None, False)
                copy = self.graph.call_function(torch.ops.aten.add.Tensor, (copy, bias))
        elif local and local.result and node not in self.sharding.made:
            copy = self.graph.call_function(gathered, (copy, local.result, self.ranks))
        return copy

    def _operand(self, node, wanted, partial):
        """Return an operand with the placement `wanted`.

        If `partial` is True, the gradient of a full operand is a partial sum on each rank.
        """
        made = self.sharding.made.get(node)
        value = self.copies[node]
        if made and wanted != made:
            value, made = self._convert(gathered, value, made), None
        if wanted and not made:
            return self._convert(narrowed, value, wanted)
        if partial and not wanted and _may_have_gradient(node):
            return self._convert(copied, value)
        return value

    def _convert(self, conversion, value, *split):
        key = conversion, value, split
        if key not in self.converted:
            args = value, *split, self.ranks
            self.converted[key] = self.graph.call_function(conversion, args)
        return self.converted[key]


def _may_have_gradient(node):
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.is_floating_point()
