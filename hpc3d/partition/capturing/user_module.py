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
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from hpc3d.partition.capturing.user_code import described

_MODULE_ATTRIBUTES = {*vars(torch.nn.Module())}  # attributes that torch sets
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
        raise ValueError(f"{func} computes new weights; switch modes without a change of weights")


def refuse_scripted(module: torch.nn.Module) -> None:
    """Raise ValueError if the module contains code compiled by torch.jit."""
    for path, submodule in module.named_modules():
        if isinstance(submodule, torch.jit.ScriptModule):
            name = f"submodule {path}" if path else "it"
            line = line_of(module.get_submodule(path.rpartition(".")[0])) if path else ""
            raise ValueError(
                f"this model cannot be captured: {name} was created by torch.jit, so its Python "
                f"code is not available; use the original module{line}"
            )


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
