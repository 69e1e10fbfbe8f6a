"""Decide which weights of a captured module are split over tensor-parallel ranks.

Shards are propagated through the operations in program order. A linear layer with a full input is
column parallel: each rank computes some of the output columns. The following operations are
applied to these shards (hpc3d.partition.tensor_parallel.shard_rules). A linear layer whose input
is split along the columns is row parallel; its result is all-reduced. A weight is split only if
its shards reach a row-parallel layer, or if it contains a large fraction of all parameters. In the
latter case, the result is gathered; an embedding table is split by rows. All other weights and
operations are replicated.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import fx

from hpc3d.partition.capture import (
    Captured,
    is_trained,
    memory_of,
    state_of,
    written_memory,
)
from hpc3d.partition.capturing.user_code import tensors
from hpc3d.partition.tensor_parallel.dimensions import WrongSections
from hpc3d.partition.tensor_parallel.shard_rules import LocalOperation, rule_of, transposed
from hpc3d.partition.tensor_parallel.shards import SplitDim

# A weight with at least this fraction of all parameters is split even without a second layer.
_LARGE = 1 / 16


class Sharding(NamedTuple):
    """Placement of weights and operations on `ways` tensor-parallel ranks.

    `weights` maps names to placements. `operations` maps each operation that is applied to shards
    to its LocalOperation. `made` maps each node whose users receive a shard of its value to the
    placement of the value. All other weights, operations and values are replicated. `graded`
    contains the nodes whose values have gradients.
    """

    ways: int
    weights: Mapping[str, SplitDim]
    operations: Mapping[fx.Node, LocalOperation]
    made: Mapping[fx.Node, Any]
    graded: Collection[fx.Node]


def sharding_of(captured: Captured, ways: int, full: Collection[fx.Node] = ()) -> Sharding:
    """Decide which weights and operations are split over `ways` ranks.

    `full` contains values that readers receive unsplit, such as messages between stages.
    """
    choices = _Choices(captured, ways)
    while True:
        flow, before = _ShardFlow(captured, full, choices), choices.count
        flow.run()
        if choices.count == before:
            made = flow.placements()
            return Sharding(ways, flow.claims, flow.operations, made, _graded(captured))


def _graded(captured: Captured) -> set[fx.Node]:
    """Return the trained weights, and the floating-point and complex values that depend on them.

    If an operation writes such a value into memory, all values in this memory depend on it.
    """
    state, memory = state_of(captured), set[int]()
    found = {node for node, name in captured.weights.items() if is_trained(state[name])}
    before = -1
    while len(found) > before:
        before = len(found)
        for node in captured.program.graph.nodes:
            read = not found.isdisjoint(node.all_input_nodes)
            if (read or not memory.isdisjoint(memory_of(node))) and _is_continuous(node):
                found.add(node)
                memory |= written_memory(node)
    return found


def _is_continuous(node: fx.Node) -> bool:
    """Return True if autograd may track the result of an operation."""
    detached = getattr(node.target, "overloadpacket", None) is torch.ops.aten.detach
    values = tensors(node.meta.get("val"))
    return not detached and any(each.is_floating_point() or each.is_complex() for each in values)


class _Choices:
    """Decisions that are revised until they are consistent.

    `replicated` contains the names of weights that are not split, and `not_columns` the names of
    those that are not column parallel. `sections` maps the names of weights to the sections of
    their output columns.
    """

    def __init__(self, captured: Captured, ways: int) -> None:
        state = state_of(captured)
        total = sum(each.numel() for each in state.values() if is_trained(each))
        self.ways, self.sizes = ways, {name: [*each.shape] for name, each in state.items()}
        self.large = {name for name, each in state.items() if each.numel() >= _LARGE * total}
        self.replicated: set[str] = set()
        self.not_columns: set[str] = set()
        self.sections: dict[str, tuple[int, ...]] = {}

    @property
    def count(self) -> int:
        """Number of revisions."""
        sections = sum(map(len, self.sections.values()))
        return len(self.replicated) + len(self.not_columns) + sections

    def divide(self, names: Collection[str], sections: tuple[int, ...]) -> bool:
        """Set the sections of weights; return False if this is impossible."""
        fits = all(size and size % self.ways == 0 for size in sections)
        finer = all(len(sections) > len(self.sections.get(name, (0,))) for name in names)
        if not fits or not finer or any(sum(sections) not in self.sizes[name] for name in names):
            return False
        self.sections |= dict.fromkeys(names, sections)
        return True


class _ShardFlow:
    """Propagation of shards through a program for given `choices`; see the rules module."""

    def __init__(self, captured: Captured, full: Collection[fx.Node], choices: _Choices) -> None:
        self.captured, self.full, self.choices = captured, full, choices
        self.ways = choices.ways
        self.operations: dict[fx.Node, LocalOperation] = {}
        self.made: dict[fx.Node, Any] = {}  # placements of split values
        self.origins: dict[fx.Node, set[str]] = {}  # column-parallel weights of split values
        self.claims: dict[str, SplitDim] = {}
        self.readers: defaultdict[str, set[fx.Node]] = defaultdict(set)
        self.pending: dict[str, SplitDim] = {}  # placements requested by the current operation
        self.columns_of: set[str] = set()
        nodes = captured.program.graph.nodes
        self.written = {number for node in nodes for number in written_memory(node)}
        self.used = {node for piece in captured.pieces for node in (*piece.nodes, *piece.copies)}

    def run(self) -> None:
        """Propagate shards, or revise the sections of a weight and stop."""
        for node in self.captured.program.graph.nodes:
            if node.op == "output":
                self._gather(node.all_input_nodes)
            elif node in self.used and not self._take(node):
                return
        for node, name in self.captured.weights.items():
            readers = {each for each in _readers(node) if each in self.used}
            if name in self.claims and not readers <= self.readers[name]:
                self.choices.replicated.add(name)

    def _take(self, node):
        """Apply the rule of an operation; without a rule, the operation needs full operands.

        Returns False if the sections of a weight have been revised instead.
        """
        split = [each for each in node.all_input_nodes if each in self.made]
        names = {name for each in split for name in self.origins[each]}
        self.pending, self.columns_of = {}, set()
        rule = None if self.is_written(node) else rule_of(node)
        try:
            local = rule(self, node) if rule else None
        except WrongSections as wrong:
            if self.choices.divide(names, wrong.sections):
                return False
            local = None
        if local is None or not _can_draw(node, local.result):
            self._gather(split)
        else:
            self._add(node, local, names | self.columns_of)
        return True

    def _add(self, node, local, names):
        self.operations[node] = local
        for name, split in self.pending.items():
            self.claims[name] = split
            self.readers[name].add(node)
        self._gather(
            each for each in node.all_input_nodes if self.made.get(each) != local.needs.get(each)
        )
        if local.result and node in self.full:
            self._refuse(names, local.result)
        elif local.result:
            self.made[node], self.origins[node] = local.result, names

    def _gather(self, nodes):
        for node in nodes:
            if node in self.made:
                self._refuse(self.origins[node], self.made[node])

    def _refuse(self, names, placement):
        """Replicate column-parallel weights whose result is gathered, unless they are large."""
        splits = [placement] if isinstance(placement, SplitDim) else placement
        can_gather = all(split.blocks == 1 for split in splits)
        self.choices.not_columns |= names - self.choices.large if can_gather else names

    def placements(self) -> dict[fx.Node, Any]:
        """Return the placements of all split values and weights."""
        found = dict(self.made)
        for node, name in self.captured.weights.items():
            if name in self.claims:
                found[node] = self.claims[name]
                for each in _transposes(node):
                    dim = transposed(each)[1].index(self.claims[name].dim)
                    found[each] = self.claims[name]._replace(dim=dim)
                    (source, *_) = each.all_input_nodes
                    needs = {source: found[source]}
                    self.operations[each] = LocalOperation(needs, found[each])
        return found

    # The following methods are called by rules.

    def is_written(self, node: fx.Node) -> bool:
        """Return True if an operation modifies the memory of a value in place."""
        return not self.written.isdisjoint(memory_of(node))

    def is_constant(self, node: fx.Node) -> bool:
        """Return True if a value is a weight, or is computed without the model inputs."""
        return node not in self.captured.piece_of and node not in self.captured.inputs

    def is_weight(self, node: fx.Node) -> bool:
        """Return True for a parameter and for the transpose of a parameter."""
        name = self.captured.weights.get(transposed(node)[0])
        return name in self.captured.program.state_dict

    def is_large(self, node: fx.Node) -> bool:
        return self.captured.weights[transposed(node)[0]] in self.choices.large

    def columns(self, node: fx.Node, dim: int) -> tuple[int, ...] | None:
        """Return the sections of the output columns of a weight, its dimension `dim`.

        Returns `None` if the layer cannot be column parallel.
        """
        name = self.captured.weights[transposed(node)[0]]
        sections = self.choices.sections.get(name, (node.meta["val"].shape[dim],))
        fits = all(size % self.ways == 0 for size in sections)
        return sections if fits and name not in self.choices.not_columns else None

    def claim(self, node: fx.Node, split: SplitDim, columns: bool = False) -> bool:
        """Mark a weight as split; the operand `node` is the weight or a transpose of it.

        Returns False if the weight must be replicated. If `columns` is True, the result of the
        current operation is split because of this weight.
        """
        source, dims = transposed(node)
        name, placed = self.captured.weights[source], split._replace(dim=dims[split.dim])
        usable = source.meta["val"].dim() <= 2 and split.blocks == 1
        if not usable or name in self.choices.replicated or self.is_written(source):
            return False
        if self.claims.get(name, placed) != placed:
            self.choices.replicated.add(name)
            return False
        self.pending[name] = placed
        self.columns_of |= {name} if columns else set()
        return True


def _can_draw(node: fx.Node, result: Any) -> bool:
    """Return False for a random operation if `own_part` cannot select its shard `result`."""
    random = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
    return not random or result.blocks == 1


def _transposes(node: fx.Node) -> Iterator[fx.Node]:
    """Yield the direct and indirect transposes of a weight."""
    for user in node.users:
        if transposed(user)[0] is not user:
            yield user
            yield from _transposes(user)


def _readers(node: fx.Node) -> Iterator[fx.Node]:
    """Yield the operations that read a weight or one of its transposes."""
    for each in (node, *_transposes(node)):
        yield from (user for user in each.users if transposed(user)[0] is user)
