"""Matrix products and convolutions whose backward pass is split into input gradients (pass B) and
weight gradients (pass W).

torch.autograd computes both gradients in one pass. This module multiplies x by a weight W, and
adds an optional bias b, in an autograd function whose backward pass is split in two:

    B    dx = dy W'
    W    W.grad += x' dy,   b.grad += sum of dy over all rows

Pass W is a deferred call that keeps x and dy in memory until the call runs. If the operand W is
computed from a parameter, for example by weight normalization, W is not a view of the parameter,
and torch's own backward pass is used.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import fx

from hpc3d.partition.capturing.sample_layout import arguments_of
from hpc3d.partition.capturing.sample_relations import CONVOLUTIONS

_aten = torch.ops.aten


def split_backward(node: fx.Node, later: fx.Node) -> None:
    """Replace a matrix product or convolution with one whose parameter gradients are deferred.

    The backward pass calls `later(function, *args)` with the function that accumulates these
    gradients. Operations without a rule in this module are not changed.
    """
    if getattr(node.target, "overloadpacket", None) in _RULES:
        given = arguments_of(node)
        node.args, node.kwargs = (node.target, later), given
        node.target = product


def product(
    operation: torch._ops.OpOverload, later: Callable[..., None], **given: Any
) -> torch.Tensor:
    """Compute an operation, with a split backward pass if its rule applies.

    All arguments of the operation are passed by name.
    """
    rule = _RULES[operation.overloadpacket]
    x, weight, bias = operands = [given.pop(name, None) for name in rule.names]
    views = [_view_of(each) for each in (weight, bias)]
    split = _Split(rule, operation, given, later, *views)
    wanted = torch.is_grad_enabled() and weight.requires_grad
    if wanted and split.is_possible(x, weight, bias):
        return _SplitProduct.apply(split, *operands)
    return split.result(*operands)


class _ParameterView(NamedTuple):
    """Strided view of a parameter, which starts `offset` elements after the parameter's start."""

    parameter: torch.nn.Parameter
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int

    def gradient(self) -> torch.Tensor:
        """Return a view of the same elements of the parameter's gradient.

        The gradient must have the same memory layout as the parameter.
        """
        whole = self.parameter.grad
        return whole.as_strided(self.shape, self.strides, whole.storage_offset() + self.offset)


def _view_of(tensor):
    """Return the `_ParameterView` that describes a tensor.

    Returns `None` if the tensor is not a view of a parameter, or if its elements overlap.
    """
    if tensor is None:
        return None
    parameter = tensor if tensor._base is None else tensor._base
    if not isinstance(parameter, torch.nn.Parameter) or _overlaps(tensor):
        return None
    offset = tensor.storage_offset() - parameter.storage_offset()
    return _ParameterView(parameter, tuple(tensor.shape), tensor.stride(), offset)


def _overlaps(tensor):
    reach = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape)):
        if size > 1 and stride < reach:
            return True
        reach = max(reach, stride * size)
    return False


class _Rule(NamedTuple):
    """Rule for splitting the backward pass of an operation.

    `names` contains the argument names of the input, weight and bias. `of_input(split, dy, x,
    weight)` returns the input gradient, `adds(split, dy, x, weight)` accumulates the parameter
    gradients, and `fits(x, weight, arguments)` returns True if the rule applies.
    """

    names: tuple[str, ...]
    of_input: Callable[..., torch.Tensor]
    adds: Callable[..., None]
    fits: Callable[..., bool]


class _Split(NamedTuple):
    """One call of an operation with a split backward pass.

    `how` contains the non-tensor arguments. `weight` and `bias` are views of parameters, or `None`
    for an operand that is not a parameter.
    """

    rule: _Rule
    operation: torch._ops.OpOverload
    how: dict[str, Any]
    later: Callable[..., None]
    weight: _ParameterView | None
    bias: _ParameterView | None

    def is_possible(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> bool:
        known = self.weight and (self.bias or bias is None or not bias.requires_grad)
        return bool(known) and self.rule.fits(x, weight, self.how)

    def result(self, *operands: torch.Tensor | None) -> torch.Tensor:
        named = {name: each for name, each in zip(self.rule.names, operands) if name}
        return self.operation(**named, **self.how)

    @torch.no_grad()
    def add(self, dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> None:
        """Run pass W: accumulate the weight and bias gradients."""
        self.rule.adds(self, dy, x, weight)


class _SplitProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx, split, x, weight, bias):
        ctx.split = split
        ctx.with_bias = bias is not None and bias.requires_grad
        ctx.save_for_backward(x, weight)
        # torch rejects in-place operations on a view that is created in an autograd function.
        return split.result(x, weight, bias).detach()

    @staticmethod
    def backward(ctx, dy):
        x, weight = (each.detach() for each in ctx.saved_tensors)
        split = ctx.split if ctx.with_bias else ctx.split._replace(bias=None)
        split.later(split.add, dy, x, weight)
        wanted = ctx.needs_input_grad[1]
        return None, split.rule.of_input(split, dy, x, weight) if wanted else None, None, None


def _rows(tensor):
    return tensor.reshape(-1, tensor.shape[-1])


def _add_product(gradient, a, b):
    """Add the matrix product a b, which is rounded to the data type of the operands."""
    if gradient.dtype == a.dtype:
        gradient.addmm_(a, b)
    else:
        gradient.add_(a @ b)


def _add_bias(split, dy):
    if split.bias:
        gradient = split.bias.gradient()
        gradient += dy.sum_to_size(gradient.shape)


def _of_linear(split, dy, x, weight):
    return dy @ weight


def _linear(split, dy, x, weight):
    _add_product(split.weight.gradient(), _rows(dy).t(), _rows(x))
    _add_bias(split, dy)


def _of_matrices(split, dy, x, weight):
    return dy @ weight.t()


def _matrices(split, dy, x, weight):
    _add_product(split.weight.gradient(), _rows(x).t(), _rows(dy))
    _add_bias(split, dy)


def _is_matrix(x, weight, how):
    """Return True if the weight is 2D and the GEMM has no scale factors (alpha = beta = 1)."""
    return weight.dim() == 2 and how.get("alpha", 1) == how.get("beta", 1) == 1


def _of_convolution(split, dy, x, weight):
    return _convolved_back(split, dy, x, weight, [True, False, False])[0]


def _convolution(split, dy, x, weight):
    mask = [False, True, split.bias is not None]
    _, of_weight, of_bias = _convolved_back(split, dy, x, weight, mask)
    split.weight.gradient().add_(of_weight)
    if split.bias:
        split.bias.gradient().add_(of_bias)


def _convolved_back(split, dy, x, weight, mask):
    """Return the gradients of a convolution with respect to input, weight and bias.

    `mask` contains three bools that select the gradients to compute.
    """
    how, dims = split.how, weight.dim() - 2
    stride, dilation, between = (
        _per_dim(how.get(name, fewest), dims)
        for name, fewest in (("stride", 1), ("dilation", 1), ("output_padding", 0))
    )
    bias = list(split.bias.shape) if split.bias else None
    padding, transposed = _padding(weight, how), "output_padding" in how
    return _aten.convolution_backward(
        *(dy, x, weight, bias, stride, padding, dilation, transposed, between),
        *(how["groups"], mask),
    )


def _per_dim(number, dims):
    """Expand an argument to a list with one number per spatial dimension of the kernel."""
    numbers = [number] if isinstance(number, int) else [*number]
    return numbers * (dims if len(numbers) == 1 else 1)


def _padding(weight, how):
    """Return the padding of each spatial dimension, or `None` if any padding is asymmetric."""
    kernel, padding = weight.shape[2:], how["padding"]
    if not isinstance(padding, str):
        return _per_dim(padding, len(kernel))
    if padding == "valid":
        return [0] * len(kernel)
    dilation = _per_dim(how["dilation"], len(kernel))
    both = [step * (size - 1) for step, size in zip(dilation, kernel)]
    return None if any(each % 2 for each in both) else [each // 2 for each in both]


def _is_padded_evenly(x, weight, how):
    return x.dim() == weight.dim() and _padding(weight, how) is not None


_CONVOLUTION = _Rule(("input", "weight", "bias"), _of_convolution, _convolution, _is_padded_evenly)
_RULES = {
    _aten.linear: _Rule(("input", "weight", "bias"), _of_linear, _linear, _is_matrix),
    _aten.matmul: _Rule(("self", "other", ""), _of_matrices, _matrices, _is_matrix),
    _aten.mm: _Rule(("self", "mat2", ""), _of_matrices, _matrices, _is_matrix),
    _aten.addmm: _Rule(("mat1", "mat2", "self"), _of_matrices, _matrices, _is_matrix),
    **dict.fromkeys(CONVOLUTIONS, _CONVOLUTION),
}
