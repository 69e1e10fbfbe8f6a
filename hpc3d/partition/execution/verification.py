"""Verify on rank 0, before the first step, that a run trains the function that PyTorch trains.

On the samples of two microbatches, three comparisons of the loss and its gradients must agree up
to rounding:

1. The module returns the same result when it is called again. Otherwise, it has state that is
   neither a parameter nor a buffer.
2. The captured program agrees with the module. Otherwise, tracing has lost something, such as a
   gradient hook.
3. The loss of both microbatches together is the mean of their losses. Otherwise, the module
   combines different samples, or its loss is not a mean over samples.

If the gradients of the module do not fit in the memory of one rank, only the losses are compared.
These comparisons save no activations. Alternatively, only the largest prefix of the module that
fits is verified. The loss of a prefix is a weighted mean of the squares of its result.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from math import isnan
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.utils._pytree import tree_unflatten

from hpc3d.console.exit_codes import BadData
from hpc3d.console.sanitize import counted
from hpc3d.partition.capture import (
    Captured,
    carries_batch,
    is_batch_norm,
    is_trained,
    loss_of,
    state_of,
)
from hpc3d.partition.capturing.flat_export import where
from hpc3d.partition.capturing.named_outputs import named_tensors
from hpc3d.partition.capturing.sample_relations import BatchValues, results_of
from hpc3d.partition.capturing.torch_errors import memory_errors
from hpc3d.partition.capturing.user_code import described, tensors, undisturbed
from hpc3d.partition.capturing.user_module import in_evaluation
from hpc3d.partition.execution.largest_prefix import Prefix, largest_prefix, mean_of_squares
from hpc3d.partition.execution.loss_terms import LossTerms
from hpc3d.partition.execution.random_numbers import Draw
from hpc3d.partition.execution.sample_batches import rows_for
from hpc3d.partition.execution.stage_program import StageProgram, stage_programs
from hpc3d.partition.execution.torch_weights import values_in

_CLOSE = {  # largest relative rounding error
    torch.float64: 1e-9,
    torch.float32: 1e-3,
    torch.float16: 5e-2,
    torch.bfloat16: 1e-1,
}
_SMALL = 1e-3  # default weight of the total gradient norm in the tolerance of one gradient
_ANYWAY = "or start the run anyway with --verify off"


class Result(NamedTuple):
    """Loss, and the gradients of the trained parameters by name."""

    loss: float
    gradients: dict[str, torch.Tensor]


def verified(
    module: torch.nn.Module,
    captured: Captured,
    inputs: Sequence[Any],
    shares: Sequence[range],
    training: bool = True,
    gradients: bool = True,
    prefix: Prefix | None = None,
) -> list[str]:
    """Compare a captured program with its module; return lines for the log.

    `inputs` contains the model inputs of a step, and `shares` contains one or two adjacent ranges
    of sample indices, one per microbatch or replica. If `training` is False, the program is
    captured in evaluation mode, and only the losses are compared. If `gradients` is False, only
    the losses are compared, and no activations are stored. If a `prefix` is given, only this part
    of the program is compared. The module's buffers are restored. Raises BadData if results
    differ.
    """
    comparison = partial(_Verification, module, captured, inputs, shares, gradients, prefix)
    with undisturbed(), _memory_explained(gradients and training):
        if training:
            with torch.set_grad_enabled(gradients):
                found, *more = comparison().lines()
            return [found if gradients else f"{found}, without gradients", *more]
        try:
            with in_evaluation(module), torch.no_grad():
                return [f"evaluation {line}" for line in comparison().lines()]
        except BadData as error:
            raise BadData(f"train.eval_every: in evaluation mode, {error}") from error


def verified_prefix(
    memory: float,
    module: torch.nn.Module,
    captured: Captured,
    inputs: Sequence[Any],
    shares: Sequence[range],
    training: bool = True,
) -> list[str]:
    """Compare the largest prefix that fits in `memory` bytes; return lines for the log.

    The other arguments are those of `verified`. Differences are reported in the returned lines.
    """
    samples = shares[-1].stop - shares[0].start
    prefix = largest_prefix(captured, module, samples, memory)
    if prefix and not prefix.pieces:
        return ["not verified: torch.verify is off, and no submodule can be compared in memory"]
    try:
        return verified(module, captured, inputs, shares, training, prefix=prefix)
    except BadData as error:
        return [f"warning: {str(error).removesuffix(f', {_ANYWAY}')}; torch.verify is off"]


@contextmanager
def _memory_explained(gradients: bool) -> Iterator[None]:
    """Raise BadData with a remedy if the unpartitioned module does not fit in memory."""
    try:
        with memory_errors():
            yield
    except MemoryError as error:
        less = "compare only the losses with --verify forward, or " if gradients else ""
        raise BadData(
            f"out of memory ({error}) when running the unpartitioned module; {less}compare only a "
            "part of the module with --verify off"
        ) from error


class _Verification:
    """Comparisons of a module with its captured program.

    If `details` is True, error messages name the first operation or submodule that differs. If a
    `prefix` is given, its loss takes the place of the loss of the module.
    """

    def __init__(self, module, captured, inputs, shares, details, prefix):
        self.module, self.captured, self.shares = module, captured, shares
        self.details, self.prefix = details, prefix
        self.both = range(shares[0].start, shares[-1].stop)
        self.inputs = dict(zip(captured.inputs, inputs, strict=True))
        state = state_of(captured)
        trained = [name for name, like in state.items() if is_trained(like)]
        if prefix:
            trained = [name for name in trained if name in prefix.weights]
        self.trained = trained if torch.is_grad_enabled() else []
        self.values = dict(values_in(module, captured))
        self.close = _CLOSE[_narrowest_type(captured)]
        self.narrow = state[trained[0]].dtype.itemsize == 2
        terms, both = LossTerms(captured), self._given(self.both)
        terms.weights = {name: self.values[name] for name in terms.reads}
        flat = [both[node] for node in captured.inputs]
        self.batch_values = terms.values(flat, len(self.both))

    def lines(self):
        with _restored_buffers(self.module):
            first = self._of_module()
        with _restored_buffers(self.module):
            again = self._of_module()
        if problem := self._difference(first, again):
            raise BadData(
                f"a second call of the module returns a different result ({problem}); store "
                f"changing state only in buffers, {_ANYWAY}"
            )
        program = self._program(redraw=False)
        if problem := self._difference(again, self._of_program(program, self.both)):
            raise BadData(
                f"the captured program differs from the module ({problem}); "
                f"{self._culprit(program)}, {_ANYWAY}"
            )
        part = f" {self.prefix}," if self.prefix else ""
        found = f"verified{part} on {counted(len(self.both), 'sample')}: loss {first.loss:.6g}"
        return [found, *self._microbatches(self._program(redraw=True))]

    def _program(self, redraw):
        count = len(self.captured.pieces)
        end = self.prefix.pieces if self.prefix else count
        chunks = [range(end), range(end, count)]
        return stage_programs(self.captured, chunks, redraw=redraw)[0]

    def _microbatches(self, program):
        """Compare the loss of both microbatches with the mean of their losses."""
        if len(self.shares) == 1:
            return []
        norms = [node for node in program.module.graph.nodes if is_batch_norm(node)]
        together = self._of_program(program, self.both)
        if norms:
            # With the same statistics, the losses agree, but the gradients do not.
            values = self._recorded(program, self.both, kept=norms)
            losses = [self._recorded(program, rows, values, norms)[-1] for rows in self.shares]
            separate = self._mean([Result(float(loss), {}) for loss in losses])
            together = together._replace(gradients={})
        else:
            separate = self._mean([self._of_program(program, rows) for rows in self.shares])
        # In 16 bits, small gradients are sums whose rounding errors depend on the microbatches.
        if problem := self._difference(together, separate, 1.0 if self.narrow else _SMALL):
            raise BadData(
                f"the loss of two microbatches is not the mean of their losses ({problem}); "
                f"{self._relation(program)}, {_ANYWAY}"
            )
        return [
            f"{node.name}: computes its statistics over each microbatch, instead of the batch"
            for node in norms[:1]
        ]

    def _mean(self, results):
        weights = [len(rows) / len(self.both) for rows in self.shares]
        loss = sum(each.loss * weight for each, weight in zip(results, weights, strict=True))
        names = results[0].gradients
        pairs = [*zip(results, weights, strict=True)]
        return Result(
            loss,
            {name: sum(each.gradients[name] * weight for each, weight in pairs) for name in names},
        )

    def _of_module(self):
        names = dict(self.module.named_parameters(remove_duplicate=False))
        for each in self.module.parameters():
            each.grad = None
        loss = self._called()
        if self.trained:
            loss.backward()
        found = {name: names[name].grad for name in self.trained}
        for each in self.module.parameters():
            each.grad = None
        return _result(loss, found, names)

    def _called(self):
        """Return the loss of the module for both microbatches."""
        given = self._given(self.both)
        flat = [given[node] for node in self.captured.inputs]
        args, kwargs = tree_unflatten(flat, self.captured.program.call_spec.in_spec)
        torch.manual_seed(0)
        try:
            with memory_errors():
                if self.prefix:
                    return self.prefix.loss_of_module(self.module, args, kwargs)
                result = self.module(*args, **kwargs)
        except MemoryError:
            raise
        except Exception as error:
            raise BadData(f"the module raised {described(error)}") from error
        return dict(named_tensors(result))[self.captured.loss.name]

    def _given(self, rows):
        return {node: rows_for(node, value, rows) for node, value in self.inputs.items()}

    def _weights(self):
        """Return leaf tensors for the parameters, and copies of the buffers."""
        trained = {*self.trained}
        return {
            name: value.detach().requires_grad_() if name in trained else value.clone()
            for name, value in self.values.items()
        }

    def _arguments(self, rows):
        draw = Draw(0, 0, rows.start, len(rows), self.batch_values)
        return draw, (), self._given(rows), self._weights()

    def _of_program(self, program: StageProgram, rows: range) -> Result:
        draw, received, given, weights = self._arguments(rows)
        torch.manual_seed(0)
        loss = self._loss(program, *program.run(draw, received, given, weights))
        leaves = {name: weights[name] for name in self.trained}
        found = torch.autograd.grad(loss, [*leaves.values()], allow_unused=True) if leaves else ()
        return _result(loss, dict(zip(leaves, found, strict=True)), leaves)

    def _loss(self, program, sent, outputs):
        if self.prefix:
            return mean_of_squares(sent[program.sent.index(self.prefix.result)])
        return outputs[program.outputs.index(loss_of(self.captured))]

    def _difference(self, one: Result, other: Result, small: float = _SMALL) -> str:
        """Describe the first difference that is larger than rounding errors, or return "".

        `small` is the weight of the total gradient norm in the tolerance of one gradient.
        """
        if abs(one.loss - other.loss) > self.close * max(abs(one.loss), abs(other.loss)):
            return f"loss {one.loss:.10g} and {other.loss:.10g}"
        if isnan(one.loss) != isnan(other.loss):
            return f"loss {one.loss:.10g} and {other.loss:.10g}"
        norms = {name: float(each.norm()) for name, each in one.gradients.items()}
        total = sum(norm**2 for norm in norms.values()) ** 0.5
        for name, gradient in reversed(one.gradients.items()):
            theirs = other.gradients[name]
            difference = float((gradient - theirs).norm())
            invalid = not torch.equal(gradient.isnan(), theirs.isnan())
            if invalid or difference > self.close * (norms[name] + small * total):
                return f"loss {one.loss:.10g}, but different gradients of {name}"
        return ""

    def _recorded(self, program, rows, recording=(), norms=(), kept=None):
        """Return the values of the operations in `kept`, or of all operations, and the loss.

        Operations in `norms` are replaced by their values in `recording`, which is the result of
        this method for both microbatches.
        """
        draw, received, given, weights = self._arguments(rows)
        first = rows.start - self.both.start
        fixed = {
            node: _rows_of_samples(value, range(first, first + len(rows)), len(self.both))[0]
            for node, value in (recording[0].items() if norms else ())
            if node in norms
        }
        recorder = _Recorder(program.module, fixed, kept)
        torch.manual_seed(0)
        with torch.no_grad():
            found = program._replace(module=recorder.run).run(draw, received, given, weights)
        return recorder.values, self._loss(program, *found)

    def _relation(self, program):
        """Name the first operation that combines samples of different microbatches."""
        if not self.details:
            return self._reduction()
        both, _ = self._recorded(program, self.both)
        norms = [node for node in both if is_batch_norm(node)]
        for rows in self.shares:
            values, _ = self._recorded(program, rows, (both,), norms)
            first = rows.start - self.both.start
            here = range(first, first + len(rows))
            for node, value in values.items():
                if not carries_batch(node) or not isinstance(value, torch.Tensor):
                    continue
                orders = _rows_of_samples(both[node], here, len(self.both))
                if not any(self._same(value, expected) for expected in orders):
                    return f"{node.name} relates samples{where(node)}; compute it for each sample"
        return self._reduction()

    def _reduction(self):
        """Describe how the loss must depend on the samples."""
        if self.prefix:
            return f"compute {self.prefix.path} for each sample"
        loss = self.captured.loss
        if loss.reduction == "sum":
            return (
                f"return the sum over the samples{where(loss.node)}, or, if the loss is a mean, "
                'remove "sum" from the return value of the factory'
            )
        return (
            f"return the loss as a mean over the samples{where(loss.node)}, or let the factory "
            'return module, inputs, "sum" if the loss is a sum'
        )

    def _culprit(self, program):
        """Name the first submodule with a result that the captured program does not compute."""
        if not self.details:
            return "use --verify on to find the first difference"
        calls, handles = [], []
        for path, submodule in self.module.named_modules():
            handles.append(
                submodule.register_forward_hook(
                    lambda _, args, result, path=path: calls.append((path, tensors(result)))
                )
            )
        try:
            with _restored_buffers(self.module):
                self._called()
        finally:
            for each in handles:
                each.remove()
        computed = self._recorded(program, self.both)[0].values()
        known = [tensor for value in computed for tensor in tensors(value)]
        for path, results in calls:
            if path and not all(any(self._same(a, b) for b in known) for a in results):
                return f"the first difference is in {path}; simplify this submodule"
        return "remove gradient hooks and values that change from call to call"

    def _same(self, one, other):
        if one.shape != other.shape or one.dtype != other.dtype:
            return False
        if not one.is_floating_point():
            return bool((one == other).all())
        equal = (one == other) | (one.isnan() & other.isnan())  # including infinite values
        different = torch.where(equal, 0.0, one - other)
        return float(different.norm()) <= self.close * float(one[one.isfinite()].norm())


def _narrowest_type(captured):
    """Return the floating-point type with the fewest bytes on the path to the loss."""
    values = BatchValues(captured.program, captured.loss.node)
    path = values.differentiable & {*values.relevant}
    found = {each.dtype for node in path for each in results_of(node)}
    return min(found & _CLOSE.keys(), key=lambda dtype: (dtype.itemsize, -_CLOSE[dtype]))


def _result(loss, gradients, parameters):
    return Result(
        float(loss.detach()),
        {
            name: torch.zeros_like(parameters[name]) if each is None else _wide(each)
            for name, each in gradients.items()
        },
    )


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    """Convert 16-bit floats to float32, in which norms of gradients do not overflow."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def _rows_of_samples(
    value: torch.Tensor, samples: range, count: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rows of the given samples. All `count` samples have the same number of rows.

    The order of the rows is unknown, so two tensors are returned. The first one is correct if the
    rows of a sample are adjacent, and the second one if the first rows of all samples come first.
    """
    width, chosen = len(value) // count, slice(samples.start, samples.stop)
    by_sample = value.unflatten(0, (count, width))[chosen].flatten(0, 1)
    return by_sample, value.unflatten(0, (width, count))[:, chosen].flatten(0, 1)


@contextmanager
def _restored_buffers(module: torch.nn.Module) -> Iterator[None]:
    held = [
        (submodule, name, buffer, buffer.clone())
        for submodule in module.modules()
        for name, buffer in submodule._buffers.items()
        if buffer is not None
    ]
    try:
        yield
    finally:
        for submodule, name, buffer, before in held:
            submodule._buffers[name] = buffer
            with torch.no_grad():
                buffer.copy_(before)


class _Recorder(fx.Interpreter):
    """Interpreter that records the values of the operations in `kept`, and replaces some of them.

    If `kept` is `None`, all values are recorded. Values are copied, because a later operation may
    modify them in place.
    """

    def __init__(
        self,
        module: fx.GraphModule,
        fixed: Mapping[fx.Node, Any],
        kept: Collection[fx.Node] | None,
    ) -> None:
        super().__init__(module)
        self.fixed, self.values, self.kept = fixed, {}, kept

    def run_node(self, n: fx.Node) -> Any:
        value = self.fixed[n].clone() if n in self.fixed else super().run_node(n)
        if n.op == "call_function" and (self.kept is None or n in self.kept):
            self.values[n] = value.clone() if isinstance(value, torch.Tensor) else value
        return value
