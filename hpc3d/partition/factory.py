"""Call a user's `MODULE:FACTORY` function, which returns a module and its example inputs.

The call prints nothing and does not change the state of torch's default random number generator.
"""

from __future__ import annotations

import ast
import fcntl
import importlib
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from tempfile import gettempdir
from typing import Any, NamedTuple

import torch
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_map

from hpc3d.partition.capturing.gradient_hooks import refuse_gradient_hooks
from hpc3d.partition.capturing.tracing import MEMORY_FRACTION, emptied_copies
from hpc3d.partition.capturing.user_code import described, undisturbed, without_data
from hpc3d.partition.capturing.user_module import refuse_unsupported, unwrapped
from hpc3d.runtime import environment, host_memory


class FactoryResult(NamedTuple):
    """Module with its example inputs, as returned by a factory.

    `reduction` is "mean" or "sum" if the factory states how the loss depends on the losses of the
    samples, otherwise "".
    """

    module: torch.nn.Module
    inputs: tuple | dict
    reduction: str = ""


def made(name: str) -> tuple[torch.nn.Module, tuple | dict]:
    """Call `MODULE:FACTORY` and return its module and example inputs, as `made_model` does."""
    return made_model(name)[:2]


def made_model(name: str, dtype: str | None = None) -> FactoryResult:
    """Call `MODULE:FACTORY` and return its result.

    The inputs are a tuple of positional arguments or a dict of keyword arguments. The name may
    include literal arguments for the factory, as in `MODULE:FACTORY(1024, layers=24)`. The factory
    first creates fake tensors, which need no memory. If this fails, for example because it reads
    the values of tensors, it is called again to create real tensors, which are then replaced by
    fake tensors. Wrappers such as torch.compile are removed from the module. If a `dtype` is
    given, the module and the inputs are converted to it. Raises ValueError with a one-line message
    if the factory fails.
    """
    make = function_at(name)
    return _as_model(name, _called(name, lambda: _converted(make(), dtype)), dtype)


def made_with_data(
    name: str, seed: int, dtype: str | None = None
) -> tuple[torch.nn.Module, tuple | dict]:
    """Call `MODULE:FACTORY` with real tensors and a seeded random number generator.

    Returns the module and its example inputs, which are converted to `dtype` if it is given.
    """
    make = function_at(name)
    try:
        with undisturbed():
            torch.manual_seed(seed)
            return _as_model(name, _converted(make(), dtype), dtype)[:2]
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
        for attribute in factory.split("."):
            function = getattr(function, attribute)
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


def _as_model(name, result, dtype):
    match result:
        case torch.nn.Module() as module, (tuple() | dict() | torch.Tensor()) as inputs, *stated:
            if stated in ([], ["mean"], ["sum"]):
                inputs = (inputs,) if isinstance(inputs, torch.Tensor) else inputs
                return FactoryResult(unwrapped(module), converted(inputs, dtype), *stated)
    raise ValueError(
        f'{name} must return an nn.Module, a tuple or dict of its inputs and, optionally, "mean" '
        'or "sum", the reduction of the loss'
    )


def _converted(result, dtype):
    """Convert the module in the result of a factory to `dtype`, if it is given.

    torch cannot convert a module of fake tensors outside of the mode that created them.
    """
    match result:
        case torch.nn.Module() as module, *_ if dtype:
            module.to(getattr(torch, dtype))
    return result


def converted(inputs: Any, dtype: str | None) -> Any:
    """Convert the floating-point tensors in nested inputs to `dtype`, if it is given."""

    def of_type(value):
        floating = isinstance(value, torch.Tensor) and value.is_floating_point()
        return value.to(getattr(torch, dtype)) if dtype and floating else value

    return tree_map(of_type, inputs)


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
    """Call a factory with fake tensors; if it fails, call it again with real tensors."""
    try:
        try:
            with undisturbed(), without_data(symbols=False):
                return make()
        except Exception as error:
            without = error
        with undisturbed(), _limited_parameters():
            return _emptied(make())
    except _TooLarge as error:
        message = described(without)
        raise ValueError(f"{name} raised {message} without data, and {error}") from without
    except (Exception, SystemExit) as error:
        raise ValueError(f"{name} raised {described(error)}") from error


class _TooLarge(Exception):
    """Error raised if parameters do not fit in memory."""


def _emptied(result):
    """Replace the tensors in the result of a factory by fake tensors.

    If the module cannot be captured, the result is returned unchanged, because fake tensors could
    hide the reason, such as a gradient hook.
    """
    match result:
        case torch.nn.Module() as module, inputs, *stated:
            with suppress(Exception):
                module = unwrapped(module)
                refuse_unsupported(module)
                refuse_gradient_hooks(module)
                return *emptied_copies(module, inputs), *stated
    return result


@contextmanager
def _limited_parameters() -> Iterator[None]:
    """Limit the memory of the modules that the ranks on this host create.

    Raises _TooLarge as soon as the modules of this rank have more parameters than fit in memory.
    If the modules of all ranks do not fit together, the ranks continue one after another.
    """
    limit, found, turn = MEMORY_FRACTION * host_memory.total(), 0, ExitStack()
    share = limit / environment.number_in(environment.LOCAL_RANKS, default=1)

    def added(module, name, parameter):
        nonlocal found, share
        if parameter is not None and not is_lazy(parameter):
            found += parameter.numel() * parameter.element_size()
        if found > limit:
            raise _TooLarge(
                f"with data, its parameters need more than {limit / 1e9:.3g} GB, "
                f"{MEMORY_FRACTION:.0%} of the host memory; do not read tensor values in the "
                "factory, or use a machine with more memory"
            )
        if found > share:
            turn.enter_context(_alone_on_host())
            share = limit

    with turn:
        turn.callback(register_module_parameter_registration_hook(added).remove)
        yield


@contextmanager
def _alone_on_host() -> Iterator[None]:
    """Context that only one process per host can enter at a time; the others wait."""
    folder = os.open(gettempdir(), os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)
