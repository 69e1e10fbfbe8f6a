"""Graph of the operations that each tensor-parallel rank computes."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from hpc3d.partition.tensor_parallel.propagation import Sharding
from hpc3d.partition.tensor_parallel.shards import (
    COLLECTIVES,
    SplitDim,
    copied,
    gathered,
    narrowed,
    reduced,
)


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
        self.sharding = sharding or Sharding(1, {}, {}, {}, ())
        self.converted: dict[Any, fx.Node] = {}

    def split_of(self, node: fx.Node) -> SplitDim | None:
        """Return the placement of an operation's local result, or `None` if it is not split."""
        local = self.sharding.operations.get(node)
        return local.result if local else None

    def add(self, node: fx.Node) -> fx.Node:
        """Return a new copy of an operation, applied to shards if a sharding rule exists."""
        local = self.sharding.operations.get(node)
        if local is None:
            return self.graph.node_copy(node, lambda each: self._operand(each, None, False))

        def operand(each):
            return self._operand(each, local.needs.get(each), bool(local.result))

        if local.target is None:
            return self.graph.node_copy(node, operand)
        args = fx.node.map_arg(local.args, operand)
        return self._call(local.target, (*args, self.ranks) if local.ranks else args, node)

    def finish(self, node: fx.Node, copy: fx.Node) -> fx.Node:
        """Reduce or gather the result `copy` of an operation if its readers need the full value.

        Returns the value for the readers.
        """
        local = self.sharding.operations.get(node)
        if local and local.partial:
            copy = self._call(reduced, (copy, self.ranks), node)
            if local.bias is not None:
                bias = self._operand(local.bias, None, False)
                copy = self._call(torch.ops.aten.add.Tensor, (copy, bias), node)
        elif local and local.result and node not in self.sharding.made:
            copy = self._call(gathered, (copy, local.result, self.ranks), node)
        return copy

    def _operand(self, node, wanted, partial):
        """Return an operand with the placement `wanted`.

        If `partial` is True, the gradient of a full operand is a partial sum on each rank.
        """
        made = self.sharding.made.get(node)
        value = self.copies[node]
        if made and wanted != made:
            value, made = self._convert(gathered, value, node, made), None
        if wanted and not made:
            return self._convert(narrowed, value, node, wanted)
        if partial and not wanted and node in self.sharding.graded:
            return self._convert(copied, value, node)
        return value

    def _convert(self, conversion, value, node, *split):
        """Convert a value, or return the existing result of the same conversion."""
        key = conversion, value, split
        if key not in self.converted:
            self.converted[key] = self._call(conversion, (value, *split, self.ranks), node)
        return self.converted[key]

    def _call(self, target, args, node):
        """Add a call with the metadata of `node`, which describes the full result."""
        call = self.graph.call_function(target, args)
        call.meta["val"], call.meta["graded"] = node.meta["val"], node in self.sharding.graded
        return call


def collectives_of(node: fx.Node) -> list[tuple[str, str]]:
    """Return the (phase, collective) pairs of a call in a local graph.

    The phase is "forward" or "backward". Values without a gradient have no backward pass.
    """
    calls = COLLECTIVES.get(node.target, {}) if node.op == "call_function" else {}
    return [each for each in calls.items() if each[0] == "forward" or node.meta["graded"]]
