"""Opaque operations for modules that torch.export cannot trace.

While the model is traced, a stand-in replaces the module. The stand-in calls a placeholder
operation whose results have the shapes recorded in a run on real data. After tracing, an
OpaqueModule, which calls the module, replaces the placeholder operation.
"""

from __future__ import annotations

import copy
import hashlib
import inspect
import threading
from collections.abc import Callable, Sequence
from functools import cache
from itertools import count
from traceback import walk_tb
from weakref import WeakValueDictionary

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.export import ExportedProgram

from hpc3d.console.exit_codes import BadData
from hpc3d.partition.capturing.recorded_calls import (
    CannotBeOpaque,
    RecordedCall,
    recorded_calls,
    storage_of,
)
from hpc3d.partition.capturing.user_code import described, emptied, random_states, undisturbed

_MOST_TRIES = 16  # maximum number of failed traces before the capture is abandoned
_MOST_SAMPLES = 8
_numbers = count()
_Run = Callable[[int], object]


class OpaqueModule:
    """Opaque operation that calls a module on a list of tensors and a list of weights.

    The operation returns a tensor, or a list if the module returns several tensors. On fake
    tensors, the module is not called, and the results are fake tensors with the recorded shapes.
    """

    __module__ = __name__

    def __init__(
        self, path: str, module: torch.nn.Module, reason: str, call: RecordedCall
    ) -> None:
        self.path, self.reason, self.call = path, reason, call
        self.number = next(_numbers)
        self.__name__ = self.__qualname__ = path.replace(".", "_")
        self.weights = [name for name, _ in _named_weights(module)]
        self._names: dict[str, list[str]] = {name: [] for name in self.weights}
        first = {id(tensor): name for name, tensor in reversed(_named_weights(module))}
        for name, tensor in _named_weights(module, remove_duplicate=False):
            self._names[first[id(tensor)]].append(name)
        self._module = _without_data(path, module)
        self._text = _digest(module, call)
        self._local = threading.local()
        _KNOWN[self.number] = self

    def __str__(self) -> str:
        """Return the module path and a hash that identifies the computation."""
        return f"{self.path} {self._text}"

    def __call__(
        self, values: Sequence[torch.Tensor], weights: Sequence[torch.Tensor]
    ) -> torch.Tensor | list[torch.Tensor]:
        operands = [*values, *weights]
        graded = torch.is_grad_enabled() and any(each.requires_grad for each in operands)
        fake = any(isinstance(each, FakeTensor) for each in operands)
        found = self.like(values) if fake else self._run(values, weights)
        found = [_graded(each) if graded else each for each in found]
        return found[0] if len(found) == 1 else found

    def like(self, values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return uninitialized tensors with the shapes and dtypes of the results."""
        samples = self._samples(values)
        return [
            torch.empty(each.shape(samples), dtype=each.dtype) for each in self.call.returned.likes
        ]

    def _samples(self, values):
        """Compute the number of samples from the shape of an argument."""
        sizes = [
            (a, size - b if b else size)
            for like, value in zip(self.call.taken.likes, values, strict=True)
            for (a, b), size in zip(like.sizes, value.shape, strict=True)
            if a
        ]
        a, size = min(sizes, key=lambda each: each[0], default=(1, 0))
        return size if a == 1 else size // a

    def _run(self, values, weights):
        module = self._bound(weights)
        generators, versions = random_states(), [each._version for each in values]
        args, kwargs = self.call.taken.filled(values)
        try:
            result = module.forward(*args, **kwargs)
        except Exception as error:
            raise BadData(f"{self.path} raised {described(error)}") from error
        found = self.call.returned.tensors_in(result)
        if generators.advanced():
            raise BadData(
                f"{self.path} runs as an opaque operation and must not draw random numbers; "
                "remove the random operation, or make the module traceable"
            )
        if versions != [each._version for each in values]:
            raise BadData(
                f"{self.path} runs as an opaque operation and must not write to its inputs; write "
                "to a copy of the input instead"
            )
        samples = self._samples(values)
        expected = [(like.shape(samples), like.dtype) for like in self.call.returned.likes]
        if found is None or expected != [([*each.shape], each.dtype) for each in found]:
            raise BadData(
                f"{self.path} runs as an opaque operation and must return {expected}, the shapes "
                "and dtypes recorded for the plan"
            )
        operands = {storage_of(each) for each in (*values, *weights)}
        return [each.clone() if storage_of(each) in operands else each for each in found]

    def _bound(self, weights):
        """Return this thread's copy of the module, with the given tensors as its weights.

        The tensors remain bound after the call, because the module may recompute some of its
        operations in the backward pass.
        """
        if not hasattr(self._local, "module"):
            self._local.module = copy.deepcopy(self._module)
        for names, tensor in zip(self._names.values(), weights, strict=True):
            for name in names:
                path, _, leaf = name.rpartition(".")
                submodule = self._local.module.get_submodule(path)
                parameters, buffers = submodule._parameters, submodule._buffers
                table = parameters if leaf in parameters else buffers
                table[leaf] = tensor
        return self._local.module


def _graded(value):
    """Make a floating-point result require a gradient, even if the gradient is always zero."""
    if value.requires_grad or not (value.is_floating_point() or value.is_complex()):
        return value
    return value.detach().requires_grad_().clone()


def _named_weights(module, **how):
    return [*module.named_parameters(**how), *module.named_buffers(**how)]


def _without_data(path, module):
    """Return a copy of a module with its weights on the meta device and no forward hooks."""
    for submodule in module.modules():
        for name, value in vars(submodule).items():
            if isinstance(value, torch.Tensor):
                raise CannotBeOpaque(
                    path, f"the tensor attribute {name} is not registered as a buffer"
                )
    known = {id(tensor): emptied(tensor, "meta") for _, tensor in _named_weights(module)}
    found = copy.deepcopy(module, known)
    found._forward_hooks.clear()
    found._forward_pre_hooks.clear()
    return found


def _digest(module, call):
    """Return a SHA-256 hash of a recorded call and the module's code, settings and shapes."""
    lines = [repr((*call.taken, *call.returned, sorted(call.written)))]
    for path, submodule in module.named_modules():
        kind = type(submodule)
        try:
            source = "" if kind.__module__.startswith("torch.") else inspect.getsource(kind)
        except (OSError, TypeError):
            source = ""
        settings = {
            name: value
            for name, value in vars(submodule).items()
            if isinstance(value, int | float | str | None)
        }
        lines.append(repr((path, kind.__qualname__, source, submodule.extra_repr(), settings)))
    lines += [
        repr((name, [*each.shape], str(each.dtype))) for name, each in _named_weights(module)
    ]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


_KNOWN: WeakValueDictionary[int, OpaqueModule] = WeakValueDictionary()
_SCHEMA = "(Tensor[] values, Tensor[] weights, int number) -> Tensor[]"


@torch.library.custom_op("hpc3d::opaque_module", mutates_args=(), schema=_SCHEMA)
def _opaque_module(values, weights, number):
    raise NotImplementedError(
        "hpc3d::opaque_module is a placeholder for tracing and must not be executed"
    )


@_opaque_module.register_fake
def _(values, weights, number):
    return _KNOWN[number].like(values)


class _StandIn:
    """Stand-in for a module's `forward` method while the model is traced."""

    def __init__(self, path, module, calls):
        self.path, self.module, self.calls = path, module, iter(calls)

    def __call__(self, *args, **kwargs):
        operation = next(self.calls, None)
        values = operation and operation.call.taken.tensors_in((args, kwargs))
        if values is None:
            raise ValueError(
                f"{self.path} is called differently during tracing than in a run on real data"
            )
        named = dict(_named_weights(self.module))
        weights = [named[name] for name in operation.weights]
        results = torch.ops.hpc3d.opaque_module(values, weights, operation.number)
        return operation.call.returned.filled(results)


class OpaqueModules:
    """Find untraceable modules by repeated tracing, and convert them to opaque operations.

    `example()` returns a tuple: the model with initialized parameters, and a function that runs
    the model on a given number of samples. `batch` is the batch size of the example inputs.
    """

    def __init__(self, example: Callable[[], tuple[torch.nn.Module, _Run]], batch: int) -> None:
        self.example, self.tries = cache(example), 0
        self.samples = min(max(2, batch // 2), _MOST_SAMPLES)
        self.reasons: dict[str, str] = {}
        self.calls: dict[str, list[OpaqueModule]] = {}

    def stand_in(self, model: torch.nn.Module, repeats: int = 1) -> None:
        """Install the stand-ins in `model`, a copy of the model without data.

        The model can then be called `repeats` times.
        """
        for path, calls in self.calls.items():
            submodule = model.get_submodule(path)
            submodule.forward = _StandIn(path, submodule, calls * repeats)

    def add(self, model: torch.nn.Module, path: str, reason: str) -> None:
        """Convert an untraceable module, and all modules of its class, to opaque operations.

        If a module cannot be converted, its parent module is tried. Raises ValueError if no
        submodule can be converted, or after too many failed traces.
        """
        self.tries, why = self.tries + 1, ""
        while path in self.calls:
            path = path.rpartition(".")[0]
        while path and self.tries <= _MOST_TRIES:
            reasons = {**dict.fromkeys(_of_same_class(model, path), reason), **self.reasons}
            outermost = [each for each in reasons if not {*_enclosing(each)[1:]} & {*reasons}]
            try:
                calls = self._recorded(outermost, reasons)
                if any(calls.get(each) for each in _enclosing(path)):
                    self.calls, self.reasons = calls, reasons
                    return
                path = path.rpartition(".")[0]  # containers such as ModuleList are never called
            except CannotBeOpaque as error:
                path, why = error.path.rpartition(".")[0], f"; {error}"
        raise ValueError(f"{reason}{why}")

    def _recorded(self, paths, reasons):
        model, run = self.example()
        try:
            with undisturbed():
                calls = recorded_calls(model, run, self.samples, paths)
                return {
                    path: [
                        OpaqueModule(path, model.get_submodule(path), reasons[path], call)
                        for call in calls[path]
                    ]
                    for path in paths
                }
        except CannotBeOpaque:
            raise
        except (Exception, SystemExit) as error:
            raise ValueError(
                f"running the model on real data raised {described(error)}"
            ) from error


def _of_same_class(model, path):
    """Return the paths of all modules of the same class as the module at `path`.

    If the class is defined in torch, the list contains only `path`.
    """
    kind = type(model.get_submodule(path))
    if kind.__module__.startswith("torch."):
        return [path]
    return [
        other for other, submodule in model.named_modules() if other and type(submodule) is kind
    ]


def _enclosing(path):
    """Return a module path and the paths of all enclosing modules, innermost first."""
    names = path.split(".")
    return [".".join(names[:count]) for count in range(len(names), 0, -1)]


def culprit(error: BaseException | None, model: torch.nn.Module) -> str:
    """Return the path of the innermost module that was running when an error was raised.

    Returns "" if no submodule was running.
    """
    paths = {id(submodule): path for path, submodule in model.named_modules()}
    while error is not None:
        callers = [frame.f_locals.get("self") for frame, _ in walk_tb(error.__traceback__)]
        if found := [paths[id(each)] for each in callers if id(each) in paths]:
            return found[-1]
        error = error.__cause__ or error.__context__
    return ""


def replace_placeholders(program: ExportedProgram) -> tuple[OpaqueModule, ...]:
    """Replace a program's placeholder operations with OpaqueModules; return the OpaqueModules."""
    graph, found = program.graph, []
    for node in [*graph.nodes]:
        if node.target is torch.ops.hpc3d.opaque_module.default:
            values, weights, number = node.args
            found.append(_KNOWN[number])
            name = found[-1].__name__
            with graph.inserting_before(node):
                new = graph.create_node("call_function", found[-1], (values, weights), {}, name)
            new.meta = dict(node.meta)
            if len(found[-1].call.returned.likes) == 1:  # return a tensor, not a list
                (new.meta["val"],) = node.meta["val"]
                for reader in [*node.users]:
                    reader.replace_all_uses_with(new)
                    graph.erase_node(reader)
            node.replace_all_uses_with(new)
            graph.erase_node(node)
    return tuple(found)
