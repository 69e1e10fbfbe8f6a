"""Costs of a captured model under 1-D tensor parallelism (Megatron-LM; M. Shoeybi et al.,
arXiv:1909.08053).

On t ranks, a linear layer with a replicated input is column parallel: each rank computes 1/t of
the output columns. The following operations are applied to that shard; attention is sharded by
heads. The next linear layer is row parallel, and its result is all-reduced. In the backward pass,
the input gradient of such a pair of layers is all-reduced. A Transformer layer therefore has two
all-reduces in the forward pass and two in the backward pass. All other operations, such as norms,
dropout and residual additions, are replicated on every rank.

Assumptions: the head and the loss, and embeddings of at least 128 t rows, are sharded by
vocabulary; the loss all-reduces three values per token; sequence parallelism (arXiv:2205.05198) is
not used; convolutions are not sharded. A model input saved by a column-parallel layer is counted
as if it were sharded, like the result of the layer.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping

import torch
from torch import fx

from hpc3d.partition.capture import Captured
from hpc3d.partition.operation_costs import OperationCost, Operations
from hpc3d.partition.tensor_parallel.split_costs import SplitOperations, SplitRoles, TensorCall

_aten = torch.ops.aten
# Minimum rows per rank for sharding an embedding table, or a weight that has to be padded because
# its number of rows is not divisible by the number of ranks.
_PADDED = 128
_LOSS_SUMS = 3  # all-reduced values per token: maximum, sum of exponentials, label's logit

# Operations that can be applied to a shard of the columns without communication.
_LOCAL = {
    _aten.view,
    _aten.reshape,
    _aten.permute,
    _aten.transpose,
    _aten.unbind,
    _aten.flatten,
    _aten.unflatten,
    _aten.chunk,
    _aten.contiguous,
    _aten.gelu,
    _aten.relu,
    _aten.silu,
    _aten.tanh,
    _aten.dropout,
    _aten.mul,
    _aten.add,
    _aten.scaled_dot_product_attention,
}


def split_roles(captured: Captured, ways: int) -> SplitRoles:
    """Return the operations of a model that are sharded over `ways` ranks.

    The sets are empty if the model has no pairs of linear layers.
    """
    barred: set[fx.Node] = set()
    while True:
        found = _Flow(captured, ways, barred)
        if not found.wrong:
            return found.roles()
        barred |= found.wrong


class _Flow:
    """Propagation of column shards through the operations of a program.

    Linear layers with a replicated input are column parallel, except for the layers in `barred`.
    `wrong` collects the column-parallel layers whose output reaches an operation that needs all
    columns.
    """

    def __init__(self, captured, ways, barred):
        self.captured, self.ways, self.barred = captured, ways, barred
        self.origins = {}  # maps a sharded value to its column-parallel layers
        self.columns, self.rows, self.tables, self.losses = set(), set(), set(), set()
        self.wrong = set()
        for node in captured.program.graph.nodes:
            if node.op == "call_function" and node in captured.piece_of:
                self._take(node)
            elif node.op == "output":
                self._refuse(node)

    def roles(self):
        inner = frozenset(self.origins) - self.columns
        sets = self.columns, self.rows, inner, self.tables, self.losses
        return SplitRoles(*map(frozenset, sets), self._split_weights())

    def _split_weights(self):
        """Return a dict from the name of each sharded weight to its sharded dimension."""
        shares = [(node.args[0], 0) for node in self.tables]
        shares += [(node.args[1], 0) for node in self.columns]
        shares += [(node.args[2], 0) for node in self.columns if len(node.args) > 2]
        shares += [(node.args[1], 1) for node in self.rows]
        return {self.captured.weights[node]: dim for node, dim in shares if node}

    def _take(self, node):
        name = getattr(node.target, "overloadpacket", node.target)
        split = [each for each in node.all_input_nodes if each in self.origins]
        if name is _aten.linear:
            self._linear(node, split)
        elif name is _aten.embedding and self._weight(node, 0).shape[0] >= _PADDED * self.ways:
            self.tables.add(node)
        elif name is _aten.cross_entropy_loss and split:
            self.losses.add(node)
        elif split and self._is_local(node, name):
            self.origins[node] = set().union(*(self.origins[each] for each in split))
        elif split:
            self._refuse(node)

    def _linear(self, node, split):
        """Make a layer row parallel if its input is sharded, and otherwise column parallel."""
        weight = self._weight(node, 1)
        if split:
            self.rows.add(node)
            if weight is None or weight.shape[1] % self.ways:
                self._refuse(node)
        elif weight is not None and node not in self.barred:
            count = weight.shape[0]
            if count % self.ways == 0 or count >= _PADDED * self.ways:
                self.columns.add(node)
                self.origins[node] = {node}

    def _weight(self, node, index):
        """Return the weight passed as operand `index`, or `None` if it is not a weight."""
        given = node.args[index]
        return given.meta["val"] if given in self.captured.weights else None

    def _is_local(self, node, name):
        """Return True if an operation can be applied to column shards without communication.

        All operands that depend on the batch must be sharded. For attention, the number of heads
        must be divisible by the number of ranks.
        """
        batch = [each for each in node.all_input_nodes if each in self.captured.piece_of]
        if not all(each in self.origins for each in batch):
            return False
        if name is _aten.scaled_dot_product_attention:
            return node.args[0].meta["val"].shape[1] % self.ways == 0
        return name in _LOCAL or name is operator.getitem

    def _refuse(self, node):
        for each in node.all_input_nodes:
            self.wrong |= self.origins.get(each, set())


class MegatronOperations(SplitOperations):
    """Operations of a model on one of `ways` tensor-parallel ranks of Megatron-LM."""

    def __init__(self, operations: Operations, ways: int) -> None:
        super().__init__(operations, ways, split_roles(operations.captured, ways))

    def collectives(
        self, found: Mapping[fx.Node, OperationCost], batch: int
    ) -> Iterator[TensorCall]:
        """Yield the all-reduces of layers, embeddings and losses."""
        for node in self.roles.rows | self.roles.tables:
            yield TensorCall(node, "forward", "all_reduce", found[node].nbytes)
        for node in self.roles.losses:
            logits = node.args[0]
            tokens = found[logits].nbytes * self.ways / logits.meta["val"].shape[-1]
            for _ in range(_LOSS_SUMS):
                yield TensorCall(node, "forward", "all_reduce", tokens)
        # The gradient of a value is all-reduced once, even if several layers read the value.
        readers = {node.args[0]: node for node in self.roles.columns}
        for node in (node for value, node in readers.items() if value in self.kinds):
            yield TensorCall(node, "backward", "all_reduce", found[node.args[0]].nbytes)
