"""Split each step's batch by rows, first into microbatches and then over replicas."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch.utils._pytree import tree_leaves

from hpc3d.partition.capture import Captured, carries_batch, shape_of
from hpc3d.partition.execution.loss_terms import LossTerms
from hpc3d.partition.shared_arrays import device_of

if TYPE_CHECKING:
    from torch import fx

    from hpc3d.comm.communicator import Communicator
    from hpc3d.comm.mesh import Mesh


class SampleRows(NamedTuple):
    """This rank's samples of one microbatch in a training step or an evaluation batch.

    The samples have the indices `first` to `first + samples` (exclusive) in the batch. `inputs`
    maps the model's input nodes to values, and `batch_values` the names of operations to values of
    the full batch (see LossTerms). The gradient is computed for the sum of the samples' losses,
    multiplied by `scale`. `training` is False in an evaluation.
    """

    step: int
    first: int
    samples: int
    inputs: Mapping[fx.Node, Any]
    scale: float
    batch_values: Mapping[str, torch.Tensor] = MappingProxyType({})
    training: bool = True


def rows_of(batch: int, microbatches: int, replicas: int, replica: int) -> Iterator[range]:
    """Yield the range of sample indices that a replica processes in each microbatch.

    The samples are split as evenly as possible.
    """
    for number in range(microbatches):
        first, stop = (batch * end // microbatches for end in (number, number + 1))
        rows = stop - first
        yield range(first + rows * replica // replicas, first + rows * (replica + 1) // replicas)


def flat_inputs(captured: Captured, inputs: tuple | dict) -> list[Any]:
    """Return the inputs of a model as a flat list in the order of `captured.inputs`.

    Raises ValueError if the number or the names of the inputs do not match the model.
    """
    wanted = ", ".join(node.name for node in captured.inputs)
    args, kwargs = captured.program.call_spec.in_spec.children()
    spec, others = (kwargs, args) if isinstance(inputs, dict) else (args, kwargs)
    if others.num_children:
        kind = "tuple" if isinstance(inputs, dict) else "dict"
        given = type(inputs).__name__
        raise ValueError(f"the inputs are a {given}; return a {kind}, as the factory does")
    flat = tree_leaves(_ordered(inputs, spec, wanted))
    if len(flat) != len(captured.inputs):
        raise ValueError(f"{len(flat)} inputs were given, but the model takes {wanted}")
    return flat


def _ordered(inputs, spec, wanted):
    """Return nested inputs, in which the values of a dict are in the order of the captured one."""
    nested = isinstance(inputs, dict | list | tuple) and spec.num_children
    if nested and isinstance(inputs, dict) != isinstance(spec.context, list):
        kind = "dict" if isinstance(spec.context, list) else "tuple or list"
        given = type(inputs).__name__
        raise ValueError(
            f"the inputs contain a {given} instead of a {kind}; return the same containers as the "
            f"factory, for the inputs {wanted}"
        )
    if isinstance(inputs, dict) and isinstance(spec.context, list):
        if {*inputs} != {*spec.context}:
            raise ValueError(
                f"the given inputs are {', '.join(map(str, inputs)) or 'none'}, but the model "
                f"takes {wanted}"
            )
        inputs = [inputs[name] for name in spec.context]
    if isinstance(inputs, list | tuple) and len(inputs) == spec.num_children:
        return [_ordered(each, spec.child(n), wanted) for n, each in enumerate(inputs)]
    return inputs


class SampleLoader:
    """Loader that broadcasts batches from rank 0 and splits them by rows.

    `batches(step)` returns the flat inputs of the model; it is `None` on all ranks except rank 0.
    All tensors with a batch dimension have `samples` samples. `terms` describes the losses that
    average over valid targets. `read` contains the inputs that the rank's stages read; the rank
    stores only its own rows of these inputs. `training` is False in an evaluation.
    """

    asynchronous = False

    def __init__(
        self,
        mesh: Mesh,
        terms: LossTerms,
        batches: Callable[[int], list[Any]] | None,
        rows: Iterable[range],
        samples: int,
        read: Collection[fx.Node],
        training: bool = True,
    ) -> None:
        self.mesh, self.terms, self.batches, self.rows = mesh, terms, batches, [*rows]
        self.training = training
        self.samples, self.read = samples, read
        self.valid: dict[int, int] = {}
        self.device = device_of(mesh.pool)

    def fetch(self, number: int, factor: float = 1.0) -> dict[int, SampleRows]:
        """Return a dict that maps microbatch indices to this rank's samples in step `number`.

        The loss is the mean over all samples of the step, multiplied by `factor`.
        """
        self.valid, nodes = {number: self.samples}, self.terms.captured.inputs
        given = self.batches(number) if self.batches else [None] * len(nodes)
        batch_values = self._batch_values(given)
        own: list[dict[fx.Node, Any]] = [{} for _ in self.rows]
        for node, value in zip(nodes, given, strict=True):
            full = self._broadcast(node, value)
            for rows, inputs in zip(self.rows, own, strict=True):
                if node in self.read:
                    value = rows_for(node, full, rows)
                    carried = isinstance(value, torch.Tensor)
                    inputs[node] = value.to(self.device) if carried else value
        scale = factor / self.samples
        return {
            index: SampleRows(
                number, rows.start, len(rows), inputs, scale, batch_values, self.training
            )
            for index, (rows, inputs) in enumerate(zip(self.rows, own, strict=True))
        }

    def _batch_values(self, given):
        """Compute the values that depend on the full batch on rank 0, and broadcast them."""
        sizes, mine = self.terms.sizes, np.empty(0)
        if self.batches and sizes:
            found = self.terms.values(given, self.samples)
            mine = torch.cat([found[name].reshape(-1) for name in sizes]).numpy()
        shared = np.array(self.mesh.world.broadcast(mine, 0).wait()) if sizes else mine
        split = torch.from_numpy(shared).split([*sizes.values()])
        return dict(zip(sizes, split, strict=True))

    def _broadcast(self, node, value):
        """Broadcast an input from rank 0 and return its value; constants are not sent."""
        like = node.meta["val"]
        if not isinstance(like, torch.Tensor):
            return like
        return shared_by_root(self.mesh.world, value, shape_of(like, self.samples), like.dtype)


def shared_by_root(
    world: Communicator,
    value: torch.Tensor | None,
    shape: Sequence[int],
    dtype: torch.dtype,
    root: int = 0,
) -> torch.Tensor:
    """Broadcast a tensor from rank `root`, the only rank that passes a `value`.

    The result may share memory with `value`, so callers must not write to it.
    """
    if 0 in shape:
        return torch.empty(*shape, dtype=dtype)
    block = np.empty(0, np.uint8)
    if value is not None:
        block = value.contiguous().reshape(-1).view(torch.uint8).numpy()
    shared = world.broadcast(block, root).wait()
    shared = shared if shared.flags.writeable else shared.copy()
    return torch.from_numpy(shared).view(dtype).view(shape)


def rows_for(node: fx.Node, value: Any, rows: range) -> Any:
    """Return a copy of the samples `rows` of a model input; constants are returned unchanged."""
    if carries_batch(node):
        return value[rows.start : rows.stop].clone()
    return value.clone() if isinstance(value, torch.Tensor) else value
