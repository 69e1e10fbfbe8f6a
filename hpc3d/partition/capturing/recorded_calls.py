"""Record the arguments and results of module calls while the model runs on real data.

The model runs once with a few samples and once with twice as many samples, to determine which
tensor sizes depend on the number of samples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten
from torch.utils.flop_counter import FlopCounterMode

from hpc3d.partition.capturing.user_code import emptied, random_states
from hpc3d.partition.capturing.user_module import user_attributes

_NOT_RANDOM = (
    "select with torch.where instead of an if, or disable the random choice (in transformers, set "
    "the rate of LayerDrop to 0)"
)


class CannotBeOpaque(ValueError):
    """Error raised if the module at `path` cannot be converted to one opaque operation."""

    def __init__(self, path: str, why: str) -> None:
        super().__init__(f"{path} cannot be converted to an opaque operation: {why}")
        self.path = path


class Like(NamedTuple):
    """Shape and dtype of a tensor; a dimension (a, b) in `sizes` has size a * samples + b."""

    sizes: tuple[tuple[int, int], ...]
    dtype: torch.dtype

    def shape(self, samples: Any) -> list[Any]:
        return [a * samples + b if a else b for a, b in self.sizes]


class NestedValues(NamedTuple):
    """Arguments or result of a call, as nested tuples, lists and dicts.

    In `leaves`, a tensor is represented by a Like, and any other leaf by its value.
    """

    spec: TreeSpec
    leaves: tuple[Any, ...]

    @property
    def likes(self) -> list[Like]:
        """Shapes and dtypes of all tensors in `leaves`."""
        return [leaf for leaf in self.leaves if isinstance(leaf, Like)]

    def filled(self, tensors: Iterable[torch.Tensor]) -> Any:
        """Return the nested values with the given tensors substituted for the recorded ones."""
        left = iter(tensors)
        leaves = [next(left) if isinstance(leaf, Like) else leaf for leaf in self.leaves]
        return tree_unflatten(leaves, self.spec)

    def tensors_in(self, values: Any) -> list[torch.Tensor] | None:
        """Return the tensors in `values`, the arguments or results of another call.

        Returns `None` if `values` has a different structure or different non-tensor leaves.
        """
        found, spec = tree_flatten(values)
        if spec != self.spec:
            return None
        equal = all(
            isinstance(one, torch.Tensor)
            if isinstance(other, Like)
            else type(one) is type(other) and one == other
            for one, other in zip(found, self.leaves, strict=True)
        )
        return _tensors_in(found) if equal else None


class RecordedCall(NamedTuple):
    """Recorded call of a module.

    `taken` contains the positional and keyword arguments, `returned` the result, and `written` the
    names of the buffers to which the call writes. `flop` contains the FLOPs of the forward and
    backward passes, and `saved` is the number of bytes saved for the backward pass; both are per
    sample. Before the calls of the two runs are combined, tensors are represented by meta tensors,
    and `flop` and `saved` are totals for all samples of a run.
    """

    taken: NestedValues
    returned: NestedValues
    written: frozenset[str]
    flop: tuple[float, float]
    saved: float


def recorded_calls(
    model: torch.nn.Module,
    run: Callable[[int], object],
    samples: int,
    paths: Iterable[str],
) -> dict[str, list[RecordedCall]]:
    """Run the model and return a dict from module path to the recorded calls of the module.

    The calls are in the order of execution. `run(count)` runs the model on `count` samples. Raises
    CannotBeOpaque if a module has side effects other than writing to its buffers.
    """
    low, high = (_recorded(model, run, count, paths) for count in (samples, 2 * samples))
    return {path: [*_combined(path, low[path], high[path], samples)] for path in paths}


def _recorded(model, run, count, paths):
    calls: dict[str, list[RecordedCall]] = {path: [] for path in paths}
    modules = {path: model.get_submodule(path) for path in calls}
    own = {path: vars(module).get("forward") for path, module in modules.items()}
    for path, module in modules.items():
        module.forward = _Watch(path, module, calls[path])
    try:
        with torch.enable_grad():
            run(count)
    finally:
        for path, module in modules.items():
            del module.forward
            if own[path] is not None:
                module.forward = own[path]
    return calls


def _combined(path, low, high, samples):
    if len(low) != len(high):
        raise CannotBeOpaque(
            path, "the number of calls to the module depends on the number of samples"
        )
    for few, many in zip(low, high, strict=True):
        if (few.taken.spec, few.returned.spec) != (many.taken.spec, many.returned.spec):
            why = "the nesting of the arguments or results depends on the number of samples"
            raise CannotBeOpaque(path, why)
        forward, backward = (count / (2 * samples) for count in many.flop)
        yield RecordedCall(
            _combined_values(path, few.taken, many.taken, samples),
            _combined_values(path, few.returned, many.returned, samples),
            few.written | many.written,
            (forward, backward),
            many.saved / (2 * samples),
        )


def _combined_values(path, few, many, samples):
    leaves = zip(few.leaves, many.leaves, strict=True)
    return many._replace(leaves=tuple(_combined_leaf(path, *each, samples) for each in leaves))


def _combined_leaf(path, few, many, samples):
    """Combine a leaf of two runs, one on `samples` and one on 2 * `samples` samples.

    Two tensors are combined into a Like. Leaves that are not tensors must be equal.
    """
    if not isinstance(few, torch.Tensor) or not isinstance(many, torch.Tensor):
        if type(few) is not type(many) or few != many:
            why = (
                f"an argument or result changes from {few!r:.40} to {many!r:.40} if the number of "
                "samples is doubled"
            )
            raise CannotBeOpaque(path, why)
        return few
    if few.dim() != many.dim() or few.dtype != many.dtype:
        why = "the dtype or dimension count of a tensor depends on the number of samples"
        raise CannotBeOpaque(path, why)
    sizes = []
    for one, other in zip(few.shape, many.shape):
        a, rest = divmod(other - one, samples)
        if rest or a < 0:
            why = "the size of a tensor depends on the values of another tensor"
            raise CannotBeOpaque(path, why)
        sizes.append((a, one - a * samples))
    return Like(tuple(sizes), few.dtype)


class _Watch:
    """Replacement for a module's `forward` method that records the arguments and results."""

    def __init__(self, path, module, calls):
        self.path, self.module, self.calls, self.forward = path, module, calls, module.forward

    def __call__(self, *args, **kwargs):
        leaves, spec = tree_flatten((args, kwargs))
        self._check(leaves, _CONSTANTS, "takes")
        leaves = [_detached_copy(leaf) for leaf in leaves]
        before, saved_tensors = _ModuleState(self.module, leaves), {}
        args, kwargs = tree_unflatten(leaves, spec)

        def keep(value):
            saved_tensors[storage_of(value)] = value
            return value

        hooks = saved_tensors_hooks(keep, lambda value: value)
        with FlopCounterMode(display=False) as counter, hooks:
            result = self.forward(*args, **kwargs)
        found, found_spec = tree_flatten(result)
        self._check(found, type(None), "returns")
        written = self._written(before, _ModuleState(self.module, leaves))
        own = _tensors_in(leaves) + [tensor for tensor, _ in before.held.values()]
        self._check_origins(_tensors_in(found), own)
        for each in own:
            saved_tensors.pop(storage_of(each), None)
        saved = sum(each.untyped_storage().nbytes() for each in saved_tensors.values())
        flop = counter.get_total_flops(), _backward_flop(_tensors_in(found), own)
        taken = NestedValues(spec, tuple(emptied(leaf, "meta") for leaf in leaves))
        returned = NestedValues(found_spec, tuple(emptied(leaf, "meta") for leaf in found))
        self.calls.append(RecordedCall(taken, returned, written, flop, saved))
        return result

    def _check(self, leaves, constants, how):
        for leaf in leaves:
            if not isinstance(leaf, torch.Tensor | constants):
                raise CannotBeOpaque(self.path, f"the module {how} a {type(leaf).__name__}")

    def _written(self, before, after):
        """Return the names of the buffers that a call has modified.

        Raises CannotBeOpaque if the call has other side effects.
        """
        changed = {
            key
            for key in before.attributes.keys() | after.attributes.keys()
            if before.attributes.get(key) != after.attributes.get(key)
        }
        if changed:
            raise CannotBeOpaque(self.path, f"the module changes its attribute {min(changed)}")
        if before.versions != after.versions:
            raise CannotBeOpaque(self.path, "the module writes to one of its inputs")
        if before.random.advanced():
            raise CannotBeOpaque(self.path, f"the module draws random numbers; {_NOT_RANDOM}")
        written = set()
        for name, (tensor, version) in before.held.items():
            now, later = after.held.get(name, (None, 0))
            trained = isinstance(tensor, torch.nn.Parameter)
            if now is not tensor or (later != version and trained):
                raise CannotBeOpaque(
                    self.path, f"the module replaces the buffer or changes the parameter {name}"
                )
            if later != version or not (trained or torch.equal(tensor, before.buffers[name])):
                written.add(name)
        return frozenset(written)

    def _check_origins(self, found, own):
        known, todo = {id(each) for each in own}, [each.grad_fn for each in found]
        seen = {each.grad_fn for each in own}
        while todo:
            node = todo.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            if hasattr(node, "variable") and id(node.variable) not in known:
                raise CannotBeOpaque(self.path, "the module reads a parameter of another module")
            todo += [source for source, _ in node.next_functions]


_CONSTANTS = int | float | bool | str | torch.dtype | torch.device | type(None)


class _ModuleState:
    """Snapshot of a module before or after a call, to detect side effects."""

    def __init__(self, module, leaves):
        self.attributes = {
            f"{path}.{key}".removeprefix("."): _identity(value)
            for path, each in module.named_modules()
            for key, value in user_attributes(each).items()
        }
        held = [*module.named_parameters(), *module.named_buffers()]
        self.held = {name: (tensor, tensor._version) for name, tensor in held}
        # BatchNorm does not increment the version counters of its running averages, so writes to
        # buffers are detected by comparing copies.
        self.buffers = {name: tensor.clone() for name, tensor in module.named_buffers()}
        self.versions = [each._version for each in _tensors_in(leaves)]
        self.random = random_states()


def _identity(value):
    """Return a fingerprint of an attribute: its object id and, for a container, its length."""
    return id(value), len(value) if isinstance(value, list | dict | set) else 0


def _tensors_in(leaves: Sequence[Any]) -> list[torch.Tensor]:
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def _detached_copy(leaf):
    """Return a copy of a tensor that can be modified in place and is detached from the model."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    return leaf.detach().requires_grad_(leaf.requires_grad).clone()


def storage_of(tensor: torch.Tensor) -> int:
    """Return an id of the tensor's storage; tensors that share memory have the same id."""
    return tensor.untyped_storage()._cdata


def _backward_flop(found, own):
    """Return the FLOPs of the backward pass of a call.

    The backward pass computes gradients of the call's results `found` with respect to the tensors
    in `own` (its arguments, and the weights and buffers of the module).
    """
    results = [each for each in found if each.requires_grad]
    operands = [each for each in own if each.requires_grad]
    if not results or not operands:
        return 0
    with FlopCounterMode(display=False) as counter:
        ones = [torch.ones_like(each) for each in results]
        torch.autograd.grad(results, operands, ones, allow_unused=True)
    return counter.get_total_flops()
