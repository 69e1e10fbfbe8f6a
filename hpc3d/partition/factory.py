"""Call a user's `MODULE:FACTORY` function, which returns a module and its example inputs.

The call has no visible side effects: the state of torch's default generator is restored, and
output is suppressed.
"""

from __future__ import annotations

import ast
import importlib
import os
import sys
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from hpc3d.partition.capturing.user_code import described, undisturbed, without_data


def made(name: str) -> tuple[torch.nn.Module, tuple | dict]:
    """Call `MODULE:FACTORY` and return its module and example inputs.

    The inputs are a tuple of positional arguments or a dict of keyword arguments. The name may
    include literal arguments for the factory, as in `MODULE:FACTORY(1024, layers=24)`. The factory
    is called on fake tensors, which need no memory, or on real tensors if it needs their values.
    Raises ValueError with a one-line message if the factory fails.
    """
    return _as_pair(name, _called(name, function_at(name)))


def made_with_data(name: str, seed: int) -> tuple[torch.nn.Module, tuple | dict]:
    """Call `MODULE:FACTORY` on real tensors after seeding torch's default generator.

    Returns the module and its example inputs.
    """
    make = function_at(name)
    try:
        with undisturbed():
            torch.manual_seed(seed)
            return _as_pair(name, make())
    except (Exception, SystemExit) as error:
        raise ValueError(f"{name} raised {described(error)}") from error


def function_at(name: str) -> Callable[..., Any]:
    """Return the function named `MODULE:FUNCTION`.

    If the name includes literal arguments, they are bound to the returned function.
    """
    module_name, colon, call = name.partition(":")
    factory, given, _ = call.partition("(")
    if not colon or not module_name or not factory:
        raise ValueError(
            f"{name}: must have the form MODULE:FUNCTION, as in package.module:factory"
        )
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    factory = factory.strip()
    try:
        with undisturbed():
            function: Any = importlib.import_module(module_name)
        for part in factory.split("."):
            function = getattr(function, part)
    except ModuleNotFoundError as error:
        raise ValueError(f"{name}: no module named {error.name}; check the name") from None
    except AttributeError:
        raise ValueError(f"{name}: module {module_name} has no function {factory}") from None
    except (Exception, SystemExit) as error:
        raise ValueError(f"{name}: importing {module_name} raised {described(error)}") from error
    if not given:
        return function
    arguments, named = _literals(name, factory, call)
    return partial(function, *arguments, **named)


def _as_pair(name, result):
    match result:
        case torch.nn.Module() as module, (tuple() | dict()) as inputs:
            return module, inputs
        case torch.nn.Module() as module, torch.Tensor() as only:
            return module, (only,)
    raise ValueError(f"{name} must return an nn.Module and a tuple or dict of its inputs")


def _literals(name, factory, call):
    """Parse a call such as `factory(1024, layers=24)` into positional and keyword arguments."""
    try:
        found = ast.parse(call.strip(), mode="eval").body
        if ast.unparse(found.func) != factory:
            raise ValueError
        named = {each.arg: ast.literal_eval(each.value) for each in found.keywords}
        return [ast.literal_eval(each) for each in found.args], named
    except (SyntaxError, ValueError, AttributeError, TypeError):
        how = "numbers or strings, as in package.module:factory(1024, layers=24)"
        raise ValueError(f"{name}: arguments of the factory must be {how}") from None


def _called(name, make):
    """Call a factory on fake tensors, or on real tensors if the factory needs data."""
    try:
        try:
            with undisturbed(), without_data():
                return make()
        except Exception as error:
            if not _asks_for_data(error):
                raise
        with undisturbed():
            return make()
    except (Exception, SystemExit) as error:
        raise ValueError(f"{name} raised {described(error)}") from error


def _asks_for_data(error):
    """Return True if an error was raised because a fake tensor has no data.

    This includes errors raised when a module is converted to another dtype.
    """
    frames = traceback.extract_tb(error.__traceback__)
    inside = any(f"{os.sep}_subclasses{os.sep}" in frame.filename for frame in frames)
    return inside or any(text in str(error) for text in ("tensor subclasses", "Couldn't swap"))
