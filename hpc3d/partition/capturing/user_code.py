"""Call user code without side effects, and report its exceptions concisely."""

from __future__ import annotations

import inspect
import logging
import os
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from io import StringIO
from typing import Any
from warnings import catch_warnings

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv


class UnsupportedCode(ValueError):
    """Error raised for code that hpc3d does not support, not even in an opaque operation."""


@contextmanager
def undisturbed() -> Iterator[None]:
    """Suppress all output in the context, and restore torch's random generator state at exit."""
    state, level = torch.get_rng_state(), logging.root.manager.disable
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
        torch.set_rng_state(state)


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
    text = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    return f"{text:.300}{line_in_user_code(error)}"


def line_in_user_code(error: BaseException) -> str:
    """Return the file and line of user code that raised an error, in parentheses, or ""."""
    frames = traceback.extract_tb(error.__traceback__)
    libraries = (
        os.path.dirname(os.path.dirname(__file__)),
        os.path.dirname(torch.__file__),
        os.path.dirname(os.__file__),
    )
    user_frames = [each for each in frames if not each.filename.startswith((*libraries, "<"))]
    return f" ({user_frames[-1].filename}:{user_frames[-1].lineno})" if user_frames else ""


def line_of(function: Any) -> str:
    """Return the file and line of a Python function, in parentheses, or "" if it has no code."""
    code = getattr(inspect.unwrap(getattr(function, "__func__", function)), "__code__", None)
    return f" ({code.co_filename}:{code.co_firstlineno})" if code else ""
