"""Rules that apply the operations of a captured module to shards.

A rule receives the state of the propagation (hpc3d.partition.tensor_parallel.propagation) and an
operation. It returns a LocalOperation, or `None` if the operation needs its full operands.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import fx

from hpc3d.partition.capturing.sample_layout import arguments_of
from hpc3d.partition.tensor_parallel.dimensions import numbers_of, ranges_of, reshaped, within
from hpc3d.partition.tensor_parallel.shards import SplitDim, looked_up, sliced

_aten = torch.ops.aten


class LocalOperation(NamedTuple):
    """Operation that each rank applies to its shards.

    `needs` contains the placements of the operands that must be split; all other operands must be
    full. `result` is the placement of the result (a list if there are several results), or `None`
    if the result is full. If `partial` is True, the results are partial sums, which are reduced;
    then the `bias` is added. `target` and `args` replace those of the operation. If `ranks` is
    True, the communicator is appended to the arguments.
    """

    needs: dict[fx.Node, SplitDim]
    result: Any
    partial: bool = False
    bias: fx.Node | None = None
    target: Callable[..., Any] | None = None
    args: tuple[Any, ...] = ()
    ranks: bool = False


_Rule = Callable[[Any, fx.Node], LocalOperation | None]


def transposed(node: fx.Node) -> tuple[fx.Node, list[int]]:
    """Return the source of a chain of 2D transpositions, and the order of its dimensions.

    Dimension i of `node` is dimension `order[i]` of the source.
    """
    dims = [0, 1]
    while getattr(node.target, "overloadpacket", None) in _TRANSPOSITIONS:
        (source, *_) = node.all_input_nodes
        if source.meta["val"].dim() != 2:
            break
        (moved,) = ranges_of(node, source, 0) or [None]
        dims = dims if moved is None or moved.dim == 0 else dims[::-1]
        node = source
    return node, dims


def _linear(flow, node):
    given = arguments_of(node)
    return _product(flow, node, given["input"], given["weight"], 0, given["bias"])


def _addmm(flow, node):
    given = arguments_of(node)
    if given["alpha"] != 1 or given["beta"] != 1 or given["self"].meta["val"].dim() != 1:
        return None
    return _product(flow, node, given["mat1"], given["mat2"], 1, given["self"])


def _matmul(flow, node):
    x, weight = node.args[:2]
    if flow.is_weight(weight) and weight.meta["val"].dim() == 2:
        return _product(flow, node, x, weight, 1, None)
    if 1 in {x.meta["val"].dim(), weight.meta["val"].dim()}:
        return None  # the result has fewer dimensions than the operands
    return _aligned(flow, node, [x, weight], fixed=2, narrow=True)


def _product(flow, node, x, weight, columns, bias):
    """Return the column- or row-parallel version of y = x W + b; `columns` is a dimension of W."""
    split, last = flow.made.get(x), node.meta["val"].dim() - 1
    if not flow.is_weight(weight) or weight.meta["val"].dim() != 2:
        return None
    if split and split.dim == last:
        rows = split._replace(dim=1 - columns)
        if split.blocks > 1 or not flow.claim(weight, rows):
            return None
        call = {"target": _aten.linear.default, "args": (x, weight)}
        if columns:
            call["target"] = _aten.matmul.default
        return LocalOperation({x: split, weight: rows}, None, partial=True, bias=bias, **call)
    if split:
        return LocalOperation({x: split}, split)
    sections = flow.columns(weight, columns)
    if not sections or not flow.claim(weight, SplitDim(columns, sections), columns=True):
        return None
    needs = {weight: SplitDim(columns, sections)}
    if bias is not None:
        needs[bias] = SplitDim(0, sections)
        if not flow.is_weight(bias) or not flow.claim(bias, needs[bias]):
            return None
    return LocalOperation(needs, SplitDim(last, sections))


def _embedding(flow, node):
    given = arguments_of(node)
    table, rows = given["weight"], given["indices"]
    if given["scale_grad_by_freq"] or given["sparse"] or not flow.is_weight(table):
        return None
    count = table.meta["val"].shape[0]
    split = SplitDim(0, (count,))
    if count % flow.ways or not flow.is_large(table) or not flow.claim(table, split):
        return None
    args = table, rows, given["padding_idx"], count
    return LocalOperation({table: split}, None, target=looked_up, args=args, ranks=True)


def _elementwise(flow, node):
    return _aligned(flow, node, _tensors(node.all_input_nodes))


def _aligned(flow, node, operands, fixed=0, narrow=False):
    """Return the rule of an operation with broadcasting.

    The operation needs all elements of the last `fixed` dimensions. If `narrow` is True, full
    operands that depend on the batch may be narrowed to the shards of the other operands.
    """
    placed = {
        each: (flow.made[each].dim - each.meta["val"].dim(), *flow.made[each][1:])
        for each in operands
        if each in flow.made
    }
    placed = {each: split for each, split in placed.items() if split[0] < -fixed}
    if len({*placed.values()}) != 1:
        return None
    needs, (at, sections, blocks) = {}, next(iter(placed.values()))
    for each in operands:
        shape = numbers_of(each.meta["val"])
        if each not in placed and (len(shape) < -at or shape[at] == 1):
            continue
        needs[each] = SplitDim(len(shape) + at, sections, blocks)
        if each in placed or (flow.is_weight(each) and flow.claim(each, needs[each])):
            continue
        if blocks > 1 or flow.is_written(each) or not (narrow or flow.is_constant(each)):
            return None
    return LocalOperation(needs, SplitDim(node.meta["val"].dim() + at, sections, blocks))


def _attention(flow, node):
    given = arguments_of(node)
    operands = [given[name] for name in ("query", "key", "value")]
    mask = [given["attn_mask"]] if given["attn_mask"] is not None else []
    heads = {each.meta["val"].shape[-3] for each in operands if each.meta["val"].dim() > 3}
    if not given["enable_gqa"] or len(heads) == 1:
        return _aligned(flow, node, [*operands, *mask], fixed=2, narrow=True)
    needs, query = {}, flow.made.get(operands[0])
    for each in [*operands, *mask]:
        value = each.meta["val"]
        if each not in flow.made and (value.dim() < 3 or value.shape[-3] == 1):
            continue
        plain = SplitDim(value.dim() - 3, (value.shape[-3],))
        if flow.made.get(each, plain) != plain or value.shape[-3] % flow.ways:
            return None
        needs[each] = plain
    return LocalOperation(needs, query) if query else None


def _softmax(flow, node):
    return _along(flow, node, [arguments_of(node)["dim"]])


def _normalized(flow, node):
    return _along(flow, node, range(-len(arguments_of(node)["normalized_shape"]), 0))


def _reduced(flow, node):
    given = arguments_of(node)
    dims = given.get("dim")
    return _along(flow, node, dims, given.get("keepdim", True)) if dims else None


def _along(flow, node, dims, keeps=True):
    """Return the rule of an operation along the dimensions `dims` of its first operand.

    If `keeps` is False, the result does not have these dimensions.
    """
    x = node.args[0]
    split, count = flow.made.get(x), x.meta["val"].dim()
    dims = {dim % count for dim in ([dims] if isinstance(dims, int) else dims)}
    if not split or split.dim in dims:
        return None
    removed = 0 if keeps else sum(dim < split.dim for dim in dims)
    return LocalOperation({x: split}, split._replace(dim=split.dim - removed))


def _joined(flow, node):
    """Return the rule of `cat` and `stack`; `cat` ignores empty vectors."""
    operands, dim, *_ = *node.args, 0
    dim %= node.meta["val"].dim()
    operands = [each for each in operands if [*each.meta["val"].shape] != [0]]
    splits = {flow.made.get(each) for each in operands}
    if len(splits) > 1 or not all(splits):
        return None
    (split,) = splits
    at = split.dim
    if getattr(node.target, "overloadpacket", None) is _aten.stack:
        at += dim <= split.dim
    elif split.dim == dim:
        return None
    return LocalOperation(dict.fromkeys(operands, split), split._replace(dim=at))


def _viewed(flow, node):
    """Return the rule of views that move dimensions or select some of their elements."""
    x = node.args[0]
    split = flow.made.get(x)
    found = ranges_of(node, x, split.dim) if split else None
    if not found:
        return None
    results = [within(split, each) for each in found]
    several = isinstance(node.meta["val"], tuple | list)
    result = results if several else results[0]
    call: dict[str, Any] = {}
    if any(each.size != split.size for each in found):
        ranges = [(each.start // flow.ways, each.size // flow.ways) for each in found]
        dims = {each.dim for each in found}
        if dims != {split.dim} or x.meta["val"].dim() != len(_first(node).shape):
            return None
        call = {"target": sliced, "args": (x, split.dim, ranges, several)}
    elif getattr(node.target, "overloadpacket", None) is _aten.expand:
        sizes = [*node.args[1]]
        sizes[results[0].dim] = -1
        call = {"target": node.target, "args": (x, sizes)}
    return LocalOperation({x: split}, result, **call)


def _first(node):
    value = node.meta["val"]
    return value[0] if isinstance(value, tuple | list) else value


def _reshaped(flow, node):
    x = node.args[0]
    split, value = flow.made.get(x), node.meta["val"]
    if not split or not isinstance(value, torch.Tensor) or value.dtype != x.meta["val"].dtype:
        return None
    result = reshaped(x.meta["val"], value, split, flow.ways)
    if result is None:
        return None
    shape = [*value.shape]
    local = shape[result.dim]
    local = local // flow.ways if isinstance(local, int) else -1
    sizes = arguments_of(node).get("sizes") or arguments_of(node).get("size")
    sizes = sizes or arguments_of(node).get("shape")
    packet = node.target.overloadpacket
    if not sizes:  # flatten
        return LocalOperation({x: split}, result)
    first = arguments_of(node)["dim"] % x.meta["val"].dim() if packet is _aten.unflatten else 0
    at = result.dim - first
    if at not in range(len(sizes)):
        return LocalOperation({x: split}, result)
    sizes = [*sizes]
    for index, size in enumerate(sizes):
        if size == -1 and local == -1 and index != at:
            sizes[index] = shape[first + index]
    sizes[at] = local
    if not all(isinstance(size, int | fx.Node) for size in sizes):
        return None
    if packet is _aten.unflatten:
        return LocalOperation({x: split}, result, target=node.target, args=(x, first, sizes))
    return LocalOperation({x: split}, result, target=_aten.reshape.default, args=(x, sizes))


def _repeated(flow, node):
    """Return the rule of `repeat_interleave`, which repeats key heads for groups of queries."""
    given = arguments_of(node)
    x, times = given["self"], given["repeats"]
    split, dim = flow.made.get(x), given["dim"]
    if not split or split.blocks > 1 or dim is None or not isinstance(times, int):
        return None
    repeats = times if dim % x.meta["val"].dim() == split.dim else 1
    sections = tuple(size * repeats for size in split.sections)
    args = (x, times, dim)
    return LocalOperation({x: split}, SplitDim(split.dim, sections), target=node.target, args=args)


def _item(flow, node):
    values, index = node.args
    found = flow.made.get(values)
    return LocalOperation({values: found}, found[index]) if found else None


def _tensors(nodes):
    return [each for each in nodes if isinstance(each.meta.get("val"), torch.Tensor)]


_TRANSPOSITIONS = {
    *(_aten.t, _aten.transpose, _aten.permute, _aten.numpy_T, _aten.mT, _aten.adjoint),
    *(_aten.swapaxes, _aten.swapdims),
}
_VIEWS = {
    *(_aten.movedim, _aten.moveaxis, _aten.unsqueeze, _aten.squeeze, _aten.select, _aten.slice),
    *(_aten.narrow, _aten.split, _aten.split_with_sizes, _aten.chunk, _aten.unbind, _aten.expand),
}
_RESHAPES = _aten.view, _aten.reshape, _aten._unsafe_view, _aten.flatten, _aten.unflatten
# Operations on single elements that torch does not tag as pointwise.
_ELEMENTWISE = {
    *(_aten.contiguous, _aten.to, _aten._to_copy, _aten.dropout, _aten.detach, _aten.alias),
    *(_aten.hardswish, _aten.log_sigmoid, _aten.type_as, _aten.lift_fresh_copy),
}
_REDUCTIONS = _aten.mean, _aten.sum, _aten.amax, _aten.amin, _aten.logsumexp, _aten.var
_RULES: dict[Any, _Rule] = {
    _aten.linear: _linear,
    _aten.addmm: _addmm,
    **dict.fromkeys((_aten.matmul, _aten.mm, _aten.bmm), _matmul),
    _aten.embedding: _embedding,
    _aten.scaled_dot_product_attention: _attention,
    **dict.fromkeys((_aten.softmax, _aten._safe_softmax, _aten.log_softmax), _softmax),
    **dict.fromkeys((_aten.layer_norm, _aten.rms_norm), _normalized),
    **dict.fromkeys(_REDUCTIONS, _reduced),
    **dict.fromkeys((_aten.cat, _aten.stack), _joined),
    **dict.fromkeys(_TRANSPOSITIONS | _VIEWS, _viewed),
    **dict.fromkeys(_RESHAPES, _reshaped),
    _aten.repeat_interleave: _repeated,
    operator.getitem: _item,
    **dict.fromkeys(_ELEMENTWISE, _elementwise),
}


def rule_of(node: fx.Node) -> _Rule | None:
    """Return the rule of an operation, or `None` if there is none."""
    found = _RULES.get(getattr(node.target, "overloadpacket", node.target))
    pointwise = torch.Tag.pointwise in getattr(node.target, "tags", ())
    if found is None and pointwise and isinstance(node.meta["val"], torch.Tensor):
        return _elementwise
    return found
