"""Random numbers that do not depend on the partition, the microbatches or the replicas.

The random number of an element depends only on the seed, the name of the operation, the step, the
index of the sample in the batch, and the index of the element in the sample.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import log2, prod
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from hpc3d.ops.random import keep_mask, normal, philox_draws, philox_key
from hpc3d.partition.tensor_parallel.shards import SplitDim, own_part

if TYPE_CHECKING:
    from hpc3d.comm.communicator import Communicator


class Draw(NamedTuple):
    """Key of the random numbers for samples `first` to `first + samples` (exclusive) of a step.

    `batch_values` maps names of operations to values of the full batch (see LossTerms). The random
    numbers are drawn on the CPU and copied to `device`.
    """

    seed: int
    step: int
    first: int
    samples: int
    batch_values: Mapping[str, torch.Tensor] = MappingProxyType({})
    device: torch.device | str = "cpu"


class RandomNumbers(NamedTuple):
    """Random numbers that the operation `name` draws for the samples in `draw`.

    Dimension `dim` of each tensor contains the samples, with one or several rows per sample. The
    dimension consists of `blocks`, each with rows of all samples. If `dim` is `None`, the numbers
    are the same for all samples of the step. `dtype` is the data type of the operation's result.
    If there is a `split`, the tensors are shards on the tensor-parallel `ranks`: each rank draws
    the numbers of the full tensor, and returns its own part.
    """

    name: str
    draw: Draw
    dim: int | None
    dtype: torch.dtype
    blocks: int = 1
    split: SplitDim | None = None
    ranks: Communicator | None = None

    def kept(self, rate: float, shape: Sequence[int]) -> torch.Tensor:
        """Return a dropout mask, False with probability `rate`, rounded to 2^-16."""
        if rate == 1:
            return torch.zeros([*shape], dtype=torch.bool, device=self.draw.device)
        return self._block(
            lambda key, rows, width: keep_mask(key, rate, rows, range(width), width), shape
        )

    def happens(self, chance: float | torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
        """Return a tensor of booleans, each True with probability `chance`."""
        return self._fractions(53, 0.0, shape) < chance

    def integers(self, low: int, high: int, shape: Sequence[int]) -> torch.Tensor:
        """Return int64 numbers from `low` to `high` (exclusive)."""
        span = np.uint64(high - low)
        return self._block(
            lambda *block: (_bits(*block) % span).astype(np.int64) + low,
            shape,
        )

    def uniform(self, shape: Sequence[int]) -> torch.Tensor:
        """Return float64 numbers in [0, 1) with the precision of `dtype`.

        Rounding a number to `dtype` is exact and never returns 1.
        """
        floating = self.dtype.is_floating_point
        digits = 1 - round(log2(torch.finfo(self.dtype).eps)) if floating else 53
        return self._fractions(digits, 0.0, shape)

    def exponential(self, shape: Sequence[int]) -> torch.Tensor:
        """Return exponentially distributed float64 numbers with mean 1, greater than 0."""
        return self._fractions(52, 0.5, shape).log_().neg_()

    def normal(self, shape: Sequence[int]) -> torch.Tensor:
        """Return float64 numbers from the standard normal distribution."""
        return self._block(
            lambda key, rows, width: normal(key, rows, range(width), width),
            shape,
        )

    def _fractions(self, digits, offset, shape):
        """Return the float64 numbers (n + offset) / 2^digits with random n < 2^digits."""
        shift = np.uint64(64 - digits)
        return self._block(
            lambda *block: ((_bits(*block) >> shift) + offset) * 2.0**-digits,
            shape,
        )

    def _block(
        self, make: Callable[[np.ndarray, range, int], np.ndarray], shape: Sequence[int]
    ) -> torch.Tensor:
        """Return a tensor of the given shape, filled by `make(key, rows, elements per row)`."""
        if self.split and self.ranks:
            full = [*shape]
            full[self.split.dim] = self.split.size
            made = self._replace(split=None)._block(make, full)
            return own_part(made, self.split, self.ranks)
        dim, draw = self.dim, self.draw
        rows = 1 if dim is None else shape[dim]
        others = [size for index, size in enumerate(shape) if index != dim]
        first = 0 if dim is None else draw.first * rows // draw.samples
        key = philox_key((draw.seed, self.name, draw.step))
        made = torch.from_numpy(make(key, range(first, first + rows), prod(others)))
        made = made.to(draw.device)
        if dim is None:
            return made.view([*shape])
        if self.blocks > 1:
            made = made.view(draw.samples, self.blocks, -1).transpose(0, 1).reshape(-1)
        return made.view(rows, *others).movedim(0, dim)


def _bits(key: np.ndarray, rows: range, width: int) -> np.ndarray:
    return philox_draws(key, rows.start * width, len(rows) * width)
