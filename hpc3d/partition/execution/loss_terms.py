"""Losses that are averages over the valid targets of a batch.

Cross-entropy divides the sum over the targets of a batch by the number of targets that are not
ignored, or by their total class weight. A masked mean divides a sum by the number of unmasked
elements. Such a denominator differs between microbatches, so the mean of their losses is not the
loss of the batch. In a model chunk, the operation therefore divides by D (n / N), where D is the
denominator of all N samples of the step, and n is the number of samples in the microbatch:

    sum over microbatches of (n / N) (sum of n samples) / (D n / N)  =  (sum of N samples) / D

In general, each statistic of the inputs that does not depend on trained parameters, such as a
count, a mean or a maximum over the samples, has the value of the full batch. If it grows with the
batch, as a count does, it is multiplied by n / N. D and the statistics are computed on rank 0
before the step. If the user states that the loss is a sum over the samples, it is multiplied by
N / n in each microbatch.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor

from hpc3d.console.exit_codes import BadData
from hpc3d.partition.capture import (
    Captured,
    is_size,
    is_trained,
    memory_of,
    size_of,
    state_of,
    written_by,
)
from hpc3d.partition.capturing.flat_export import where
from hpc3d.partition.capturing.mean_loss import powers_of
from hpc3d.partition.capturing.sample_layout import arguments_of
from hpc3d.partition.capturing.sample_relations import BatchValues, packet_of
from hpc3d.partition.execution.random_numbers import Draw

_aten = torch.ops.aten
_OVER_TARGETS = (_aten.cross_entropy_loss, _aten.nll_loss_nd, _aten.nll_loss, _aten.nll_loss2d)
_SAME_DEGREE = {  # the result is proportional to the batch size if the operand is
    *(_aten.clamp, _aten.clamp_, _aten.clamp_min, _aten.clamp_min_, _aten.maximum, _aten.abs),
    *(_aten.to, _aten._to_copy, _aten.add_, _aten.type_as),
}
_MEAN, _SUM = 1, 2  # values of the argument `reduction` in torch
_OF_DENOMINATOR = "ignore_index", "target", "weight"  # arguments that determine the denominator


class LossTerms:
    """Operations of a captured module whose results depend on the inputs of the full batch.

    `sizes` maps the name of each of these operations to the number of values that it needs.
    `weights` must map the names in `reads` to tensors before `values` is called; no step changes
    these weights.
    """

    def __init__(self, captured: Captured) -> None:
        known, nodes = _known(captured), captured.program.graph.nodes
        self.captured = captured
        self.targets = {
            node: operands
            for node in nodes
            if node in captured.piece_of and (operands := _operands(node))
        }
        self.unknown = {node for node, each in self.targets.items() if not {*each} <= known}
        self.targets = {n: each for n, each in self.targets.items() if n not in self.unknown}
        batch = BatchValues(captured.program, captured.loss.node)
        self.degrees = _degrees(
            batch, [node for node in nodes if _is_boundary(node, known, batch)]
        )
        is_sum = captured.loss.reduction == "sum"
        self.sums = [captured.loss.node] if is_sum and captured.loss.node else []
        self.sizes = {node.name: 1 for node in (*self.targets, *self.sums)}
        self.sizes |= {node.name: prod(node.meta["val"].shape) for node in self.degrees}
        wanted = [each for operands in self.targets.values() for each in operands]
        self.order = _needed(captured, [*wanted, *self.degrees])
        self.reads = {captured.weights[node] for node in self.order if node in captured.weights}
        self.weights: dict[str, torch.Tensor] = {}

    def values(self, inputs: Sequence[Any], samples: int) -> dict[str, torch.Tensor]:
        """Return the float64 values that each operation needs from the full batch.

        `inputs` contains the model inputs of a step with `samples` samples. Values that grow with
        the batch are divided by the number of samples.
        """
        captured = self.captured
        values = dict(zip(captured.inputs, map(_contiguous, inputs), strict=True))
        for node in self.order:
            if node in captured.weights:
                values[node] = self.weights[captured.weights[node]]
            elif is_size(node):
                values[node] = size_of(node.meta["val"], samples)
            elif node not in values:
                args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
                values[node] = node.target(*args, **kwargs)
        found = {
            node.name: _denominator(
                arguments_of(node)["ignore_index"], *(values[each] for each in operands)
            )
            / samples
            for node, operands in self.targets.items()
        }
        found |= {
            node.name: values[node].double() / samples**degree
            for node, degree in self.degrees.items()
        }
        return found | {node.name: torch.tensor(samples).double() for node in self.sums}

    def weigh(self, node: fx.Node, original: fx.Node, draw: fx.Node) -> None:
        """Make an operation use the values of the full batch.

        `node` is a copy of the operation `original`, and `draw` is the graph input that receives
        a `Draw` at run time. Other operations are not changed.
        """
        if original in self.sums:
            node.args = original.name, draw, node.target, node.args, node.kwargs
            node.target, node.kwargs = _sum_over_samples, {}
        elif original in self.targets:
            node.args = original.name, draw, node.target, arguments_of(node)
            node.target, node.kwargs = _mean_over_targets, {}
        elif original in self.unknown:
            node.args = original.name, where(original), node.target, arguments_of(node)
            node.target, node.kwargs = _mean_without_ignored, {}
        elif original in self.degrees:
            place = original.name, draw, self.degrees[original]
            node.args = *place, node.target, node.args, node.kwargs
            node.target, node.kwargs = _statistic, {}


def _operands(node: fx.Node) -> list[fx.Node]:
    """Return the targets and the class weights of a mean over targets, otherwise []."""
    if packet_of(node) not in _OVER_TARGETS:
        return []
    given = arguments_of(node)
    target, weight = given["target"], given["weight"]
    if given["reduction"] != _MEAN or target.meta["val"].is_floating_point():
        return []
    return [target] if weight is None else [target, weight]


def _is_boundary(node: fx.Node, known: set[fx.Node], batch: BatchValues) -> bool:
    """Return True for a known statistic of the batch, unless only other statistics use it."""
    if node not in known or not batch.is_statistic(node):
        return False
    return any(user not in known or not batch.is_statistic(user) for user in node.users)


def _degrees(batch: BatchValues, nodes: Sequence[fx.Node]) -> dict[fx.Node, int]:
    """Return 1 for each of the statistics `nodes` that grows with the batch size, otherwise 0."""
    powers = powers_of(batch)

    def degree(node):
        found = powers.get(node)
        if found is None and packet_of(node) in _SAME_DEGREE:
            return max(map(degree, filter(batch.is_statistic, node.all_input_nodes)), default=0)
        return min(1, max(0, *found)) if found else 0

    return {node: degree(node) for node in nodes}


def _denominator(
    ignored: int, target: torch.Tensor, weight: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the number of targets other than `ignored`, or their total class weight."""
    valid = target[target != ignored]
    count = torch.tensor(valid.numel()) if weight is None else weight.double()[valid].sum()
    return count.double()


def _known(captured: Captured) -> set[fx.Node]:
    """Return the nodes that depend only on the inputs and on weights that never change."""
    state, nodes = state_of(captured), captured.program.graph.nodes
    written = {target for node in nodes for target in written_by(node)}
    written |= {node for node, name in captured.weights.items() if name in captured.changing}
    found = {
        *captured.inputs,
        *(node for node, name in captured.weights.items() if not is_trained(state[name])),
    } - written
    unknown: set[int] = set()  # memory that contains other values
    for node in nodes:
        if node.op != "call_function":
            continue
        tags = getattr(node.target, "tags", ())
        operation = hasattr(node.target, "_schema") or node.target is operator.getitem
        drawn = not operation or torch.Tag.nondeterministic_seeded in tags
        if is_size(node):
            found.add(node)
        elif drawn or memory_of(node) & unknown or not found.issuperset(node.all_input_nodes):
            unknown |= {each for target in written_by(node) for each in memory_of(target)}
        else:
            found.add(node)
    return {node for node in found if not memory_of(node) & unknown}


def _contiguous(value):
    """Return a tensor in contiguous memory, as stages receive it; return other values as is."""
    return value.contiguous() if isinstance(value, torch.Tensor) else value


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


def _sum_over_samples(
    name: str,
    draw: Draw,
    operation: Callable[..., torch.Tensor],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> torch.Tensor:
    """Multiply a sum over the n samples of a microbatch by N / n, for N samples in the step."""
    found, given = operation(*args, **kwargs), draw.batch_values.get(name)
    return found if given is None else found * (float(given) / draw.samples)


def _mean_over_targets(
    name: str, draw: Draw, loss: Callable[..., torch.Tensor], arguments: Mapping[str, Any]
) -> torch.Tensor:
    """Compute a mean loss with the denominator D n / N instead of the microbatch's denominator.

    The mean over the microbatch is multiplied by its own denominator and divided by D n / N.
    In 16 bits, a sum over the targets would be less accurate than their mean, and could overflow.
    The sum is computed only if all targets are ignored, because the mean would be NaN.
    """
    given = draw.batch_values.get(name)
    if given is None:
        return loss(**arguments)
    count = float(_denominator(*(arguments[name] for name in _OF_DENOMINATOR)))
    if not count:
        return loss(**arguments | {"reduction": _SUM})
    return loss(**arguments) * (count / (float(given) * draw.samples))


def _mean_without_ignored(
    name: str, line: str, loss: Callable[..., torch.Tensor], arguments: Mapping[str, Any]
) -> torch.Tensor:
    """Compute a loss whose targets depend on trained parameters; no target may be ignored."""
    target = arguments["target"]
    ignored = not isinstance(target, FakeTensor) and (target == arguments["ignore_index"]).any()
    if arguments["weight"] is not None or ignored:
        raise BadData(
            f"{name}{line}: the targets depend on trained parameters, so the number of valid "
            "targets in the batch is unknown; compute the loss without ignored targets and "
            "class weights"
        )
    return loss(**arguments)


def _statistic(
    name: str,
    draw: Draw,
    degree: int,
    operation: Callable[..., torch.Tensor],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> torch.Tensor:
    """Return a statistic of the full batch, scaled to the samples if it grows with the batch."""
    here, given = operation(*args, **kwargs), draw.batch_values.get(name)
    if given is None:
        return here
    dtype = here.dtype if here.is_floating_point() or not degree else torch.get_default_dtype()
    return (given * draw.samples**degree).to(here.device, dtype).view(here.shape)
