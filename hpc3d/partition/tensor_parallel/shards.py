"""Shards of tensors on tensor-parallel ranks, and the collectives that convert them.

A value is either full, with the same elements on all ranks, or split along one dimension. The
gradient of a value always has the same placement as the value. Each conversion is an autograd
function (M. Shoeybi et al., arXiv:1909.08053, section 3, where `copied` is f and `reduced` is g):

    function    forward pass                   backward pass
    copied      nothing                        all-reduce of partial gradients
    reduced     all-reduce of partial sums     nothing
    gathered    all-gather of shards           own shard of the gradient
    narrowed    own shard                      all-gather of gradient shards
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from hpc3d.partition.shared_arrays import array_of, tensor_of

if TYPE_CHECKING:
    from hpc3d.comm.communicator import Communicator


class SplitDim(NamedTuple):
    """Dimension `dim` of a tensor that is split over the tensor-parallel ranks.

    The dimension consists of `blocks` blocks, each with sections of the given sizes. A rank has
    its part of every section, in order. A fused projection to queries, keys and values has three
    sections. A dimension has several blocks only if the batch has been merged into it. Such a
    dimension can be neither gathered nor narrowed.
    """

    dim: int
    sections: tuple[int, ...]
    blocks: int = 1

    @property
    def size(self) -> int:
        """Size of the full dimension."""
        return self.blocks * sum(self.sections)


def own_part(tensor: torch.Tensor, split: SplitDim, ranks: Communicator) -> torch.Tensor:
    """Return this rank's shard of a full tensor."""
    assert split.blocks == 1, split
    parts = [
        section.narrow(split.dim, ranks.rank * size // ranks.size, size // ranks.size)
        for section, size in zip(tensor.split(split.sections, split.dim), split.sections)
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts, split.dim)


def copied(tensor: torch.Tensor, ranks: Communicator) -> torch.Tensor:
    """Return a full tensor for use on shards, which contribute partial gradients."""
    return _Copied.apply(tensor, ranks) if tensor.requires_grad else tensor


def reduced(tensor: torch.Tensor, ranks: Communicator) -> torch.Tensor:
    """Return the sum of the partial results of all ranks."""
    return _Reduced.apply(tensor, ranks)


def gathered(tensor: torch.Tensor, split: SplitDim, ranks: Communicator) -> torch.Tensor:
    """Return the full tensor, given this rank's shard."""
    return _Gathered.apply(tensor, split, ranks)


def narrowed(tensor: torch.Tensor, split: SplitDim, ranks: Communicator) -> torch.Tensor:
    """Return this rank's shard of a full tensor."""
    return _Narrowed.apply(tensor, split, ranks)


def sliced(
    tensor: torch.Tensor, dim: int, ranges: Sequence[tuple[int, int]], several: bool
) -> torch.Tensor | list[torch.Tensor]:
    """Return ranges (start, size) of a tensor's dimension, as a list if there are `several`."""
    parts = [tensor.narrow(dim, start, size) for start, size in ranges]
    return parts if several else parts[0]


def looked_up(
    table: torch.Tensor, rows: torch.Tensor, padding: int, size: int, ranks: Communicator
) -> torch.Tensor:
    """Look up rows of an embedding table with `size` rows that is split by rows.

    The gradient of row number `padding` is 0. Raises IndexError, as torch does, if the table does
    not have one of the rows.
    """
    if ((rows < 0) | (rows >= size)).any():
        raise IndexError(f"index out of range in an embedding table with {size} rows")
    own, first = len(table), ranks.rank * len(table)
    local = rows - first
    here = (local >= 0) & (local < own)
    padding = (padding + size if -size <= padding < -1 else padding) - first
    padding = padding if 0 <= padding < own else -1
    found = torch.embedding(table, torch.where(here, local, 0), padding)
    return reduced(found.masked_fill(~here.unsqueeze(-1), 0.0), ranks)


# Collectives of the conversions in the forward and backward pass.
COLLECTIVES: dict[Any, dict[str, str]] = {
    copied: {"backward": "all_reduce"},
    reduced: {"forward": "all_reduce"},
    looked_up: {"forward": "all_reduce"},
    gathered: {"forward": "all_gather"},
    narrowed: {"backward": "all_gather"},
}


class _Copied(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor, ranks):
        ctx.ranks = ranks
        # hpc3d.partition.execution.split_backward must not recognize a view of a parameter.
        return tensor.detach()

    @staticmethod
    def backward(ctx, dy):
        return _sum(dy, ctx.ranks), None


class _Reduced(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor, ranks):
        return _sum(tensor, ranks)

    @staticmethod
    def backward(ctx, dy):
        return dy, None


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor, split, ranks):
        ctx.how = split, ranks
        return _joined(tensor, split, ranks)

    @staticmethod
    def backward(ctx, dy):
        return own_part(dy, *ctx.how), None, None


class _Narrowed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor, split, ranks):
        ctx.how = split, ranks
        return own_part(tensor, split, ranks)

    @staticmethod
    def backward(ctx, dy):
        return _joined(dy, *ctx.how), None, None


def _sum(tensor: torch.Tensor, ranks: Communicator) -> torch.Tensor:
    return _received(ranks.all_reduce(_block(tensor, ranks)).wait(), tensor.dtype)


def _joined(tensor: torch.Tensor, split: SplitDim, ranks: Communicator) -> torch.Tensor:
    """Gather the shards of a tensor, and put the sections of the split dimension in order."""
    assert split.blocks == 1, split
    block = _block(tensor.movedim(split.dim, 0), ranks)
    rows = _received(ranks.all_gather(block).wait(), tensor.dtype)
    sizes = [size // ranks.size for size in split.sections]
    parts: Sequence[Sequence[torch.Tensor]] = [
        shard.split(sizes) for shard in rows.chunk(ranks.size)
    ]
    ordered = [shard[number] for number in range(len(sizes)) for shard in parts]
    return torch.cat(ordered).movedim(0, split.dim)


def _block(tensor: torch.Tensor, ranks: Communicator) -> Any:
    return array_of(tensor.detach().contiguous(), ranks.pool)


def _received(block: Any, dtype: torch.dtype) -> torch.Tensor:
    """Copy a received block, because its memory may be shared with other ranks."""
    return tensor_of(block.copy(), dtype)
