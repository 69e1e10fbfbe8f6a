"""Random operations whose results do not depend on the partition, microbatches or replicas.

Each operation that draws from torch's random number generator is replaced with a function from
`_FILLS`, `_DROPOUTS` or `_RULES`, which draws the numbers of each sample from
hpc3d.partition.execution.random_numbers. If the shape of the random tensor has no batch dimension,
all samples of a step have the same random numbers.

A random operation without operands that depend on the model inputs, such as `torch.rand(x.shape)`,
is computed by each chunk that reads its result. These copies are identical, because the random
numbers depend on the name of the operation, but not on the chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import pi
from typing import Any

import torch
from torch import fx

from hpc3d.partition.capture import Captured, is_size
from hpc3d.partition.capturing.flat_export import where
from hpc3d.partition.capturing.sample_layout import arguments_of
from hpc3d.partition.capturing.user_code import tensors
from hpc3d.partition.execution.random_numbers import RandomNumbers
from hpc3d.partition.tensor_parallel.shards import SplitDim

_aten = torch.ops.aten
_ALTERNATIVES = "rand, randn, randint, bernoulli, exponential_, multinomial or dropout"


def check_random_operations(captured: Captured, redraw: bool = True) -> None:
    """Raise ValueError for a random operation that would make the results depend on the plan.

    If `redraw` is False, the operations draw from torch's random number generator, and only those
    that combine samples are rejected.
    """
    used = {node for piece in captured.pieces for node in (*piece.nodes, *piece.copies)}
    for node in captured.program.graph.nodes:
        if node in used and is_random(node):
            _refuse(node, redraw)


def is_random(node: fx.Node) -> bool:
    """Return True if an operation draws random numbers; dropout with rate 0 does not."""
    if torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
        return False
    given = arguments_of(node)
    if given.get(_RATES.get(node.target, "")) == 0:
        return False
    return given.get("train") is not False and given.get("training") is not False


def make_reproducible(
    node: fx.Node,
    original: fx.Node,
    draw: fx.Node,
    blocks: int = 1,
    shard: tuple[SplitDim | None, fx.Node | None] = (None, None),
) -> None:
    """Replace a random operation with a version that uses reproducible random numbers.

    `node` is a copy of the operation `original`. The random numbers depend only on the name of
    `original` and on the seed, step and samples in a Draw, which the graph receives at run time
    as its input `draw`. The rows of the result consist of `blocks`, each with rows of all samples.
    Raises ValueError for random operations without a rule in this module.
    """
    if not is_random(original):
        return
    _refuse(original, redraw=True)
    value, *_ = tensors(original.meta["val"])
    stream = original.name, draw, _batch_dim(value), value.dtype, blocks, *shard
    node.args, node.kwargs = (node.target, stream, arguments_of(node)), {}
    node.target = drawn


def drawn(operation: torch._ops.OpOverload, stream: tuple[Any, ...], given: dict[str, Any]) -> Any:
    """Compute a random operation on the arguments `given`, using reproducible random numbers.

    `stream` contains the fields of RandomNumbers.
    """
    numbers = RandomNumbers(*stream)
    if operation in _FILLS:
        return _filled(operation, numbers, given)
    if operation in _DROPOUTS:
        return _dropped(operation, numbers, given)
    return _RULES[operation](numbers, **given)


def _refuse(node, redraw):
    """Raise ValueError if the results of a random operation would depend on the plan."""
    value, *_ = tensors(node.meta["val"])
    supported = any(node.target in rules for rules in (_FILLS, _DROPOUTS, _RULES))
    supported = supported and not value.dtype.is_complex
    if _relates_samples(node):
        problem, remedy = "relates the samples of the batch", "draw numbers for each sample"
    elif redraw and not supported:
        problem = "draws random numbers that would depend on the partition"
        remedy = f"use {_ALTERNATIVES} instead"
    elif redraw and not all(map(_is_multiple, value.shape)):
        problem = "draws a number of rows that is not a multiple of the batch size"
        remedy = "draw the same number of rows for each sample"
    else:
        return
    packet = node.target.overloadpacket
    raise ValueError(f"{node.name}: {packet} {problem}{where(node)}; {remedy}")


def _relates_samples(node):
    """Return True if an argument, or the number of categories of a draw, is the batch size."""
    given = arguments_of(node)
    if any(isinstance(each, fx.Node) and is_size(each) for each in given.values()):
        return True
    if node.target.overloadpacket is not _aten.multinomial:
        return False
    return isinstance(given["self"].meta["val"].shape[-1], torch.SymInt)


def _is_multiple(size):
    """Return True for a constant, and for an integer multiple of the batch size."""
    if not isinstance(size, torch.SymInt):
        return True
    expression = size.node.expr
    return all((expression / symbol).is_integer for symbol in expression.free_symbols)


def _batch_dim(value):
    sizes = enumerate(value.shape)
    return next((dim for dim, size in sizes if isinstance(size, torch.SymInt)), None)


def _filled(operation, numbers, given):
    """Return a tensor of random numbers, or write them to the operand of an in-place operation."""
    like, size = given.get("self"), given.get("size")
    values = _FILLS[operation](numbers, like.shape if size is None else size, given)
    if size is not None:
        return values.to(numbers.dtype).contiguous()
    if not operation._schema.is_mutable:
        layout = given.get("memory_format") or torch.preserve_format
        like = torch.empty_like(like, dtype=numbers.dtype, memory_format=layout)
    return like.copy_(values)


def _uniform(numbers, shape, given):
    low, high = given.get("from", 0.0), given.get("to", 1.0)
    return low + (high - low) * numbers.uniform(shape)


def _normal(numbers, shape, given):
    return given.get("mean", 0.0) + given.get("std", 1.0) * numbers.normal(shape)


def _log_normal(numbers, shape, given):
    return _normal(numbers, shape, given).exp()


def _cauchy(numbers, shape, given):
    return given["median"] + given["sigma"] * torch.tan(pi * (numbers.uniform(shape) - 0.5))


def _exponential(numbers, shape, given):
    smallest = torch.finfo(numbers.dtype).tiny
    return (numbers.exponential(shape) / given["lambd"]).clamp_(min=smallest)


def _bernoulli(numbers, shape, given):
    """Return True with probability `p`, or with the probabilities in the operand."""
    return numbers.happens(given.get("p", given["self"]), shape)


def _integers(numbers, shape, given):
    return numbers.integers(given.get("low", 0), given["high"], shape)


# Functions that return random numbers of a given shape, which `_filled` stores in a tensor.
_FILLS = {
    _aten.rand.default: _uniform,
    _aten.rand_like.default: _uniform,
    _aten.uniform_.default: _uniform,
    _aten.randn.default: _normal,
    _aten.randn_like.default: _normal,
    _aten.normal_.default: _normal,
    _aten.normal.float_float: _normal,
    _aten.log_normal_.default: _log_normal,
    _aten.cauchy_.default: _cauchy,
    _aten.exponential_.default: _exponential,
    _aten.bernoulli.default: _bernoulli,
    _aten.bernoulli.p: _bernoulli,
    _aten.bernoulli.Tensor: _bernoulli,
    _aten.bernoulli_.float: _bernoulli,
    _aten.bernoulli_.Tensor: _bernoulli,
    _aten.randint.default: _integers,
    _aten.randint.low: _integers,
    _aten.randint_like.default: _integers,
    _aten.randint_like.low_dtype: _integers,
}


def _dropped(operation, numbers, given):
    """Apply dropout (0 or x / (1 - p)), or alpha dropout (a x + b with another b if dropped)."""
    features, is_alpha = _DROPOUTS[operation]
    in_place, p = operation._schema.is_mutable, given["p"]
    x = given["self" if in_place else "input"]
    shape = [*x.shape[:2], *[1] * (x.dim() - 2)] if features else x.shape
    if features and (numbers.dim or 0) > 1:  # the mask has no batch dimension
        numbers = numbers._replace(dim=None)
    mask = numbers.kept(p, shape).to(x.dtype)
    a = _alpha_scale(p) if is_alpha else _scale(p)
    y = x.mul_(mask * a) if in_place else x * (mask * a)
    return y.add_((mask - (1 - p)) * (_ALPHA * a)) if is_alpha else y


_ALPHA = 1.7580993408473766  # limit of SELU for large negative numbers, times -1


def _scale(p):
    return 1 / (1 - p) if p < 1 else 0.0


def _alpha_scale(p):
    """Return the factor that keeps the variance of a standard normal variable at 1."""
    return ((_ALPHA**2 * p + 1) * (1 - p)) ** -0.5 if p < 1 else 0.0


# Dropout operations: (True if entire channels are dropped, True for alpha dropout).
_DROPOUTS = {
    _aten.dropout.default: (False, False),
    _aten.dropout_.default: (False, False),
    _aten.feature_dropout.default: (True, False),
    _aten.feature_dropout_.default: (True, False),
    _aten.alpha_dropout.default: (False, True),
    _aten.alpha_dropout_.default: (False, True),
    _aten.feature_alpha_dropout.default: (True, True),
    _aten.feature_alpha_dropout_.default: (True, True),
}


def _normal_by_element(numbers, mean, std, generator):
    """Return normal numbers with a mean or a standard deviation per element, without gradient."""
    mean, std = (torch.as_tensor(each, dtype=torch.float64).detach() for each in (mean, std))
    shape = torch.broadcast_shapes(mean.shape, std.shape)
    return (mean + std * numbers.normal(shape)).to(numbers.dtype)


def _permutation(numbers, n, **how):
    """Return a permutation of n numbers, which is the same for all samples."""
    return numbers.uniform([n]).argsort().to(numbers.dtype)


def _multinomial(numbers, self, num_samples, replacement, generator):
    """Draw indices with probabilities proportional to w, as the largest w / e (e exponential)."""
    weights = self.detach().double()
    if replacement:
        *rows, count = weights.shape
        times = numbers.exponential([*rows, num_samples, count])
        return (weights.unsqueeze(-2) / times).argmax(-1)
    return (weights / numbers.exponential(weights.shape)).topk(num_samples).indices


def _rrelu(numbers, self, lower, upper, **how):
    return self * _slopes(numbers, self, lower, upper)


def _rrelu_in_place(numbers, self, lower, upper, **how):
    return self.mul_(_slopes(numbers, self, lower, upper))


def _slopes(numbers, x, lower, upper):
    slopes = (lower + (upper - lower) * numbers.uniform(x.shape)).to(x.dtype)
    return torch.where(x.detach() <= 0, slopes, 1.0)


def _attention(numbers, query, key, value, attn_mask, dropout_p, is_causal, **how):
    """Return softmax(q k^T scale + mask) v with dropout applied to the attention probabilities."""
    if how.get("enable_gqa"):
        repeats = query.shape[-3] // key.shape[-3]
        key, value = (each.repeat_interleave(repeats, -3) for each in (key, value))
    scale = how.get("scale")
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    scores = query @ key.transpose(-2, -1) * scale
    if is_causal:
        attn_mask = scores.new_ones(scores.shape[-2:], dtype=torch.bool).tril()
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attn_mask, -torch.inf)
    elif attn_mask is not None:
        scores = scores + attn_mask
    weights = _aten._safe_softmax(scores, -1)  # 0 in rows that are masked entirely
    mask = numbers.kept(dropout_p, weights.shape).to(weights.dtype)
    return weights * mask.mul_(_scale(dropout_p)) @ value


def _recurrent(operation, states):
    """Return the rule of a recurrent network, which applies dropout between its layers.

    `states` is the number of tensors in the state of a layer: 2 for LSTM, otherwise 1.
    """

    def rule(numbers: RandomNumbers, **given: Any) -> Any:
        x, params, layers = given["input"], given["params"], given["num_layers"]
        width, directions = len(params) // layers, 1 + given["bidirectional"]
        before = given["hx"] if states > 1 else [given["hx"]]
        after: Sequence[Any] = []
        for layer in range(layers):
            hx = [each[layer * directions : (layer + 1) * directions] for each in before]
            one = given | {"input": x, "hx": hx if states > 1 else hx[0]}
            one |= {"params": params[layer * width : (layer + 1) * width]}
            x, *found = operation(**one | {"num_layers": 1, "dropout": 0.0})
            after = [*after, found]
            if layer + 1 < layers:
                layer_numbers = numbers._replace(name=f"{numbers.name}.{layer}")
                rate = given["dropout"]
                x = x * layer_numbers.kept(rate, x.shape).to(x.dtype).mul_(_scale(rate))
        return x, *(torch.cat(each) for each in zip(*after, strict=True))

    return rule


_RECURRENT = {
    _aten.lstm.input: _recurrent(_aten.lstm.input, 2),
    _aten.gru.input: _recurrent(_aten.gru.input, 1),
    _aten.rnn_tanh.input: _recurrent(_aten.rnn_tanh.input, 1),
    _aten.rnn_relu.input: _recurrent(_aten.rnn_relu.input, 1),
}
_RULES = {
    **_RECURRENT,
    _aten.normal.Tensor_float: _normal_by_element,
    _aten.normal.float_Tensor: _normal_by_element,
    _aten.normal.Tensor_Tensor: _normal_by_element,
    _aten.randperm.default: _permutation,
    _aten.multinomial.default: _multinomial,
    _aten.rrelu.default: _rrelu,
    _aten.rrelu_.default: _rrelu_in_place,
    _aten.scaled_dot_product_attention.default: _attention,
}
# Arguments that turn an operation off if they are 0.
_RATES = {
    **dict.fromkeys(_DROPOUTS, "p"),
    **dict.fromkeys(_RECURRENT, "dropout"),
    _aten.scaled_dot_product_attention.default: "dropout_p",
}
