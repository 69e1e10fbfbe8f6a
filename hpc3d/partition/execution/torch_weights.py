"""Parameters and buffers of a rank's model chunks, as torch tensors stored in hpc3d's arrays.

A parameter and its gradient are views of arrays in hpc3d.model.parameters. torch accumulates the
gradient (in float32 if the parameter has 16 bits); hpc3d performs the gradient reduction,
clipping, updates and checkpointing. Buffers and parameters without a gradient are stored as frozen
Parameters, each in its own data type.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from copy import copy
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.graph import Node, get_gradient_edge

from hpc3d.checkpoints.block_slices import stored_shape
from hpc3d.comm.stage_mesh import TENSOR
from hpc3d.model.layers import immediately
from hpc3d.partition.capture import Captured, is_trained, state_of
from hpc3d.partition.capturing.user_module import attribute_tensors
from hpc3d.partition.shared_arrays import (
    array_of,
    array_type,
    device_of,
    tensor_of,
)
from hpc3d.partition.tensor_parallel.shards import SplitDim, own_part
from hpc3d.tensor.layout import Layout

if TYPE_CHECKING:
    from hpc3d.comm.communicator import Communicator
    from hpc3d.model.parameters import Parameter, Parameters


def stored_tensors(captured: Captured) -> dict[str, Any]:
    """Describe the tensors that a checkpoint of a model contains.

    In the returned dict, `shapes` maps the names of parameters and buffers to shapes, `frozen`
    lists the names of the tensors that are not trained, and `aliases` maps each alternative name
    of a tensor to the name under which the tensor is stored.
    """
    held = captured.program.state_dict
    state = {name: like for name, like in state_of(captured).items() if name in held}
    names = {id(like): name for name, like in state.items()}
    others = {other: names.get(id(like)) for other, like in held.items() if other not in state}
    return {
        "shapes": {name: [*like.shape] for name, like in state.items()},
        "frozen": [name for name, like in state.items() if not is_trained(like)],
        "aliases": {other: name for other, name in others.items() if name},
    }


def values_in(module: torch.nn.Module, captured: Captured) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, tensor) for each tensor listed by `state_of`, with values from `module`."""
    held = dict(attribute_tensors(module))
    held |= dict(module.named_parameters(remove_duplicate=False))
    held |= dict(module.named_buffers(remove_duplicate=False))
    for name in captured.weights.values():
        found = held.get(captured.attributes.get(name, name))
        # A constant that is not an attribute of the module was created by the forward pass.
        yield name, (captured.program.constants[name] if found is None else found).detach()


class TorchWeights:
    """Weights of one rank.

    `tensors` maps names to torch tensors, and `items` maps names to the Parameters that store the
    tensors; constants have no Parameter. `shared` maps the name of each weight that is replicated
    on other stages to True if this stage owns the weight. `splits` contains the placements of
    weights that are split over the tensor-parallel `ranks`; their tensors are the rank's shards.
    During the backward pass, torch calls `completed(name)` after it has added its last
    contribution to the gradient of the parameter `name`. `defer(function, *args)` calls a function
    that adds a gradient contribution, either immediately or later.
    """

    def __init__(
        self,
        captured: Captured,
        parameters: Parameters,
        names: Iterable[str],
        shared: Mapping[str, bool],
        splits: Mapping[str, SplitDim] = MappingProxyType({}),
    ) -> None:
        self.ranks, self.splits = parameters.mesh.comm(TENSOR), splits
        self.like = state_of(captured)
        self.items: dict[str, Parameter] = {}
        self.tensors: MutableMapping[str, torch.Tensor] = {}
        self.completed: Callable[[str], object] = lambda name: None  # set in backward passes
        self.defer: Callable[..., None] = immediately
        self._accumulators: list[Node] = []  # references that keep the hooks alive
        self.pool = parameters.mesh.pool
        self.device = device_of(self.pool)
        for name in names:
            if name in captured.program.state_dict:
                self.items[name] = self._added(parameters, name, shared)
            else:
                like = self.like[name]
                self.tensors[name] = torch.empty(like.shape, dtype=like.dtype, device=self.device)

    def _added(self, parameters, name, shared):
        like = self.like[name]
        shape, how = stored_shape(like.shape), {"counted": shared.get(name, True), "unit": name}
        if not is_trained(like):
            how |= {"frozen": True, "dtype": array_type(like.dtype)}
        elif name in shared:
            how |= {"completed_last": True, "decay": like.dim() > 1}
        else:
            how |= {"partial": ("d",), "decay": like.dim() > 1}
        split, axes = self.splits.get(name), [""] * len(shape)
        if split:
            axes[split.dim] = TENSOR
        sections = split.sections if split and split.sections[1:] else ()
        return parameters.add(name, shape, Layout(*axes, sections=sections), **how)

    def bind(self) -> None:
        """Create the tensors as views of the Parameters' arrays, which must already exist."""
        for name, item in self.items.items():
            like, shape = self.like[name], [*self.like[name].shape]
            if name in self.splits:
                shape[self.splits[name].dim] //= self.ranks.size
            value = tensor_of(item.value, like.dtype).view(shape)
            self.tensors[name] = value if item.frozen else self._trained(name, item, value)

    def _trained(self, name, item, value):
        tensor, wide = torch.nn.Parameter(value), torch.promote_types(value.dtype, torch.float32)
        if wide != value.dtype:
            tensor.grad_dtype = wide
        tensor.grad = tensor_of(item.grad, wide).view(value.shape)
        # autograd also calls the hook if all contributions to the gradient are deferred.
        accumulator = get_gradient_edge(tensor).node
        accumulator.register_hook(lambda *_: self.completed(name))
        self._accumulators.append(accumulator)
        return tensor

    def fill(self, name: str, value: torch.Tensor) -> None:
        """Copy a value to the tensor `name` if this rank holds the tensor."""
        if name in self.tensors:
            split = self.splits.get(name)
            own = own_part(value, split, self.ranks) if split else value
            self.tensors[name].detach().copy_(own)

    def in_evaluation(
        self, captured: Captured, constants: MutableMapping[str, torch.Tensor]
    ) -> TorchWeights:
        """Return the same weights for a program that is captured in evaluation mode.

        `constants` maps the names of the program's own constants to tensors.
        """
        found = copy(self)
        found.like, found.tensors = state_of(captured), ChainMap(constants, self.tensors)
        return found

    def average(self, names: Sequence[str], replicas: Communicator) -> None:
        """Average the floating-point buffers `names` over the replicas, in float32 or wider."""
        floating = [self.tensors[name] for name in names if self.tensors[name].is_floating_point()]
        if floating and replicas.size > 1:
            wide = torch.empty(0, dtype=torch.float32, device=self.device)
            mine = torch.cat([wide, *(tensor.reshape(-1) for tensor in floating)])
            total = replicas.all_reduce(array_of(mine, self.pool)).wait()
            means = tensor_of(total, mine.dtype).split([each.numel() for each in floating])
            for tensor, mean in zip(floating, means, strict=True):
                tensor.copy_((mean / replicas.size).view(tensor.shape))
