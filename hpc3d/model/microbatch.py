"""A microbatch: the tokens of a pass, and how many microbatches a batch is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from hpc3d.ops.cross_entropy import IGNORE
from hpc3d.tensor.layout import Layout

if TYPE_CHECKING:
    from hpc3d.comm.mesh import Mesh
    from hpc3d.model.context import Context


def _without_cache(micro: Microbatch, name: str, make: Callable[[Microbatch], Any]) -> Any:
    """How a microbatch brings numbers to arrays of the host: they are there."""
    return make(micro)


class Microbatch(NamedTuple):
    """A microbatch: tokens and targets [sequences, T], the same on all ranks; where a context axis
    cuts sequences, virtual ones (hpc3d.model.context).

    `first` is the number of its first sequence in the batch of training step `step`; the gradient
    is that of its summed loss times `scale`.  `cache` brings numbers of the host to where the
    model's arrays are.  One that is not for `training` has no backward pass: nothing is kept for
    it, and nothing is dropped.
    """

    step: int
    first: int
    tokens: np.ndarray
    targets: np.ndarray
    scale: float
    cache: Callable = _without_cache
    training: bool = True

    @property
    def sequences(self) -> int:
        return len(self.tokens)

    def cached(self, name: str, make: Callable[[Microbatch], Any]) -> Any:
        """`make(micro)`, where the model's arrays are; it is the same under the same name."""
        return self.cache(self, name, make)

    def factor(self) -> Any:
        """`scale` there."""
        return self.cached("scale", lambda micro: micro.scale)

    def rows(self, batch: np.ndarray, layout: Layout, mesh: Mesh) -> np.ndarray:
        """This rank's sequences, for rows that lie as in `layout`."""
        rows = Layout(" ".join(layout[0]), owned=" ".join(layout.owned))
        return batch[rows.slices(batch.shape[:1], mesh)]


def microbatches(
    step: int,
    tokens: np.ndarray,
    targets: np.ndarray,
    count: int,
    alone: bool = False,
    cache: Callable[..., Any] = _without_cache,
    context: Context | None = None,
) -> Iterator[Microbatch]:
    """A batch [sequences, T] cut into `count` microbatches, and their sequences by `context`.

    The gradient is that of the mean loss of the whole batch, or with `alone` of each microbatch:
    over the tokens whose target is not IGNORE, so that uneven microbatches weigh what they hold.
    """
    ends = [len(tokens) * number // count for number in range(count + 1)]
    whole, cut = valid_tokens(targets), context.cut if context else np.asarray
    for first, stop in pairwise(ends):
        part = slice(first, stop)
        valid = valid_tokens(targets[part]) if alone else whole
        yield Microbatch(step, first, cut(tokens[part]), cut(targets[part]), 1 / valid, cache)


def valid_tokens(targets: np.ndarray) -> int:
    return max(1, int((targets != IGNORE).sum()))
