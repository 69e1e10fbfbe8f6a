"""Prepare a user's module for capture: remove wrappers, and find the tensors that it stores."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch.nn import BatchNorm1d, BatchNorm2d, BatchNorm3d, SyncBatchNorm
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import TorchDispatchMode

from hpc3d.partition.capturing.user_code import described

_MODULE_ATTRIBUTES = {*vars(torch.nn.Module())}  # attributes that torch sets
_BATCH_NORMS = BatchNorm1d, BatchNorm2d, BatchNorm3d, SyncBatchNorm
_NOT_ENTERED = torch.nn.Module | type | ModuleType | FunctionType


def unwrapped(module: torch.nn.Module) -> torch.nn.Module:
    """Return the module inside of torch.compile, DataParallel and DistributedDataParallel.

    The parameter names of the returned module do not contain the prefix of the wrapper.
    """
    compiler = sys.modules.get("torch._dynamo.eval_frame")  # imported by the first torch.compile
    compiled = compiler.OptimizedModule if compiler else ()
    while isinstance(module, (DataParallel, DistributedDataParallel, compiled)):
        module = module._orig_mod if isinstance(module, compiled) else module.module
    return module


@contextmanager
def in_evaluation(module: torch.nn.Module) -> Iterator[None]:
    """Put a module in evaluation mode, and restore the mode of each submodule at exit.

    Raises ValueError if the module's method `eval` fails or runs operations on tensors.
    """
    modes = [(each, each.training) for each in module.modules()]
    try:
        try:
            with _Refused():
                module.eval()
        except Exception as error:
            raise ValueError(f"the method eval of the module raised {described(error)}") from error
        yield
    finally:
        for each, training in modes:
            each.training = training


class _Refused(TorchDispatchMode):
    """Context in which operations on tensors raise an exception."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.detach.default:  # the attribute `data` of a tensor
            return func(*args, **kwargs or {})
        raise ValueError(f"{func} was called; remove tensor operations from train() and eval()")


def refuse_unsupported(module: torch.nn.Module) -> None:
    """Raise ValueError for submodules and tensors that cannot be captured."""
    for path, submodule in module.named_modules():
        if problem := _problem_of_module(submodule):
            name = f"submodule {path}" if path else "it"
            line = line_of_enclosing(module, path.rpartition(".")[0]) if path else ""
            raise ValueError(f"this model cannot be captured: {name} {problem}{line}")
    stored = (*module.named_parameters(), *module.named_buffers(), *attribute_tensors(module))
    for name, tensor in stored:
        if is_lazy(tensor):
            problem = "is uninitialized; call the module on the example inputs in the factory"
        elif tensor.layout is not torch.strided:
            problem = "is sparse; replace it by a dense tensor"
        else:
            continue
        line = line_of_enclosing(module, name)
        raise ValueError(f"this model cannot be captured: the tensor {name} {problem}{line}")


def _problem_of_module(module):
    if isinstance(module, torch.jit.ScriptModule):
        return (
            "was created by torch.jit, so its Python code is not available; use the original "
            "module"
        )
    averages = isinstance(module, _BATCH_NORMS) and module.running_mean is not None
    if averages and module.momentum is None and module.training:
        return (
            "computes a cumulative average, which torch.export cannot trace; replace "
            "momentum=None by a number, such as 0.1"
        )
    return ""


def line_of(module: torch.nn.Module) -> str:
    """Return the file and line of a module's `forward` method, in parentheses.

    The result is empty if the method is defined in torch or has no Python source.
    """
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    if code is None or code.co_filename.startswith(os.path.dirname(torch.__file__)):
        return ""
    return f" ({code.co_filename}:{code.co_firstlineno})"


def user_attributes(module: torch.nn.Module) -> dict[str, Any]:
    """Return the attributes of a module, without those that every torch.nn.Module has."""
    return {key: value for key, value in vars(module).items() if key not in _MODULE_ATTRIBUTES}


def line_of_enclosing(module: torch.nn.Module, path: str) -> str:
    """Return the line of the innermost module on the path to a submodule or tensor.

    Modules that torch defines are skipped.
    """
    modules = dict(module.named_modules(remove_duplicate=False))
    while path and not (path in modules and line_of(modules[path])):
        path = path.rpartition(".")[0]
    return line_of(modules[path])


def first_names(module: torch.nn.Module) -> dict[str, str]:
    """Return a dict from each parameter or buffer name to the first name of the same tensor."""
    named = [
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    ]
    first: dict[int, str] = {}
    return {name: first.setdefault(id(tensor), name) for name, tensor in named}


def attribute_tensors(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the path and value of each tensor that is neither a parameter nor a buffer.

    Tensors in lists, tuples, dicts and objects are included. Example paths are `table`,
    `layers.0.tables[1]` and `options.weights['a']`.
    """
    seen: set[int] = set()
    for path, submodule in module.named_modules():
        for key, value in user_attributes(submodule).items():
            yield from _within(f"{path}.{key}".removeprefix("."), value, seen)


def _within(path: str, value: Any, seen: set[int]) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield path, value
    if isinstance(value, torch.Tensor | _NOT_ENTERED) or id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, dict):
        inner = [(f"{path}[{key!r}]", each) for key, each in value.items()]
    elif isinstance(value, tuple | list):
        inner = [(f"{path}[{index}]", each) for index, each in enumerate(value)]
    else:
        held = getattr(value, "__dict__", None)
        inner = [(f"{path}.{key}", each) for key, each in dict(held or {}).items()]
    for name, each in inner:
        yield from _within(name, each, seen)
