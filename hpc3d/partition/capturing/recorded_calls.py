"""Recorder of the arguments and results of a module's calls while the model runs on data.

The model runs once with a few samples and once with twice as many, to determine which sizes depend
on the number of samples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten
from torch.utils.flop_counter import FlopCounterMode


class CannotStayWhole(ValueError):
    """Error raised if the module at `path` cannot be called as one opaque operation."""

    def __init__(self, path: str, why: str) -> None:
        super().__init__(f"{path} cannot be one operation: {why}")
        self.path = path


class Like(NamedTuple):
    """Shape and dtype of a tensor; a size is a pair (a, b) that represents a * samples + b."""

    sizes: tuple[tuple[int, int], ...]
    dtype: torch.dtype

    def shape(self, samples: Any) -> list[Any]:
        return [a * samples + b if a else b for a, b in self.sizes]


class RecordedCall(NamedTuple):
    """Recorded call of a module.

    Arguments (`taken`) and results (`returned`) are stored as the leaves of nested tuples, lists
    and dicts. Tensors are represented by a Like, other leaves by their value. `written` contains
    the names of the buffers to which the call writes. `flop` (forward, backward) and `saved`, the
    bytes saved for backward, are per sample.
    """

    taken: TreeSpec
    taken_leaves: tuple[Any, ...]
    returned: TreeSpec
    returned_leaves: tuple[Any, ...]
    written: frozenset[str]
    flop: tuple[float, float]
    saved: float

    def arguments(self, values: Iterable[torch.Tensor]) -> tuple[tuple, dict]:
        """Return the positional and keyword arguments with these tensors filled in."""
        return _filled(values, self.taken_leaves, self.taken)

    def result(self, values: Iterable[torch.Tensor]) -> Any:
        """Return the result with these tensors filled in."""
        return _filled(values, self.returned_leaves, self.returned)

    def tensors_taken(self, *arguments: tuple | dict) -> list[torch.Tensor] | None:
        """Return the tensors in the arguments of a call.

        Returns None if the arguments differ from the recorded ones in structure or constants.
        """
        return _matching(arguments, self.taken_leaves, self.taken)

    def tensors_returned(self, result: Any) -> list[torch.Tensor] | None:
        """Return the tensors in a result.

        Returns None if the result differs from the recorded one in structure or constants.
        """
        return _matching(result, self.returned_leaves, self.returned)

    @property
    def values(self) -> list[Like]:
        """Shapes and dtypes of the tensor arguments."""
        return [leaf for leaf in self.taken_leaves if isinstance(leaf, Like)]

    @property
    def results(self) -> list[Like]:
        """Shapes and dtypes of the tensors in the result."""
        return [leaf for leaf in self.returned_leaves if isinstance(leaf, Like)]


def _filled(values, leaves, spec):
    left = iter(values)
    return tree_unflatten([next(left) if isinstance(x, Like) else x for x in leaves], spec)


def _matching(tree, leaves, spec):
    found, given = tree_flatten(tree)
    if given != spec:
        return None
    alike = all(
        isinstance(one, torch.Tensor)
        if isinstance(other, Like)
        else type(one) is type(other) and one == other
        for one, other in zip(found, leaves, strict=True)
    )
    return _tensors_in(found) if alike else None


class _Seen(NamedTuple):
    """Call recorded in one run. `flop` and `saved` are summed over the samples of the run."""

    taken: TreeSpec
    taken_leaves: tuple[Any, ...]
    returned: TreeSpec
    returned_leaves: tuple[Any, ...]
    written: frozenset[str]
    flop: tuple[int, int]
    saved: int


def recorded_calls(
    model: torch.nn.Module,
    run: Callable[[int], object],
    samples: int,
    paths: Iterable[str],
) -> dict[str, list[RecordedCall]]:
    """Run the model and return the calls of the modules at these paths, in the order of execution.

    `run(count)` runs the model on `count` samples. Raises CannotStayWhole if a module has side
    effects other than writing to its buffers.
    """
    low, high = (_seen(model, run, count, paths) for count in (samples, 2 * samples))
    return {path: [*_combined(path, low[path], high[path], samples)] for path in paths}


def _seen(model, run, count, paths):
    calls: dict[str, list[_Seen]] = {path: [] for path in paths}
    with _watched(model, calls), torch.enable_grad():
        run(count)
    return calls


@contextmanager
def _watched(model: torch.nn.Module, calls: Mapping[str, list[_Seen]]) -> Iterator[None]:
    parts = {path: model.get_submodule(path) for path in calls}
    own = {path: vars(part).get("forward") for path, part in parts.items()}
    for path, part in parts.items():
        part.forward = _Watch(path, part, calls[path])
    try:
        yield
    finally:
        for path, part in parts.items():
            del part.forward
            if own[path] is not None:
                part.forward = own[path]


def _combined(path, low, high, samples):
    if len(low) != len(high):
        raise CannotStayWhole(path, "the number of its calls depends on the number of samples")
    for few, many in zip(low, high, strict=True):
        if (few.taken, few.returned) != (many.taken, many.returned):
            why = "the structure of its arguments or results depends on the number of samples"
            raise CannotStayWhole(path, why)
        forward, backward = (count / (2 * samples) for count in many.flop)
        yield RecordedCall(
            many.taken,
            _combined_leaves(path, few.taken_leaves, many.taken_leaves, samples),
            many.returned,
            _combined_leaves(path, few.returned_leaves, many.returned_leaves, samples),
            few.written | many.written,
            (forward, backward),
            many.saved / (2 * samples),
        )


def _combined_leaves(path, few, many, samples):
    return tuple(_combined_leaf(path, *each, samples) for each in zip(few, many, strict=True))


def _combined_leaf(path, few, many, samples):
    """Combine a leaf of two runs, with `samples` and 2 * `samples` samples.

    Two tensors are combined into a Like; other leaves must be equal.
    """
    if not isinstance(few, torch.Tensor) or not isinstance(many, torch.Tensor):
        if type(few) is not type(many) or few != many:
            why = f"an argument is {few!r:.40}, but {many!r:.40} for more samples"
            raise CannotStayWhole(path, why)
        return few
    if few.dim() != many.dim() or few.dtype != many.dtype:
        why = "the type or the dimensions of a tensor depend on the number of samples"
        raise CannotStayWhole(path, why)
    sizes = []
    for one, other in zip(few.shape, many.shape):
        a, rest = divmod(other - one, samples)
        if rest or a < 0:
            why = "the size of a tensor depends on the values of another tensor"
            raise CannotStayWhole(path, why)
        sizes.append((a, one - a * samples))
    return Like(tuple(sizes), few.dtype)


class _Watch:
    """Replacement of a module's `forward` that records its calls."""

    def __init__(self, path, part, calls):
        self.path, self.part, self.calls, self.forward = path, part, calls, part.forward

    def __call__(self, *args, **kwargs):
        leaves, taken = tree_flatten((args, kwargs))
        self._check(leaves, _CONSTANTS, "takes")
        leaves = [_cut_off(leaf) for leaf in leaves]
        before, kept = _ModuleState(self.part, leaves), {}
        args, kwargs = tree_unflatten(leaves, taken)
        keep = saved_tensors_hooks(lambda value: _kept(kept, value), lambda value: value)
        with FlopCounterMode(display=False) as counter, keep:
            result = self.forward(*args, **kwargs)
        found, returned = tree_flatten(result)
        self._check(found, type(None), "returns")
        written = self._written(before, _ModuleState(self.part, leaves))
        own = _tensors_in(leaves) + [tensor for tensor, _ in before.held.values()]
        self._check_origins(_tensors_in(found), own)
        for each in own:
            kept.pop(_storage(each), None)
        saved = sum(each.untyped_storage().nbytes() for each in kept.values())
        flop = counter.get_total_flops(), _backward(_tensors_in(found), own)
        shapes = (tuple(map(_shape_of, each)) for each in (leaves, found))
        taken_leaves, returned_leaves = shapes
        self.calls.append(
            _Seen(taken, taken_leaves, returned, returned_leaves, written, flop, saved)
        )
        return result

    def _check(self, leaves, constants, how):
        for leaf in leaves:
            if not isinstance(leaf, torch.Tensor | constants):
                raise CannotStayWhole(self.path, f"it {how} a {type(leaf).__name__}")

    def _written(self, before, after):
        """Return the names of the buffers that a call has modified.

        Raises CannotStayWhole if it has other side effects.
        """
        changed = {
            key
            for key in before.attributes.keys() | after.attributes.keys()
            if before.attributes.get(key) != after.attributes.get(key)
        }
        if changed:
            raise CannotStayWhole(self.path, f"it changes its attribute {min(changed)}")
        if before.versions != after.versions:
            raise CannotStayWhole(self.path, "it writes to one of its inputs")
        if not torch.equal(before.random, after.random):
            raise CannotStayWhole(self.path, "it draws random numbers")
        written = set()
        for name, (tensor, version) in before.held.items():
            now, later = after.held.get(name, (None, 0))
            trained = isinstance(tensor, torch.nn.Parameter)
            if now is not tensor or (later != version and trained):
                raise CannotStayWhole(
                    self.path, f"it replaces the buffer or changes the parameter {name}"
                )
            if later != version or not (trained or torch.equal(tensor, before.buffers[name])):
                written.add(name)
        return frozenset(written)

    def _check_origins(self, found, own):
        """Raise CannotStayWhole if gradients flow to a parameter of another module."""
        known, todo = {id(each) for each in own}, [each.grad_fn for each in found]
        seen = {each.grad_fn for each in own}
        while todo:
            node = todo.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            if hasattr(node, "variable") and id(node.variable) not in known:
                raise CannotStayWhole(self.path, "it reads a parameter of another module")
            todo += [source for source, _ in node.next_functions]


_CONSTANTS = int | float | bool | str | torch.dtype | torch.device | type(None)


class _ModuleState:
    """Snapshot of a module before or after a call, to detect side effects."""

    def __init__(self, part, leaves):
        self.attributes = {
            f"{path}.{key}".removeprefix("."): _identity(value)
            for path, each in part.named_modules()
            for key, value in vars(each).items()
            if key not in _OF_MODULES
        }
        held = [*part.named_parameters(), *part.named_buffers()]
        self.held = {name: (tensor, tensor._version) for name, tensor in held}
        # BatchNorm does not increment the versions of its running averages.
        self.buffers = {name: tensor.clone() for name, tensor in part.named_buffers()}
        self.versions = [each._version for each in _tensors_in(leaves)]
        self.random = torch.get_rng_state()


_OF_MODULES = {*vars(torch.nn.Module()), "forward"}


def _identity(value):
    """Return a fingerprint that changes if an attribute is replaced or a container grows."""
    return id(value), len(value) if isinstance(value, list | dict | set) else 0


def _tensors_in(leaves: Sequence[Any]) -> list[torch.Tensor]:
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def _cut_off(leaf):
    """Return a writable copy of a tensor that is detached from preceding operations."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    return leaf.detach().requires_grad_(leaf.requires_grad).clone()


def _shape_of(leaf):
    """Return a meta tensor with the same shape and dtype; return other leaves unchanged."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    return torch.empty(leaf.shape, dtype=leaf.dtype, device="meta")


def _storage(tensor):
    return tensor.untyped_storage()._cdata


def _kept(kept, value):
    kept[_storage(value)] = value
    return value


def _backward(found, own):
    """Return the number of floating-point operations of the backward pass."""
    ends = [each for each in found if each.requires_grad]
    starts = [each for each in own if each.requires_grad]
    if not ends or not starts:
        return 0
    with FlopCounterMode(display=False) as counter:
        ones = [torch.ones_like(each) for each in ends]
        torch.autograd.grad(ends, starts, ones, allow_unused=True)
    return counter.get_total_flops()
