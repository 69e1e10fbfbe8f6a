"""Give every tensor in a model's result a name, and choose the loss among the named tensors.

torch.export only accepts results that consist of tensors, tuples, lists and dicts. NamedOutputs
replaces a result of any type by a dict from name to tensor. A name is the path of the tensor in
the result, such as `loss` or `hidden_states.0`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from inspect import Parameter, Signature, signature
from typing import Any, NamedTuple

import torch

_MAX_LISTED = 80  # maximum length of a list of names in an error message


class Output(NamedTuple):
    """Tensor in a model's result.

    `trained` contains the names of the parameters that receive a gradient from this output; a
    shared parameter has several names. `problem` explains why this output cannot be the loss; it
    is empty if the output can be the loss.
    """

    trained: frozenset[str]
    problem: str


class NamedOutputs:
    """Forward hook that makes a model return a dict from name to tensor.

    `outputs` describes the tensors returned by the last call, by name. `keywords` are the names of
    the keyword arguments, which replace `**kwargs` in the signature of the model's `forward`.
    """

    def __init__(self, model: torch.nn.Module, keywords: Iterable[str] = ()) -> None:
        called = model.forward
        self.outputs: dict[str, Output] = {}

        @functools.wraps(called)
        def forward(*args: Any, **kwargs: Any) -> Any:
            return called(*args, **kwargs)

        forward.__signature__ = _without_var_keyword(signature(called), keywords)
        model.forward = forward
        model.register_forward_hook(self._named)  # runs after all other hooks of the model

    def _named(self, model, args, result):
        found = dict(named_tensors(result))
        names = [(id(each), name) for name, each in _parameters(model)]
        self.outputs = {name: _described(tensor, names) for name, tensor in found.items()}
        return found

    def loss(self) -> str | None:
        """Return the name of the loss, or `None` if no output can be the loss.

        An output named `loss` takes precedence over the first scalar. If an output named `loss`
        has a gradient but is not a scalar, there is no loss.
        """
        named = [name for name in self.outputs if name.rpartition(".")[2] == "loss"]
        if any(self.outputs[name].trained for name in named):
            named = [name for name in named if self.outputs[name].trained]
        else:
            named = [*self.outputs]
        return next((name for name in named if not self.outputs[name].problem), None)

    def trained(self, loss: str | None) -> frozenset[str]:
        """Return the names of the parameters that receive a gradient from the loss.

        If `loss` is `None`, the gradients of all outputs are considered.
        """
        names = self.outputs if loss is None else [loss]
        return frozenset(each for name in names for each in self.outputs[name].trained)

    def without_loss(self) -> str:
        """Explain why the model has no loss."""
        shown = "; ".join(
            f"{output_name(name)} {output.problem}" for name, output in self.outputs.items()
        )
        shown = shown if len(shown) <= _MAX_LISTED else f"{shown[:_MAX_LISTED]} ..."
        return (
            "the model must return its loss as a scalar that requires a gradient "
            f"({shown or 'it returns no tensor'})"
        )


def output_name(name: str) -> str:
    """Return the name of an output as shown to the user."""
    return f"output '{name}'" if name else "the returned tensor"


def _without_var_keyword(known: Signature, keywords: Iterable[str]) -> Signature:
    """Replace the parameter `**kwargs` by the given keywords, because torch.export rejects it."""
    explicit = [each for each in known.parameters.values() if each.kind is not each.VAR_KEYWORD]
    if len(explicit) < len(known.parameters):
        names = [name for name in keywords if name not in known.parameters]
        explicit += [Parameter(name, Parameter.KEYWORD_ONLY) for name in names]
    return known.replace(parameters=explicit)


def named_tensors(result: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, tensor) for each tensor in the result of a model.

    The attributes of an object of unknown type are named only if the object is the entire result.
    """
    known = isinstance(result, torch.Tensor | tuple | list) or _fields(result) is not None
    yield from _nested("", result if known else getattr(result, "__dict__", {}))


def _nested(name: str, value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield name, value
        return
    for key, each in (_fields(value) or {}).items():
        yield from _nested(f"{name}.{key}" if name else str(key), each)


def _fields(value: Any) -> Mapping[Any, Any] | None:
    """Return the items of a tuple, list, mapping or dataclass, otherwise `None`."""
    if isinstance(value, Mapping):
        return value
    if isinstance(value, tuple | list):
        names = getattr(value, "_fields", range(len(value)))
        return dict(zip(names, value, strict=True))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {
            field.name: getattr(value, field.name, None) for field in dataclasses.fields(value)
        }
    return None


def _parameters(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
    return model.named_parameters(remove_duplicate=False)


def _described(tensor: torch.Tensor, parameters: Sequence[tuple[int, str]]) -> Output:
    """Return the Output for a tensor; `parameters` lists the id and name of each parameter."""
    leaves = {*_leaves(tensor)}
    trained = frozenset(name for number, name in parameters if number in leaves)
    if tensor.dim():
        problem = f"has the shape {[*tensor.shape]}"
    elif not tensor.is_floating_point():
        problem = f"has the data type {str(tensor.dtype).removeprefix('torch.')}"
    else:
        problem = "" if trained else "requires no gradient"
    return Output(trained, problem)


def _leaves(tensor: torch.Tensor) -> Iterator[int]:
    """Yield the ids of the leaf tensors to which the backward pass of `tensor` adds a gradient."""
    seen, todo = set(), [tensor.grad_fn]
    if tensor.requires_grad and tensor.grad_fn is None:
        yield id(tensor)
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            yield id(node.variable)
        todo += [source for source, _ in node.next_functions]
