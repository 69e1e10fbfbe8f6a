"""Detection of Python state that a module's forward pass changes.

torch.export records only tensor operations. An attribute that every call changes, such as a call
counter or a hidden state, would keep its first value during training. A cache, which the first
call fills and later calls only read, is allowed. A tensor attribute that every call replaces is
also allowed, if no call reads the previous tensor.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from hpc3d.partition.capturing.user_code import UnsupportedCode, line_of
from hpc3d.partition.capturing.user_module import first_names, user_attributes

_VALUES = int | float | complex | str | bytes | None
_MAX_DEPTH = 6  # maximum depth of containers and objects that are compared


class StateWatch:
    """Forward hook that compares a model's Python attributes before and after a call.

    If an attribute changes, `changed` is True after the call, unless the call only sets attributes
    to a string or a bool that were missing or None, as a cache does. If `twice` is True, the hook
    calls the model once more with the same arguments, and raises ValueError if an attribute
    changes again. The hook is removed after one call.
    """

    def __init__(self, model: torch.nn.Module, twice: bool = False) -> None:
        self.changed, self.twice, self.before = False, twice, _attributes_of(model)
        self.names = first_names(model)
        self.hook = model.register_forward_hook(self._compare, with_kwargs=True)

    def _compare(self, model, args, kwargs, result):
        self.hook.remove()
        for name, first in first_names(model).items():
            if self.names.get(name) != first:
                raise UnsupportedCode(f"forward assigns {name}; assign it in __init__")
        after = _attributes_of(model)
        changes = _differ(self.before, after).values()
        self.changed = any(
            old is not None or not isinstance(new, str | bool) for old, new in changes
        )
        if self.twice:
            with _Reads() as reads:
                model(*args, **kwargs)
            _refuse_changes(model, _differ(after, _attributes_of(model)), reads.operands)


def _refuse_changes(model, changes, operands):
    """Raise ValueError for a changed attribute.

    A tensor attribute may be replaced by every call, unless the next call reads the tensor.
    """
    for name, (old, new) in changes.items():
        tensors = isinstance(old, torch.Tensor) and isinstance(new, torch.Tensor)
        if tensors and id(old) not in operands:
            continue
        path, _, attribute = name.partition("[")[0].rpartition(".")
        owner = f"the module {path}" if path else "the model"
        line = line_of(type(model.get_submodule(path)).forward)
        raise ChangingState(
            f"forward changes the attribute `{attribute}` of {owner}{line}, so later steps would "
            "differ from the traced step; pass the value as an input of the model, or register it "
            "as a buffer and modify it in place"
        )


class ChangingState(ValueError):
    """Error raised if the forward pass of a model changes a Python attribute in every call."""


class _Reads(TorchFunctionMode):
    """Mode that records the ids of all tensors that operations read."""

    def __init__(self):
        super().__init__()
        self.operands = {}

    def __torch_function__(self, function, types, args=(), kwargs=None):
        for each in tree_leaves((args, kwargs)):
            if isinstance(each, torch.Tensor):
                self.operands[id(each)] = each
        return function(*args, **(kwargs or {}))


def _attributes_of(model: torch.nn.Module) -> dict[str, Any]:
    """Return a dict from name to value for the Python attributes of a module and its submodules.

    Containers and objects are replaced by their lengths and their elements. Parameters and buffers
    are not included.
    """
    found: dict[str, Any] = {}
    seen = {id(submodule) for submodule in model.modules()}
    for path, submodule in model.named_modules():
        shared = {
            key: value
            for kind in reversed(type(submodule).__mro__)
            if not kind.__module__.startswith(("torch.", "builtins"))
            for key, value in vars(kind).items()
            if isinstance(value, _VALUES) and not key.startswith("__")
        }
        for key, value in (shared | user_attributes(submodule)).items():
            found.update(_leaves(f"{path}.{key}".removeprefix("."), value, seen, 0))
    return found


def _leaves(name: str, value: Any, seen: set[int], depth: int) -> Iterator[tuple[str, Any]]:
    """Yield (name, value) for the leaves of nested containers and objects."""
    inner = _elements(value) if depth < _MAX_DEPTH else None
    if inner is None:
        yield name, value
    elif id(value) not in seen:
        seen.add(id(value))
        yield f"{name}[]", len(inner)
        for key, each in inner.items():
            yield from _leaves(f"{name}[{key}]", each, seen, depth + 1)


def _elements(value):
    """Return the elements of a container or the attributes of a user's object, or `None`."""
    if isinstance(value, dict):
        return {repr(key): each for key, each in value.items()}
    if isinstance(value, list | tuple):
        return dict(enumerate(value))
    if isinstance(value, set | frozenset):
        return {repr(each): each for each in value}
    kind = type(value)
    owner = kind.__module__.partition(".")[0]
    if isinstance(value, type) or owner in (
        "torch",
        "builtins",
        "functools",
        __name__.partition(".")[0],
    ):
        return None
    return dict(vars(value)) if hasattr(value, "__dict__") else None


def _differ(before, after):
    """Return a dict from name to (old value, new value) for the attributes that differ."""
    return {
        name: (before.get(name), after.get(name))
        for name in sorted(before.keys() | after.keys())
        if not _same(before.get(name), after.get(name))
    }


def _same(one, other):
    if isinstance(one, torch.SymInt) or isinstance(other, torch.SymInt):
        return str(one) == str(other)
    values = isinstance(one, _VALUES) and type(one) is type(other)
    return one is other or (values and one == other)
