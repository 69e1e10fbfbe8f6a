"""Find the largest prefix of a captured program whose verification fits in memory.

A prefix ends with the result of a submodule, so that the module can be stopped at the same place.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx

from hpc3d.partition.capture import (
    Captured,
    Piece,
    carries_batch,
    gradient_bytes,
    is_trained,
    memory_of,
    shape_of,
    state_of,
    written_memory,
)
from hpc3d.partition.capturing.flat_export import modules_of
from hpc3d.partition.capturing.sample_layout import SampleLayouts
from hpc3d.partition.capturing.sample_relations import results_of
from hpc3d.partition.capturing.user_code import tensors
from hpc3d.partition.capturing.user_module import unwrapped

_VALUES = 2  # recorded values of the program, and activations saved by the module
_GRADIENTS = 3  # two results that are compared, and the result being computed


class Prefix(NamedTuple):
    """The first `pieces` of a captured program, which end with the `result` of a submodule.

    `path` is the path of the submodule. `weights` contains the names of the parameters and buffers
    of the pieces.
    """

    pieces: int
    path: str
    result: fx.Node | None
    weights: frozenset[str]

    def __str__(self) -> str:
        return f"up to the result of {self.path}, the largest prefix that fits in memory"

    def loss_of_module(
        self, module: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> torch.Tensor:
        """Call a module until the submodule returns; return the loss of the result."""

        def stop(submodule, args, result):
            raise _Stopped(result)

        hook = unwrapped(module).get_submodule(self.path).register_forward_hook(stop)
        try:
            module(*args, **kwargs)
        except _Stopped as stopped:
            like = self.result.meta["val"]
            found = [each for each in tensors(stopped.result) if each.dtype == like.dtype]
            return mean_of_squares(next(each for each in found if each.dim() == like.dim()))
        finally:
            hook.remove()
        raise AssertionError(f"the module does not call {self.path}")


class _Stopped(BaseException):
    """Exception that stops a forward pass, even if the module handles every Exception."""

    def __init__(self, result: Any) -> None:
        super().__init__()
        self.result = result


def mean_of_squares(result: torch.Tensor) -> torch.Tensor:
    """Return a weighted mean of squares; the weights do not depend on the row.

    Without weights, the loss of a normalized result would be constant.
    """
    wide = result.to(torch.promote_types(result.dtype, torch.float32))
    generator = torch.Generator().manual_seed(0)
    weights = torch.rand(wide.shape[1:], generator=generator, dtype=wide.dtype) + 0.5
    return (weights * wide.square()).mean()


def largest_prefix(
    captured: Captured, module: torch.nn.Module, samples: int, memory: float
) -> Prefix | None:
    """Return the largest prefix that can be verified on `samples` samples in `memory` bytes.

    Returns `None` if the entire program fits. If no prefix fits, the result has no pieces.
    """
    state = state_of(captured)
    memory -= sum(each.nbytes for each in state.values())
    ends, weights = _ends(captured, {name for name, _ in unwrapped(module).named_modules()}), set()
    found = Prefix(0, "", None, frozenset())
    for count, piece in enumerate(captured.pieces, 1):
        added = {*piece.weights} - weights
        weights |= added
        trained = [state[name] for name in added if is_trained(state[name])]
        memory -= _GRADIENTS * sum(map(gradient_bytes, trained))
        memory -= _VALUES * _value_bytes(piece, samples)
        if memory < 0:
            return found
        for node in reversed(piece.nodes):
            if node in ends and max(captured.readers.get(node, (0,))) >= count:
                found = Prefix(count, ends[node], node, frozenset(weights))
                break
    return None


def _value_bytes(piece: Piece, samples: int) -> int:
    results = [each for node in (*piece.nodes, *piece.copies) for each in results_of(node)]
    return sum(_bytes(each, samples) for each in results)


def _bytes(like, samples):
    return torch.Size(shape_of(like, samples)).numel() * like.dtype.itemsize


def _ends(captured: Captured, paths: set[str]) -> dict[fx.Node, str]:
    """Return the results of submodules that contain a row for each sample, with their paths."""
    layouts = SampleLayouts(captured.program.graph)
    results: dict[str, set[fx.Node]] = defaultdict(set)
    for path, node in _results(captured.program.graph):
        results[path].add(node)
    modified = _modified_later(captured.program.graph)
    outermost_last = sorted(results.items(), key=lambda each: -len(each[0]))
    return {
        node: path
        for path, (node, *others) in outermost_last
        if path in paths and not others and carries_batch(node)
        if node.meta["val"].is_floating_point() and layouts.outer(node) == 1
        if node not in modified
    }


def _results(graph: fx.Graph) -> Iterator[tuple[str, fx.Node]]:
    """Yield (path, node) for each tensor that operations outside of a submodule read."""
    inside = {node: {*modules_of(node)} for node in graph.nodes}
    for node in graph.nodes:
        for path in inside[node] if results_of(node) else ():
            if path and not all(path in inside[user] for user in node.users):
                yield path, node


def _modified_later(graph: fx.Graph) -> set[fx.Node]:
    """Return the operations whose results are modified in place by later operations."""
    found: set[fx.Node] = set()
    written: set[int] = set()
    for node in reversed(graph.nodes):
        if memory_of(node) & written:
            found.add(node)
        written |= written_memory(node)
    return found
