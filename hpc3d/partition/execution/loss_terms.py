"""Losses that are averages over the valid targets of a batch.

Cross-entropy divides the sum over the targets of a batch by the number of targets that are not
ignored, or by their total class weight. A masked mean divides a sum by the number of unmasked
elements. Such a denominator D differs between microbatches, so the mean of their losses is not the
loss of the batch. In a model chunk, the operation therefore divides by D (n / N), where the N
samples of the step have the denominator D and the n samples of the microbatch are averaged:

    sum over microbatches of (n / N) (sum of n samples) / (D n / N)  =  (sum of N samples) / D

D is computed on rank 0 before the step, from the inputs and from weights that do not change.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from hpc3d.partition.capture import (
    Captured,
    is_size,
    is_trained,
    memory_of,
    size_of,
    state_of,
    written_by,
)
from hpc3d.partition.execution.random_numbers import Draw
from hpc3d.partition.execution.random_operations import arguments_of

_aten = torch.ops.aten
_OVER_TARGETS = (_aten.cross_entropy_loss, _aten.nll_loss_nd, _aten.nll_loss, _aten.nll_loss2d)
_QUOTIENTS = (_aten.div, _aten.div_, _aten.true_divide)
_MEAN, _SUM = 1, 2  # values of the argument `reduction` in torch


class LossTerms:
    """Operations of a captured module that divide by a number of valid targets.

    `names` contains the names of these operations. `weights` must map the names in `reads` to
    tensors before `denominators` is called; no step changes these weights.
    """

    def __init__(self, captured: Captured) -> None:
        known = _known(captured)
        self.captured = captured
        self.terms = {
            node: operands
            for node in captured.program.graph.nodes
            if (operands := _operands(node, captured)) and {*operands} <= known
        }
        self.names = [node.name for node in self.terms]
        self.order = _needed(captured, [each for some in self.terms.values() for each in some])
        self.reads = {captured.weights[node] for node in self.order if node in captured.weights}
        self.weights: dict[str, torch.Tensor] = {}

    def denominators(self, inputs: Sequence[Any], samples: int) -> dict[str, float]:
        """Return the denominator of each operation, divided by the number of samples.

        `inputs` contains the model inputs of a step with `samples` samples.
        """
        captured = self.captured
        values = dict(zip(captured.inputs, inputs, strict=True))
        for node in self.order:
            if node in captured.weights:
                values[node] = self.weights[captured.weights[node]]
            elif is_size(node):
                values[node] = size_of(node.meta["val"], samples)
            elif node not in values:
                args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
                values[node] = node.target(*args, **kwargs)
        return {
            node.name: _denominator(node, [values[each] for each in operands]) / samples
            for node, operands in self.terms.items()
        }

    def weigh(self, node: fx.Node, original: fx.Node, draw: fx.Node) -> None:
        """Let an operation divide by the denominator of the step, scaled to the samples.

        `node` is a copy of the operation `original`, and `draw` is the graph input that receives
        a `Draw` at run time. Other operations are not changed.
        """
        if original not in self.terms:
            return
        if original.target.overloadpacket in _QUOTIENTS:
            node.args = original.name, draw, *node.args[:2]
            node.target = _quotient
        else:
            node.args = original.name, draw, node.target, arguments_of(node)
            node.target, node.kwargs = _mean_over_targets, {}


def _operands(node: fx.Node, captured: Captured) -> list[fx.Node]:
    """Return the operands that determine the denominator of an operation.

    These are the targets and the class weights of a loss, or the divisor of a quotient. The list
    is empty if the operation does not divide by a number of valid targets.
    """
    packet = getattr(node.target, "overloadpacket", None)
    if packet in _OVER_TARGETS:
        given = arguments_of(node)
        target, weight = given["target"], given["weight"]
        classes = not target.meta["val"].is_floating_point()
        if given["reduction"] == _MEAN and classes:
            return [target] if weight is None else [target, weight]
    if packet in _QUOTIENTS and node in captured.piece_of:
        over, divisor = node.args[:2]
        if isinstance(divisor, fx.Node) and divisor in captured.piece_of and _is_sum(over):
            return [divisor]
    return []


def _is_sum(node: Any) -> bool:
    """Return True if a scalar is a sum over the samples of a batch."""
    if not isinstance(node, fx.Node) or not isinstance(node.meta["val"], torch.Tensor):
        return False
    if node.meta["val"].dim():
        return False
    packet = getattr(node.target, "overloadpacket", None)
    if packet is _aten.sum:
        return True
    return "reduction" in _parameters(node) and arguments_of(node)["reduction"] == _SUM


def _parameters(node):
    schema = getattr(node.target, "_schema", None)
    return {each.name for each in schema.arguments} if schema else {}


def _denominator(node: fx.Node, operands: Sequence[torch.Tensor]) -> float:
    target, *weight = operands
    if node.target.overloadpacket in _QUOTIENTS:
        return float(target)
    valid = target[target != arguments_of(node)["ignore_index"]]
    return float(weight[0][valid].sum()) if weight else float(valid.numel())


def _known(captured: Captured) -> set[fx.Node]:
    """Return the nodes that depend only on the inputs and on weights that never change."""
    state, nodes = state_of(captured), captured.program.graph.nodes
    written = {target for node in nodes for target in written_by(node)}
    found = {
        *captured.inputs,
        *(node for node, name in captured.weights.items() if not is_trained(state[name])),
    } - written
    unknown: set[int] = set()  # memory that contains other values
    for node in nodes:
        if node.op != "call_function":
            continue
        tags = getattr(node.target, "tags", ())
        drawn = not hasattr(node.target, "_schema") or torch.Tag.nondeterministic_seeded in tags
        if is_size(node):
            found.add(node)
        elif drawn or memory_of(node) & unknown or not found.issuperset(node.all_input_nodes):
            unknown |= {each for target in written_by(node) for each in memory_of(target)}
        else:
            found.add(node)
    return {node for node in found if not memory_of(node) & unknown}


def _needed(captured: Captured, wanted: Sequence[fx.Node]) -> list[fx.Node]:
    """Return all direct and indirect operands of `wanted`, in program order.

    The list includes operations that write to the memory of an operand.
    """
    nodes, writers = [*captured.program.graph.nodes], defaultdict(list)
    for node in nodes:
        for number in {each for target in written_by(node) for each in memory_of(target)}:
            writers[number].append(node)
    found, todo = set(), [*wanted]
    while todo:
        node = todo.pop()
        if node not in found:
            found.add(node)
            todo += [] if is_size(node) else node.all_input_nodes
            todo += [each for number in memory_of(node) for each in writers[number]]
    return [node for node in nodes if node in found]


def _quotient(name: str, draw: Draw, total: torch.Tensor, divisor: torch.Tensor) -> torch.Tensor:
    given = draw.denominators.get(name)
    return total / (divisor if given is None else given * draw.samples)


def _mean_over_targets(
    name: str, draw: Draw, loss: Callable[..., torch.Tensor], arguments: Mapping[str, Any]
) -> torch.Tensor:
    given = draw.denominators.get(name)
    if given is None:
        return loss(**arguments)
    return loss(**arguments | {"reduction": _SUM}) / (given * draw.samples)
