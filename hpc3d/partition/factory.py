"""The user's functions: `MODULE:FACTORY` makes a module and its example inputs.

They are called without traces: torch's generators stay as they were, and nothing is printed.
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
    """The module and the example inputs that `MODULE:FACTORY` returns, arguments in a tuple or by
    name in a dict.  A factory may have arguments, as `MODULE:FACTORY(1024, layers=24)`: literals.

    They are fake tensors where the factory works with such, so that a model of any size takes no
    memory; torch's generators stay as they were.  ValueError with a line where it cannot be had.
    """
    return _as_pair(name, _called(name, function_at(name)))


def made_with_data(name: str, seed: int) -> tuple[torch.nn.Module, tuple | dict]:
    """The same with their values, drawn with torch's generator at `seed`."""
    make = function_at(name)
    try:
        with undisturbed():
            torch.manual_seed(seed)
            return _as_pair(name, make())
    except (Exception, SystemExit) as error:
        raise ValueError(f"{name} raised {described(error)}") from error


def function_at(name: str) -> Callable[..., Any]:
    """The function that `MODULE:FUNCTION` names, or with arguments, which are literals, a function
    that calls it with them."""
    place, colon, call = name.partition(":")
    factory, given, _ = call.partition("(")
    if not colon or not place or not factory:
        raise ValueError(f"{name}: give a module and a function in it, as package.module:factory")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    function = _found(name, place, factory.strip())
    if not given:
        return function
    arguments, named = _literals(name, factory, call)
    return partial(function, *arguments, **named)


def _as_pair(name, result):
    """What a factory returned, as a module and its inputs."""
    match result:
        case torch.nn.Module() as module, (tuple() | dict()) as inputs:
            return module, inputs
        case torch.nn.Module() as module, torch.Tensor() as only:
            return module, (only,)
    raise ValueError(f"{name} must return an nn.Module and its inputs, in a tuple or a dict")


def _literals(name, factory, call):
    """The arguments of `factory(1024, layers=24)`, by place and by name."""
    try:
        found = ast.parse(call.strip(), mode="eval").body
        if ast.unparse(found.func) != factory.strip():
            raise ValueError
        named = {each.arg: ast.literal_eval(each.value) for each in found.keywords}
        return [ast.literal_eval(each) for each in found.args], named
    except (SyntaxError, ValueError, AttributeError, TypeError):
        how = "as package.module:factory(1024, layers=24)"
        raise ValueError(f"{name}: give a factory numbers or texts, {how}") from None


def _called(name, make):
    """What a factory returns, with data where it wants to look into its tensors."""
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
    """Whether an error is that of a fake tensor: it has no data, and a module cannot be converted
    to another type."""
    frames = traceback.extract_tb(error.__traceback__)
    inside = any(f"{os.sep}_subclasses{os.sep}" in frame.filename for frame in frames)
    return inside or any(text in str(error) for text in ("tensor subclasses", "Couldn't swap"))


def _found(name: str, place: str, factory: str) -> Callable[..., Any]:
    try:
        with undisturbed():
            make = importlib.import_module(place)
        for part in factory.split("."):
            make = getattr(make, part)
    except ModuleNotFoundError as error:
        raise ValueError(f"{name}: there is no module {error.name}") from None
    except AttributeError:
        raise ValueError(f"{name}: {place} has no {factory}") from None
    except (Exception, SystemExit) as error:
        raise ValueError(f"{name}: importing {place} raised {described(error)}") from error
    return make
