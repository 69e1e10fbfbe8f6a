"""Time and memory of each operation of a captured module on a machine, for any batch size.

The graph runs on fake tensors, which have shapes and an autograd graph but no data. FLOPs are
counted for GEMMs, convolutions and attention, and bytes for all other operations:

    GEMM        forward 2 m n k; backward 2 m n k for each operand that requires a gradient
    attention   forward 4 b h s t d; backward 10 b h s t d (one recomputed GEMM and four others)
    others      The forward pass reads the inputs and writes the outputs once. The backward pass
                reads the output gradient and saved tensors, and writes the input gradients.

A tensor saved for backward is counted once per storage, for the operation that produces the
tensor. Saved parameters and model inputs are not counted, except buffers that the model modifies.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from math import prod
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import get_gradient_edge
from torch.utils.flop_counter import FlopCounterMode

from hpc3d.partition.capture import (
    Captured,
    memory_of,
    modified_memory,
    state_of,
    without_values,
)
from hpc3d.partition.capturing.flat_export import where
from hpc3d.partition.capturing.opaque_modules import OpaqueModule
from hpc3d.partition.capturing.sample_relations import CONVOLUTIONS
from hpc3d.partition.capturing.user_code import tensors
from hpc3d.predict.machine.machine import Machine

_aten = torch.ops.aten


class OperationCost(NamedTuple):
    """Cost of an operation for one microbatch.

    `forward` and `backward` are seconds; `weight` is the part of `backward` spent on the weight
    gradients of matrix products, which may be deferred. Sizes are in bytes: `saved` is the size of
    this operation's tensors that are saved for backward; `later` is the part of `saved` that is
    not saved by this operation, but by a later one; `nbytes` is the size of the result; `working`
    is the size of the gradients that backward reads and writes at the same time.
    """

    forward: float = 0.0
    backward: float = 0.0
    saved: float = 0.0
    nbytes: float = 0.0
    working: float = 0.0
    weight: float = 0.0
    later: float = 0.0


class Work(NamedTuple):
    """Work of an operation: GEMMs (batch, m, n, k), FLOPs of fused kernels, and bytes moved."""

    products: tuple[tuple[int, int, int, int], ...] = ()
    flop: float = 0.0
    nbytes: float = 0.0


class _Operation(NamedTuple):
    """Work and memory of an operation for a specific batch size.

    `saved`, `nbytes`, `working` and `later` are in bytes, as in OperationCost. `weight` is the
    fraction of the backward work spent on weight gradients, which may be deferred.
    """

    forward: Work
    backward: Work
    saved: float
    nbytes: float
    working: float
    later: float
    weight: float


class Operations:
    """Operations of a captured module, with work and memory for any batch size.

    Work and memory are linear in the batch size, so they are counted for two batch sizes and
    interpolated. `savers` maps an operation to the first other operation that saves its result.
    `together` contains groups of pieces that must be on the same stage. `run` is the overhead of
    each rank in seconds, by the field names of RunCosts.
    """

    together: Sequence[Sequence[int]] = ()
    run: Mapping[str, float] = MappingProxyType({})

    def __init__(self, captured: Captured) -> None:
        self.captured = captured
        low, high = (_Meter(captured, batch) for batch in (_LOW, _HIGH))
        low_found, high_found = low.measured(), high.measured()
        self.savers = low.savers
        self.kinds = {
            node: (each, high_found[node], low.dtypes[node]) for node, each in low_found.items()
        }

    def costs(self, machine: Machine, batch: int) -> dict[fx.Node, OperationCost]:
        """Return the OperationCost of each operation for a microbatch of `batch` samples.

        The cost of identical operations in repeated layers is computed once. Raises ValueError if
        the machine file has no rates for the data type of a matrix product.
        """
        for node, (operation, _, dtype) in self.kinds.items():
            computes = any(work.products or work.flop for work in operation[:2])
            if computes and dtype not in machine.gemm:
                raise ValueError(
                    f"machine {machine.name}: no GEMM rates for {dtype}, the data type of "
                    f"{node.name}{where(node)}; measure the costs with python -m hpc3d.partition "
                    f"profile and pass --profile, or add [gemm.{dtype}] to the machine file"
                )
        way = (batch - _LOW) / (_HIGH - _LOW)
        found = {
            kind: _cost(machine, _on_the_line(*kind[:2], way), kind[2])
            for kind in {*self.kinds.values()}
        }
        return {node: found[kind] for node, kind in self.kinds.items()}


_LOW, _HIGH = 2, 4


def _on_the_line(low, high, way):
    """Interpolate linearly between two nested tuples; `way` is 0 at `low` and 1 at `high`."""
    if not isinstance(low, tuple):
        return low + way * (high - low)
    parts = [_on_the_line(*each, way) for each in zip(low, high, strict=True)]
    return type(low)(*parts) if hasattr(low, "_fields") else tuple(parts)


def _cost(machine, operation, dtype):
    forward, backward = (_seconds(machine, work, dtype) for work in operation[:2])
    *nbytes, later, share = operation[2:]
    return OperationCost(forward, backward, *nbytes, share * backward, later)


def _seconds(machine, work, dtype):
    seconds = sum(machine.product(m, n, k, dtype, batch) for batch, m, n, k in work.products)
    if work.flop:
        return seconds + machine.fused(work.flop, work.nbytes, dtype)
    return seconds + (machine.kernel("other", work.nbytes) if work.nbytes else 0.0)


class _Meter(fx.Interpreter):
    """Interpreter that runs a program on fake tensors and counts the work of each operation."""

    def __init__(self, captured, batch):
        super().__init__(captured.program.graph_module, garbage_collect_values=False)
        self.captured, self.batch, self.dtypes = captured, batch, {}
        self.found, self.known, self.saved, self.kept = {}, set(), 0, []
        self.weights = set()
        self.node, self.makers, self.savings = None, {}, Counter()
        self.savers, self.later = {}, Counter()

    def measured(self):
        hooks = torch.autograd.graph.saved_tensors_hooks(self._saved, lambda value: value)
        with FakeTensorMode(), torch.enable_grad(), hooks:
            self.run(*self._given())
        return {
            node: each._replace(saved=self.savings[node], later=self.later[node])
            for node, each in self.found.items()
        }

    def _given(self):
        weights, state = self.captured.weights, state_of(self.captured)
        modified = modified_memory(self.captured.program.graph.nodes)
        for node in self.captured.program.graph.find_nodes(op="placeholder"):
            value = state[weights[node]] if node in weights else node.meta["val"]
            value = without_values(value, self.batch)
            for tensor in tensors(value):
                if not modified & memory_of(node):  # a microbatch saves a copy
                    self.known.add(tensor.untyped_storage()._cdata)
                self.kept.append(tensor)
                if node in weights:
                    self.weights.add(tensor.untyped_storage()._cdata)
            yield value

    def _saved(self, value):
        storage = value.untyped_storage()
        if storage._cdata not in self.known:
            self.known.add(storage._cdata)
            self.saved += storage.nbytes()
            maker = self.makers.get(storage._cdata, self.node)
            self.savings[maker] += storage.nbytes()
            if maker is not self.node:
                self.savers.setdefault(maker, self.node)
                self.later[maker] += storage.nbytes()
            self.kept.append(value)  # keeps the storage alive, so its id is not reused
        return value

    def run_node(self, node):
        if node.op != "call_function":
            return super().run_node(node)
        before, operands = self.saved, tensors(self.fetch_args_kwargs_from_env(node))
        self.node = node
        ends = {get_gradient_edge(each).node for each in operands if each.requires_grad}
        result, flop = self._counted(node)
        for tensor in tensors(result):
            self.makers.setdefault(tensor.untyped_storage()._cdata, node)
            self.kept.append(tensor)
        if isinstance(node.target, OpaqueModule):
            self._keep_whole(node, operands)
        saved = self.saved - before
        works = self._works(node, operands, result, saved, flop)
        (first, *_) = tensors(result) or [torch.empty(0)]
        self.dtypes[node] = str(first.dtype).removeprefix("torch.")
        needed = [each for each in operands if each.requires_grad] if works[1] != _NOTHING else []
        working = _widest(result, needed, ends) if needed else 0
        share = self._share_of_weights(node, operands, len(works[1].products))
        self.found[node] = _Operation(*works, 0, _nbytes(result), working, 0, share)
        return result

    def _keep_whole(self, node, operands):
        """Count the bytes that an opaque module saves for backward.

        They comprise the operands of the module, and the bytes that it saved in a run on real
        data.
        """
        if any(each.requires_grad for each in operands):
            for each in operands:
                self._saved(each)
            saved = node.target.call.saved * self.batch
            self.saved += saved
            self.savings[node] += saved

    def _works(self, node, operands, result, saved, flop):
        moved = _nbytes([*operands, result])
        if isinstance(node.target, OpaqueModule):
            moved += saved
            forward, backward = (each * self.batch for each in node.target.call.flop)
        elif flop:
            forward, backward = flop, flop * sum(each.requires_grad for each in operands)
        else:
            return _work(node, operands, result, saved)
        return Work(flop=forward, nbytes=moved), Work(flop=backward, nbytes=2 * moved)

    def _share_of_weights(self, node, operands, products):
        """Return the fraction of the backward GEMMs that compute weight gradients."""
        name = getattr(node.target, "overloadpacket", None)
        if name not in _LATE_WEIGHTS or not products:
            return 0.0
        weight = operands[_LATE_WEIGHTS[name]]
        is_one = weight.requires_grad and weight.untyped_storage()._cdata in self.weights
        return (is_one and (name != _aten.matmul or weight.dim() == 2)) / products

    def _counted(self, node):
        """Run an operation, and return its result and its FLOPs.

        FLOPs are counted for the operations in _COMPOSED only; for other operations, 0 is
        returned.
        """
        if getattr(node.target, "overloadpacket", None) not in _COMPOSED:
            return super().run_node(node), 0
        with FlopCounterMode(display=False) as counter:
            result = super().run_node(node)
        return result, counter.get_total_flops()


def _widest(result, needed, ends):
    """Return the largest total size in bytes of the gradients that an autograd node uses.

    The autograd graph is traversed from the result back to `ends`, the autograd nodes of the
    operands. If the traversal reaches none of them, the total size of the result and of the
    `needed` operands is returned.
    """
    todo = [tensor.grad_fn for tensor in tensors(result) if tensor.grad_fn]
    found, known = 0, set()
    while todo:
        node = todo.pop()
        passed = node in known or node in ends
        known.add(node)
        if passed:
            continue
        following = [each for each, _ in node.next_functions if each]
        if not _VIEWS.match(node.name()):
            found = max(found, sum(map(_gradients, (node, *following))))
        todo += following
    return found if known & ends else _nbytes(needed) + _nbytes(result)


# Autograd nodes that return a view of the received gradient and need no additional memory.
_VIEWS = re.compile("(T|View|UnsafeView|Transpose|Permute|Unsqueeze|Squeeze|Alias)Backward")


def _gradients(node):
    return sum(prod(each.shape) * each.dtype.itemsize for each in node._input_metadata)


_NOTHING = Work()


def _work(node, operands, result, saved):
    if not tensors(result) or _is_view(node, operands, result):
        return _NOTHING, _NOTHING
    name = getattr(node.target, "overloadpacket", node.target)
    if name in _PRODUCTS and len(operands) >= 2:
        return _PRODUCTS[name](operands, result)
    moved = _nbytes(operands) + _nbytes(result)
    needed = [each for each in operands if each.requires_grad]
    if not needed:
        return Work(nbytes=moved), _NOTHING
    if name in _LOOKUPS:
        table, rows = operands[0], _nbytes(result)
        return Work(nbytes=2 * rows), Work(nbytes=2 * rows + _nbytes(table))
    back = 0 if name in _SUMS else _nbytes(result) + saved + _nbytes(needed)
    return Work(nbytes=moved), Work(nbytes=back)


def _is_view(node, operands, result):
    """Return True if the result is a view of an operand, i.e. if the operation moves no data."""
    schema = getattr(node.target, "_schema", None)
    writes = schema and any(
        each.alias_info and each.alias_info.is_write for each in schema.arguments
    )
    memory = {each.untyped_storage()._cdata for each in operands}
    return not writes and all(each.untyped_storage()._cdata in memory for each in tensors(result))


def _rows(x):
    return x.numel() // max(1, x.shape[-1])


def _linear(operands, result):
    x, weight = operands[:2]
    return _of_products(operands, (1, _rows(x), weight.shape[0], x.shape[-1]))


def _matmul(operands, result):
    a, b = operands[-2:]
    k = a.shape[-1]
    if b.dim() == 2 and a.dim() > 2:
        return _of_products([a, b], (1, _rows(a), b.shape[-1], k))
    m, n = a.shape[-2] if a.dim() > 1 else 1, b.shape[-1] if b.dim() > 1 else 1
    return _of_products([a, b], (result.numel() // max(1, m * n), m, n, k))


def _of_products(operands, sizes):
    """Return the forward and backward Work of a GEMM.

    The backward pass has one GEMM for each operand that requires a gradient.
    """
    batch, m, n, k = sizes
    back = [(batch, m, k, n), (batch, k, n, m)]
    needed = [each for each, operand in zip(back, operands) if operand.requires_grad]
    return Work(products=(sizes,)), Work(products=tuple(needed))


def _convolution(operands, result):
    """Return the forward and backward Work of a convolution, counted as a GEMM.

    The GEMM multiplies the im2col matrix [output positions, channels * kernel size] by the
    kernels.
    """
    x, weight = operands[:2]
    transposed = result.dim() == x.dim() and x.shape[1] == weight.shape[0] != result.shape[1]
    windows = x if transposed else result
    groups = max(1, (result if transposed else x).shape[1] // max(1, weight.shape[1]))
    m, kernel = windows.numel() // max(1, windows.shape[1]), weight[:1].numel()
    return _of_products([x, weight], (groups, m, weight.shape[0] // groups, kernel))


def _attention(operands, result):
    q, k, v = operands[:3]
    flop = 2 * prod(q.shape[:-1]) * k.shape[-2] * (q.shape[-1] + v.shape[-1])
    moved = _nbytes([q, k, v, result])
    back = 2.5 * flop if any(each.requires_grad for each in (q, k, v)) else 0
    return Work(flop=flop, nbytes=moved), Work(flop=back, nbytes=2 * moved)


def _recurrent(operands, result):
    """Return the Work of a recurrent layer, which multiplies each token by each weight matrix."""
    x, weights = operands[0], [each for each in operands[1:] if each.dim() == 2]
    flop = 2 * _rows(x) * sum(each.numel() for each in weights)
    back = 2 * flop if any(each.requires_grad for each in weights) else 0
    return Work(flop=flop, nbytes=_nbytes(operands)), Work(flop=back, nbytes=_nbytes(operands))


_PRODUCTS = {
    _aten.linear: _linear,
    **dict.fromkeys((_aten.matmul, _aten.mm, _aten.bmm, _aten.addmm, _aten.baddbmm), _matmul),
    **dict.fromkeys(CONVOLUTIONS, _convolution),
    _aten.scaled_dot_product_attention: _attention,
    **dict.fromkeys((_aten.lstm, _aten.gru, _aten.rnn_tanh, _aten.rnn_relu), _recurrent),
}
_LATE_WEIGHTS = {
    **dict.fromkeys((_aten.linear, _aten.matmul, _aten.mm, *CONVOLUTIONS), 1),
    _aten.addmm: 2,
}  # index of the weight operand, for operations with a split backward pass
_COMPOSED = {_aten.einsum, _aten.tensordot, _aten.inner, _aten.bilinear, _aten.mv, _aten.dot}
_LOOKUPS = {_aten.embedding}
_SUMS = {_aten.add, _aten.sub, _aten.add_, _aten.sub_}  # backward pass costs nothing


def _nbytes(values):
    return sum(each.numel() * each.element_size() for each in tensors(values))
