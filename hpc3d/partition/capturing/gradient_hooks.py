"""Reject gradient hooks, which torch.export drops without a warning."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from hpc3d.partition.capturing.user_code import UntraceableCode, line_of

_ADVICE = (
    "remove the hook; to change gradients, call a torch.autograd.Function in the forward method "
    "of a submodule"
)
_TENSOR_METHODS = "register_hook", "register_post_accumulate_grad_hook"


def refuse_gradient_hooks(module: torch.nn.Module) -> None:
    """Raise ValueError if a parameter or a submodule has a gradient hook.

    Training computes gradients with a traced program, which does not call these hooks.
    """
    for what, hooks in _hooks(module):
        for hook in hooks:
            raise ValueError(
                f"{what} has a gradient hook{line_of(hook)}, which would not be called; {_ADVICE}"
            )


def _hooks(module):
    """Yield (owner, gradient hooks) for all parameters and submodules."""
    for name, parameter in module.named_parameters():
        after_accumulation = getattr(parameter, "_post_accumulate_grad_hooks", None)
        hooks = [*(parameter._backward_hooks or {}).values(), *(after_accumulation or {}).values()]
        yield f"the parameter {name}", hooks
    for path, submodule in module.named_modules():
        hooks = [*submodule._backward_pre_hooks.values(), *submodule._backward_hooks.values()]
        yield f"the module {path or type(submodule).__name__}", hooks


@contextmanager
def tensor_hooks_refused() -> Iterator[None]:
    """Raise ValueError if code in this context registers a gradient hook for a tensor."""
    before = {name: vars(torch.Tensor)[name] for name in _TENSOR_METHODS}
    for name in _TENSOR_METHODS:
        setattr(torch.Tensor, name, _refused)
    try:
        yield
    finally:
        for name, method in before.items():
            setattr(torch.Tensor, name, method)


def _refused(tensor: torch.Tensor, *args: Any) -> None:
    raise UntraceableCode("forward registers a gradient hook for a tensor")
