"""Wrapper around torch.export that keeps all operations in one graph, even under torch.no_grad.

By default, torch.export creates a separate graph for each torch.no_grad block, and it drops
torch.no_grad inside an autocast block. This wrapper represents the blocks as follows:

    torch.no_grad             each floating-point operand that may require a gradient is passed
                              through aten.detach, so that no result in the block requires grad
    torch.inference_mode      treated as torch.no_grad
    autocast(enabled=False)   ignored, because there is no enclosing autocast

User-defined subclasses of torch.autograd.Function are rejected, because torch.export traces their
forward pass, but not their backward pass. So are gradients that the forward pass computes.
"""

from __future__ import annotations

import operator
import os
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import fx
from torch._dynamo.exc import UserError, UserErrorType
from torch._export.passes import replace_autocast_with_hop_pass, replace_set_grad_with_hop_pass
from torch._ops import HigherOrderOperator
from torch.amp import autocast_mode
from torch.distributions import Distribution
from torch.export import ExportedProgram, export
from torch.export.graph_signature import InputKind
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils.checkpoint import CheckpointFunction

from hpc3d.partition.capturing.gradient_hooks import tensor_hooks_refused
from hpc3d.partition.capturing.user_code import UnsupportedCode, UntraceableCode, running_line

_set_grad_enabled, _detach = torch._C._set_grad_enabled, torch.ops.aten.detach.default
_enter_autocast = autocast_mode._enter_autocast
_MODES = _set_grad_enabled, _enter_autocast, autocast_mode._exit_autocast


def flat_export(model: torch.nn.Module, inputs: tuple | dict, shapes: Any) -> ExportedProgram:
    """Return the exported program of a module that is called with `inputs`.

    Raises ValueError for autocast, for user-defined torch.autograd.Functions, for gradient hooks
    of tensors, and for higher-order operators, which contain subgraphs. The message contains the
    line of user code, if known.
    """
    args, kwargs = ((), inputs) if isinstance(inputs, dict) else (inputs, None)
    blocks = "replace_autocast_with_hop_pass", "replace_set_grad_with_hop_pass"
    passes = replace_autocast_with_hop_pass, replace_set_grad_with_hop_pass
    with ExitStack() as replaced:
        replaced.enter_context(tensor_hooks_refused())
        for name, module in zip(blocks, passes, strict=True):
            unchanged = _replaced(module, name, lambda graph, signature: (graph, signature))
            replaced.enter_context(unchanged)
        apply = classmethod(_checked_apply)
        replaced.enter_context(_replaced(torch.autograd.Function, "apply", apply))
        replaced.enter_context(_replaced(torch.autograd, "grad", _gradients_refused))
        replaced.enter_context(_replaced(torch.autograd, "backward", _backward_refused))
        # torch.export cannot trace the validation of arguments, which reads tensor values.
        replaced.enter_context(_replaced(Distribution, "_validate_args", False))
        replaced.enter_context(_replaced(torch.inference_mode, "__enter__", _enter_no_grad))
        replaced.enter_context(_replaced(torch.inference_mode, "__exit__", _exit_no_grad))
        replaced.enter_context(_fixed_batch_refused())
        program = export(model, args, kwargs, dynamic_shapes=shapes, strict=False)
    _Modes(program).resolve()
    return program


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = vars(owner)[name]
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


class FixedBatch(UnsupportedCode):
    """Error raised if the code in `line` restricts a model to a single batch size."""

    def __init__(self, line: str) -> None:
        super().__init__("the code assumes a fixed batch size")
        self.line = line


@contextmanager
def _fixed_batch_refused() -> Iterator[None]:
    """Raise FixedBatch if torch.export reports that the batch size is not arbitrary."""
    conditions: list[tuple[bool, str]] = []
    log_guard = ShapeEnv._log_guard

    def recorded(env: ShapeEnv, prefix: str, condition: Any, **how: Any) -> None:
        conditions.append((bool(condition.is_Equality), running_line()))
        log_guard(env, prefix, condition, **how)

    try:
        with _replaced(ShapeEnv, "_log_guard", recorded):
            yield
    except UserError as error:
        if error.error_type is not UserErrorType.CONSTRAINT_VIOLATION:
            raise
        lines = sorted((each for each in conditions if each[1]), key=lambda each: not each[0])
        raise FixedBatch(lines[0][1] if lines else "") from error


def _enter_no_grad(self: torch.inference_mode) -> None:
    self.no_grad = torch.set_grad_enabled(not self.mode and torch.is_grad_enabled())


def _exit_no_grad(self: torch.inference_mode, *error: Any) -> None:
    self.no_grad.__exit__(*error)


def _gradients_refused(*args: Any, **kwargs: Any) -> None:
    raise UntraceableCode("forward computes gradients")


def _backward_refused(*args: Any, **kwargs: Any) -> None:
    raise UnsupportedCode("forward calls backward(); return the loss instead")


_apply = vars(torch.autograd.Function)["apply"]


def _checked_apply(cls, *args, **kwargs):
    if issubclass(cls, CheckpointFunction):
        raise UnsupportedCode(
            "reentrant activation checkpointing cannot be traced; pass use_reentrant=False to "
            "torch.utils.checkpoint.checkpoint"
        )
    if cls.__module__.partition(".")[0] != "torch":
        raise UntraceableCode(f"{cls.__name__} defines a custom backward pass")
    return _apply.__get__(None, cls)(*args, **kwargs)


class _Modes:
    """Graph pass that replaces torch.no_grad blocks with explicit detach operations."""

    def __init__(self, program):
        self.graph = program.graph
        kinds = {spec.arg.name: spec.kind for spec in program.graph_signature.input_specs}
        self.without = {  # values that require no gradient
            node
            for node in self.graph.nodes
            if node.op == "placeholder" and kinds[node.name] is not InputKind.PARAMETER
        }
        self.enabled, self.detached = True, {}
        self.written = {}  # maps results of in-place operations to the modified operand

    def resolve(self):
        for node in [*self.graph.nodes]:
            if isinstance(node.target, HigherOrderOperator):
                raise ValueError(
                    f"the operator {node.target} is not supported; remove it from the model"
                    f"{where(node)}"
                )
            if node.target is _set_grad_enabled:
                (self.enabled,), self.detached = node.args, {}
            elif node.target is _enter_autocast:
                _refuse_autocast(node)
            else:
                self._operation(node)
        for node in reversed(self.graph.nodes):
            if node.target in _MODES:
                self.graph.erase_node(node)
        self.graph.owning_module.recompile()

    def _operation(self, node):
        for source in node.all_input_nodes:
            if source in self.written:
                node.replace_input_with(source, self.written[source])
        if node.target is operator.getitem:
            self.without |= {node} if node.args[0] in self.without else set()
            return
        if node.op != "call_function" or self.enabled:
            return
        before = node.args[0] if node.args else None
        for source in node.all_input_nodes:
            if source not in self.without and _may_require_grad(source):
                node.replace_input_with(source, self._detached(source, node))
        self.without.add(node)
        if before not in node.all_input_nodes and _writes_to_its_result(node):
            self.written[node] = before

    def _detached(self, source, reader):
        if source not in self.detached:
            with self.graph.inserting_before(reader):
                copy = self.graph.call_function(_detach, (source,))
            copy.meta = {**reader.meta, "val": source.meta["val"].detach()}
            self.detached[source] = copy
            self.without.add(copy)
        return self.detached[source]


def _may_require_grad(node):
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())


def _writes_to_its_result(node):
    """Return True if an operation modifies an operand in place and returns it."""
    schema = getattr(node.target, "_schema", None)
    return schema and any(each.alias_info and each.alias_info.is_write for each in schema.returns)


def _refuse_autocast(node):
    _, _, enabled, _ = node.args
    if enabled:
        while (line := where(node)) == "" and node.op != "output":
            node = node.next
        raise ValueError(
            f"autocast to 16-bit types is not supported; remove the autocast block{line}"
        )


def where(node: fx.Node) -> str:
    """Return the file and line of an operation in parentheses, or "" if they are unknown."""
    found = re.findall(r'File "(.*)", line (\d+)', node.meta.get("stack_trace") or "")
    torch_folder = os.path.dirname(torch.__file__)
    found = [each for each in found if not each[0].startswith(torch_folder)] or found
    return f" ({found[-1][0]}:{found[-1][1]})" if found else ""


def module_of(node: fx.Node) -> str:
    """Return the path of the submodule that contains an operation, or "" for the model itself."""
    return [*modules_of(node), ""][0]


def modules_of(node: fx.Node) -> list[str]:
    """Return the paths of all submodules that contain an operation, the innermost first."""
    stack = (node.meta.get("nn_module_stack") or {}).values()
    return [path.removeprefix("L['self']").removeprefix(".") for path, _ in reversed(stack)]
