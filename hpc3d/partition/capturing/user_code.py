"""Call user code without side effects, and report its exceptions concisely."""

from __future__ import annotations

import inspect
import logging
import os
import random
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from io import StringIO
from itertools import dropwhile
from typing import Any, NamedTuple
from warnings import catch_warnings

import numpy
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv


class UnsupportedCode(ValueError):
    """Error raised for code that hpc3d does not support, not even in an opaque operation."""


class UntraceableCode(ValueError):
    """Error raised for code that hpc3d only supports in an opaque operation."""


@contextmanager
def undisturbed() -> Iterator[None]:
    """Suppress all output in the context, and restore the random number generators at exit."""
    states, level = random_states(), logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with (
            redirect_stdout(StringIO()),
            redirect_stderr(StringIO()),
            catch_warnings(action="ignore"),
        ):
            yield
    finally:
        logging.disable(level)
        torch.set_rng_state(states.torch)
        random.setstate(states.python)
        numpy.random.set_state(states.numpy)  # noqa: NPY002


class RandomStates(NamedTuple):
    """States of the random number generators of torch, Python and NumPy."""

    torch: torch.Tensor
    python: tuple[Any, ...]
    numpy: tuple[Any, ...]

    def advanced(self) -> list[str]:
        """Return the names of the generators that have drawn numbers since this state."""
        now = random_states()
        drawn = {
            "torch": not torch.equal(self.torch, now.torch),
            "Python's random": self.python != now.python,
            "NumPy": str(self.numpy) != str(now.numpy),
        }
        return [name for name, changed in drawn.items() if changed]


def random_states() -> RandomStates:
    """Return the current states of the random number generators."""
    global_state = numpy.random.get_state()  # noqa: NPY002  the generator that users call
    return RandomStates(torch.get_rng_state(), random.getstate(), global_state)


def without_data(symbols: bool = True) -> FakeTensorMode:
    """Return a context manager that makes all new tensors fake tensors without data.

    If `symbols` is False, code that reads the value of a tensor raises an exception. Otherwise,
    symbolic numbers represent the values.
    """
    shapes = ShapeEnv() if symbols else None
    return FakeTensorMode(allow_non_fake_inputs=True, shape_env=shapes)


def emptied(value: Any, device: str | None = None) -> Any:
    """Return an uninitialized tensor or parameter with the shape and dtype of `value`.

    Values that are not tensors are returned unchanged.
    """
    if not isinstance(value, torch.Tensor):
        return value
    like = torch.empty(value.shape, dtype=value.dtype, device=device)
    is_parameter = isinstance(value, torch.nn.Parameter)
    return torch.nn.Parameter(like, value.requires_grad) if is_parameter else like


def tensors(values: Any) -> list[torch.Tensor]:
    """Return all tensors in nested tuples, lists and dicts."""
    if isinstance(values, torch.Tensor):
        return [values]
    inner = values.values() if isinstance(values, dict) else values
    return [
        tensor
        for each in (inner if isinstance(values, tuple | list | dict) else ())
        for tensor in tensors(each)
    ]


def described(error: Exception) -> str:
    """Return the type and first message line of an error, with the line of the user's code."""
    lines = str(error).strip().splitlines()
    text = f"{type(error).__name__}: {lines[0].rstrip('.')}" if lines else type(error).__name__
    return f"{text:.300}{line_in_user_code(error)}"


_PARTITION = os.path.dirname(os.path.dirname(__file__))
_TORCH = os.path.dirname(torch.__file__)
_NOT_USER_CODE = _PARTITION, _TORCH, os.path.dirname(os.__file__), "<"


def line_in_user_code(error: BaseException) -> str:
    """Return the file and line of user code that raised an error, in parentheses, or ""."""
    frames = traceback.extract_tb(error.__traceback__)
    user_frames = [each for each in frames if not each.filename.startswith(_NOT_USER_CODE)]
    return f" ({user_frames[-1].filename}:{user_frames[-1].lineno})" if user_frames else ""


def is_raised_by_torch(error: BaseException) -> bool:
    """Return True if code of torch raised an error."""
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and frames[-1].filename.startswith(_TORCH)


def running_line() -> str:
    """Return the file and line of the user code that is running, in parentheses, or ""."""
    callers = traceback.walk_stack(inspect.currentframe())
    outside = dropwhile(lambda each: each[0].f_code.co_filename.startswith(_PARTITION), callers)
    for frame, line in outside:
        name = frame.f_code.co_filename
        if name.startswith(_PARTITION):
            break
        if not name.startswith(_NOT_USER_CODE):
            return f" ({name}:{line})"
    return ""


def line_of(function: Any) -> str:
    """Return the file and line of a Python function, in parentheses, or "" if it has no code."""
    code = getattr(inspect.unwrap(getattr(function, "__func__", function)), "__code__", None)
    return f" ({code.co_filename}:{code.co_firstlineno})" if code else ""
