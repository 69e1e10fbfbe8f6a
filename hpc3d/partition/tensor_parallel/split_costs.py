"""Costs of a captured module whose replicas consist of tensor-parallel ranks.

A rank computes 1/t of each split operation and stores 1/t of its weight. In addition, the ranks
perform the collectives of the local graph (hpc3d.partition.tensor_parallel.local_graph). The
operations between two layers of a pair are never assigned to different pipeline stages.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod
from types import SimpleNamespace
from typing import NamedTuple

import torch
from torch import fx

from hpc3d.partition.capture import Captured, outputs_of, shape_of
from hpc3d.partition.evaluation import ModelCosts
from hpc3d.partition.operation_costs import OperationCost, Operations, Work
from hpc3d.partition.tensor_parallel.local_graph import LocalGraph, collectives_of
from hpc3d.partition.tensor_parallel.propagation import Sharding, sharding_of
from hpc3d.partition.tensor_parallel.shard_rules import transposed
from hpc3d.partition.tensor_parallel.shards import looked_up
from hpc3d.predict.machine.machine import Machine


class SplitRoles(NamedTuple):
    """Operations split over several ranks.

    The sets contain column- and row-parallel linear layers, the operations between them,
    embeddings, and losses. `weights` maps the names of split weights to their split dimension.
    """

    columns: frozenset[fx.Node]
    rows: frozenset[fx.Node]
    inner: frozenset[fx.Node]
    tables: frozenset[fx.Node]
    losses: frozenset[fx.Node]
    weights: Mapping[str, int]


class TensorCall(NamedTuple):
    """Collective call `op` of an operation in a `phase`, "forward" or "backward".

    `nbytes` is the size of the full value, for a microbatch of one rank.
    """

    node: fx.Node
    phase: str
    op: str
    nbytes: float


class SplitOperations(Operations):
    """Operations of a model on one of `ways` tensor-parallel ranks.

    Subclasses define the method `collectives`.
    """

    def __init__(self, operations: Operations, ways: int, roles: SplitRoles) -> None:
        self.ways, self.roles = ways, roles
        self.captured = _part_of(operations.captured, roles.weights, ways)
        self.savers = operations.savers
        self.kinds = {
            node: (self._part(node, low), self._part(node, high), dtype)
            for node, (low, high, dtype) in operations.kinds.items()
        }

    def collectives(
        self, found: Mapping[fx.Node, OperationCost], batch: int
    ) -> Iterator[TensorCall]:
        """Yield the collectives of a microbatch of `batch` samples.

        `found` contains the costs of the operations without collectives.
        """
        raise NotImplementedError

    def _part(self, node, operation):
        """Return the work and memory of one rank's shard of an operation."""
        roles, ways = self.roles, self.ways
        if not any(node in group for group in roles[:-1]):
            return operation
        # In the forward GEMM (batch, m, n, k), column parallelism divides n by `ways`, and row
        # parallelism divides k. The backward GEMMs are (batch, m, k, n) for the input gradient,
        # if the input requires a gradient, and (batch, k, n, m) for the weight gradient.
        forward, backward = ((3,), (2, 1)) if node in roles.rows else ((2,), (3, 2))
        own = {
            "forward": _divided(operation.forward, forward, ways),
            "backward": _divided(operation.backward, backward, ways),
        }
        # The all-reduced results of row-parallel layers and embeddings are not sharded.
        if node not in roles.rows | roles.tables:
            kept = ("saved", "later", "working") + ("nbytes",) * (node not in roles.losses)
            own |= {name: getattr(operation, name) / ways for name in kept}
        return operation._replace(**own)

    def costs(self, machine: Machine, batch: int) -> dict[fx.Node, OperationCost]:
        """Return the cost of each operation on one rank, including the times of collectives."""
        found, ranks = super().costs(machine, batch), range(self.ways)
        for node, phase, op, nbytes in [*self.collectives(found, batch)]:
            received = (1 + (op == "all_reduce")) * (1 - 1 / self.ways) * nbytes
            seconds = machine.call(op, received, ranks)
            found[node] = found[node]._replace(**{phase: getattr(found[node], phase) + seconds})
        return found


def _divided(work, indices, ways):
    """Divide the work of an operation by `ways`.

    `indices` contains, for each GEMM, the index of the dimension to divide. If the operation has
    fewer GEMMs than `indices` has entries (for example, no GEMM for the input gradient), only the
    last entries are used.
    """
    products = tuple(
        tuple(size / ways if at == index else size for at, size in enumerate(sizes))
        for sizes, index in zip(work.products, indices[len(indices) - len(work.products) :])
    )
    return Work(products, work.flop / ways, work.nbytes / ways)


def _part_of(captured, weights, ways):
    """Return a copy of the captured module in which sharded weights have their local shapes."""
    program = captured.program
    state = dict(program.state_dict)
    for name, dim in weights.items():
        whole = program.state_dict[name]
        shape = list(whole.shape)
        shape[dim] = -(-shape[dim] // ways)
        part = torch.empty(shape, dtype=whole.dtype, device="meta")
        state[name] = torch.nn.Parameter(part, requires_grad=whole.requires_grad)
    like = SimpleNamespace(state_dict=state, constants=program.constants, graph=program.graph)
    return captured._replace(program=like)


class ShardedOperations(SplitOperations):
    """Operations that are split as `sharding_of` decides.

    Raises ValueError if no layer can be split.
    """

    def __init__(self, operations: Operations, ways: int) -> None:
        captured = operations.captured
        self.sharding = sharding_of(captured, ways, outputs_of(captured))
        if not self.sharding.weights:
            raise ValueError(
                f"--tensor {ways}: the model has no linear layers that can be split over {ways} "
                "ranks; use --tensor 1"
            )
        super().__init__(operations, ways, _roles(captured, self.sharding))
        self.together = [*_pairs(captured, self.sharding)]
        self.calls = [*_calls(captured, self.sharding)]

    def collectives(
        self, found: Mapping[fx.Node, OperationCost], batch: int
    ) -> Iterator[TensorCall]:
        """Yield the collectives of the local graph."""
        for node, phase, op, value in self.calls:
            if node in found:
                nbytes = prod(shape_of(value, batch)) * value.element_size()
                yield TensorCall(node, phase, op, nbytes)


def _roles(captured, sharding):
    matrices = {node for node in captured.weights if node.meta["val"].dim() > 1}
    found = {name: set() for name in ("columns", "rows", "inner", "tables")}
    for node, local in sharding.operations.items():
        if local.partial:
            found["rows"].add(node)
        elif local.target is looked_up:
            found["tables"].add(node)
        else:
            weights = {transposed(each)[0] for each in local.needs} & matrices
            found["columns" if weights else "inner"].add(node)
    sets = {name: frozenset(nodes) for name, nodes in found.items()}
    weights = {name: split.dim for name, split in sharding.weights.items()}
    return SplitRoles(**sets, losses=frozenset(), weights=weights)


def _pairs(captured: Captured, sharding: Sharding) -> Iterator[list[int]]:
    """Yield the pieces that compute or read a split value, for each such value."""
    for node in sharding.made:
        if node in captured.piece_of:
            readers = [each for each in node.users if each in captured.piece_of]
            yield sorted({captured.piece_of[each] for each in (node, *readers)})


def _calls(captured, sharding):
    """Yield (operation, phase, collective, full value) for each collective of the model."""
    graph, program = fx.Graph(), captured.program.graph
    copies = {node: graph.placeholder(node.name) for node in program.find_nodes(op="placeholder")}
    local = LocalGraph(graph, copies, sharding, graph.placeholder("ranks"))
    for node in program.nodes:
        before = len(graph.nodes)
        if node.op == "call_function":
            copies[node] = local.finish(node, local.add(node))
        for each in [*graph.nodes][before:]:
            for phase, op in collectives_of(each):
                yield node, phase, op, each.meta["val"]


class TensorCosts(ModelCosts):
    """Costs of a model whose replicas are groups of `ways` adjacent tensor-parallel ranks.

    `costs` contains the costs of one of these ranks.
    """

    def __init__(self, costs: ModelCosts, ways: int) -> None:
        self.ways = ways
        super().__init__(costs.graph, costs.machine, costs.batch, costs.run, costs.states)

    def message(self, nbytes: float, senders: range, receivers: range) -> float:
        """Return the time in seconds to send a microbatch's activations to the next stage.

        `senders` and `receivers` are replica indices; the first rank of replica r is `ways` * r.
        """
        ways = self.ways
        apart = [range(ways * each[0], ways * each[-1] + 1, ways) for each in (senders, receivers)]
        return super().message(nbytes, apart[0], apart[1])

    def summed(self, nbytes: float, ranks: range | tuple[int, ...]) -> float:
        """Return the time in seconds of an all-reduce over the first rank of each replica.

        The other ranks of the replicas all-reduce their shards at the same time.
        """
        return super().summed(nbytes, tuple(self.ways * rank for rank in ranks))
