"""Reject losses that are known not to be a mean over the samples.

The training loop averages the losses of the microbatches, weighted by their numbers of samples.
The result equals the loss of the full batch only if the loss is a mean over the samples. For each
value, this module determines the powers of the batch size B that scale its terms: a mean has the
powers {0}, a sum has {1}, and division by B subtracts 1. If the powers cannot be determined, they
are `None`, and the loss is accepted.
"""

from __future__ import annotations

import operator
from itertools import product
from typing import Any

import torch
from torch import fx

from hpc3d.partition.capturing.flat_export import where
from hpc3d.partition.capturing.sample_layout import arguments_of, batch_dim, rows_per_sample
from hpc3d.partition.capturing.sample_relations import (
    BatchValues,
    packet_of,
    results_of,
    values_of,
)

_aten = torch.ops.aten
_Powers = frozenset[int] | None
_MEAN = frozenset({0})
_CONTRACTIONS = {
    *(_aten.sum, _aten.dot, _aten.mv, _aten.mm, _aten.bmm, _aten.matmul, _aten.einsum),
    *(_aten.vdot, _aten.inner, _aten.tensordot, _aten.linear, _aten.addmm),
}
_TERMS = _aten.add, _aten.sub, _aten.rsub, _aten.add_, _aten.sub_
_PRODUCTS = _aten.mul, _aten.mul_
_QUOTIENTS = _aten.div, _aten.div_
_LINEAR = {
    *(_aten.neg, _aten.sum, _aten.mean, _aten.clone, _aten.alias, _aten.detach, _aten.to),
    *(_aten._to_copy, _aten.stack, _aten.cat, _aten.select, _aten.slice, _aten.view),
    *(_aten.reshape, _aten.squeeze, _aten.unsqueeze, _aten.expand, _aten.transpose),
    *(_aten.permute, _aten.flatten, _aten.t, _aten.contiguous, _aten.lift_fresh_copy),
}
_NONLINEAR_REDUCTIONS = {
    *(_aten.max, _aten.min, _aten.amax, _aten.amin, _aten.median, _aten.nanmedian, _aten.mode),
    *(_aten.var, _aten.std, _aten.var_mean, _aten.std_mean, _aten.norm, _aten.logsumexp),
    *(_aten.linalg_vector_norm, _aten.linalg_norm, _aten.prod, _aten.aminmax, _aten.topk),
    *(_aten.kthvalue, _aten.quantile, _aten.select, _aten.frobenius_norm, _aten.nanmean),
}
_NONLINEAR = {  # nonlinear functions without the tag `pointwise`
    *(_aten.softmax, _aten.log_softmax, _aten.logsumexp, _aten.norm, _aten.prod),
    *(_aten.linalg_vector_norm, _aten.max, _aten.amax, _aten.min, _aten.amin),
}
# Operations that are linear only for some operands; losses that use them are accepted.
_UNDECIDED = {_aten.where, _aten.nan_to_num, _aten.masked_fill, _aten.copy_, _aten.copy}


def refuse_other_losses(values: BatchValues, loss: fx.Node) -> None:
    """Raise ValueError if the loss is known not to be a mean over the samples."""
    for node in values.nodes:
        if node in values.relevant:
            _refuse_nonlinear(node, values)
    found = powers_of(values).get(loss)
    if not found or found == _MEAN:
        return
    grows = max(found) > 0
    what = "a sum over the samples, not a mean" if grows else "divided by the batch size twice"
    raise ValueError(
        f"the loss is {what}: {loss.name}{where(loss)}; use the mean over the samples, divide the "
        "sum over the samples by the batch size of the input (x.shape[0]), or let the factory "
        'return module, inputs, "sum"'
    )


def powers_of(values: BatchValues) -> dict[fx.Node, _Powers]:
    """Return the powers of the batch size by which the terms of each value are scaled."""
    powers: dict[fx.Node, _Powers] = {}
    for node in values.nodes:
        powers[node] = _powers(node, values, powers)
    return powers


def _refuse_nonlinear(node, values):
    """Raise ValueError for a nonlinear batch statistic or a nonlinear function of a mean."""
    packet = packet_of(node)
    sources = [each for each in values_of(node) if each in values.differentiable]
    has_batch = any(batch_dim(each) is not None for each in results_of(node))
    if node not in values.differentiable or has_batch:
        return
    rows = any(map(values.has_rows, sources))
    statistics = [each for each in sources if values.is_statistic(each)]
    if rows and packet in _NONLINEAR_REDUCTIONS:
        what = "the loss depends on a statistic of the batch that is not a mean"
    elif statistics and _is_nonlinear(node, statistics, values):
        what = "the loss is a nonlinear function of a mean over the batch"
    else:
        return
    raise ValueError(
        f"{what}: {node.name}{where(node)}; compute the loss of each sample, and return the mean "
        "over the samples"
    )


def _is_nonlinear(node, statistics, values):
    packet = packet_of(node)
    if packet in _LINEAR or packet in _TERMS or packet in _UNDECIDED:
        return False
    if packet in _PRODUCTS or packet in _CONTRACTIONS:
        return sum(map(values.is_statistic, _operands(node, values.real))) > 1
    if packet in _QUOTIENTS:
        return node.args[1] in statistics
    if packet is _aten.pow:
        return node.args[1:] != (1,)
    return packet in _NONLINEAR or torch.Tag.pointwise in getattr(node.target, "tags", ())


def _operands(node, among):
    """Return the operands that are in the set `among`, including duplicates."""
    given = [each if isinstance(each, list | tuple) else [each] for each in node.args]
    return [one for several in given for one in several if one in among]


def _powers(node, values, powers) -> _Powers:
    """Return the powers of the batch size that scale the terms of a value."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return _of_number(value) if node.target is not operator.getitem else None
    packet, given = packet_of(node), arguments_of(node)
    if packet in (_aten.full, _aten.scalar_tensor, _aten.full_like, _aten.new_full):
        return _of_operand(given.get("fill_value", given.get("s")), powers)
    sources = values_of(node)
    sizes = [each for each in sources if not isinstance(each.meta.get("val"), torch.Tensor)]
    found = [_of_operand(each, powers) for each in sources if each not in sizes]
    reduced = any(map(values.has_rows, sources)) and batch_dim(value) is None
    if packet in _TERMS or packet in _PRODUCTS or packet in _QUOTIENTS:
        return _of_binary(packet, *(_of_operand(each, powers) for each in node.args[:2]))
    if reduced:
        return _of_reduction(packet, given, found)
    if found and (packet in _LINEAR or packet in _CONTRACTIONS):
        return _of_product(found) if packet in _CONTRACTIONS else _of_linear(found)
    constant = not values.follows & {*sources}
    if any(each != _MEAN for each in found) or (constant and sizes and not _makes_shape(packet)):
        return None
    return _MEAN if constant or values.has_rows(node) else None


def _makes_shape(packet):
    return packet in (_aten.zeros, _aten.ones, _aten.expand, _aten.view, _aten.reshape)


def _of_operand(each, powers):
    if isinstance(each, fx.Node):
        value = each.meta.get("val")
        return powers.get(each, _MEAN) if isinstance(value, torch.Tensor) else _of_number(value)
    if each is None:
        return None
    return _MEAN if each != 0 else frozenset()


def _of_number(value: Any) -> _Powers:
    """Return the power of the batch size that a size expression is proportional to."""
    if isinstance(value, int | float):
        return _MEAN
    if isinstance(value, torch.SymInt):
        return frozenset({1}) if rows_per_sample(value) else None
    return None


def _of_binary(packet, one, other):
    """Return the powers of a sum, product or quotient of two operands."""
    if one is None or other is None:
        return None
    if packet in _TERMS:
        return one | other
    sign = 1 if packet in _PRODUCTS else -1
    if sign < 0 and len(other) > 1:
        return None
    return frozenset(a + sign * b for a, b in product(one, other))


def _of_linear(found):
    return None if None in found else frozenset().union(*found)


def _of_product(found):
    """Return the powers of a product of all operands."""
    if None in found:
        return None
    return frozenset(map(sum, product(*found)))


def _of_reduction(packet, given, found):
    """Return the powers of a value that an operation reduces over the batch."""
    reduction = given.get("reduction")
    if isinstance(reduction, int) and all(each == _MEAN for each in found):
        return {1: _MEAN, 2: frozenset({1})}.get(reduction)
    if packet is _aten.mean:
        return _of_linear(found)
    if packet in _CONTRACTIONS and packet is not _aten.linear:
        total = _of_product(found)
        return None if total is None else frozenset(each + 1 for each in total)
    return None
