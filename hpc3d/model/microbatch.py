"""Microbatches (inputs of one forward and backward pass), and functions that create them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from hpc3d.ops.cross_entropy import IGNORE
from hpc3d.ops.random import philox_key

if TYPE_CHECKING:
    from hpc3d.arrays.pool import Pool
    from hpc3d.comm.mesh import Mesh
    from hpc3d.model.context import Context
    from hpc3d.tensor.layout import Layout


def _without_cache(micro: Microbatch, name: str, make: Callable[[Microbatch], Any]) -> Any:
    return make(micro)


class Microbatch(NamedTuple):
    """Tokens and targets [sequences, T] of one pass, identical on all ranks.

    With context parallelism, these are virtual sequences (hpc3d.model.context). `first` is the
    index of the first sequence in the batch of training step `step`; the loss is multiplied by
    `scale` before the backward pass. `cache(micro, name, make)` returns a copy of `make(micro)` on
    the model's device and caches it. A microbatch that is not for `training` has no backward pass:
    nothing is saved, and no dropout is applied.
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
        """Return the array `make(micro)`, copied to the model's device and cached as `name`."""
        return self.cache(self, name, make)

    def factor(self) -> Any:
        """Return the loss factor `scale`, copied to the model's device."""
        return self.cached("scale", lambda micro: micro.scale)

    def dropout_key(self, name: str, seed: int) -> Any:
        """Return the Philox key of the dropout masks of layer `name` in this training step."""
        return self.cached(name, lambda micro: philox_key((seed, name, micro.step)))

    def document_starts(self, context: Context, separator: int | None) -> np.ndarray:
        """Return the position of the first token in the document of each token, int64[c S, T/c].

        A document ends with the token `separator`.
        """
        ends = context.joined(self.tokens) == separator
        first = np.arange(ends.shape[1]) * np.roll(ends, 1, axis=1)  # 0, unless a document begins
        return context.cut(np.maximum.accumulate(first, axis=1))

    def rows(self, batch: np.ndarray, layout: Layout, mesh: Mesh) -> np.ndarray:
        """Return the sequences of `batch` that `layout` assigns to this rank."""
        return batch[layout.rows.slices(batch.shape[:1], mesh)]


class DeviceCache:
    """Cache of microbatch arrays on the model's device, used as `Microbatch.cache`.

    If `persistent` is True, the arrays are refilled in each step instead of created again.
    """

    persistent = False

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.arrays: dict[tuple, Any] = {}

    def __call__(self, micro: Microbatch, name: str, make: Callable[[Microbatch], Any]) -> Any:
        key = micro.step, micro.first, name
        if key not in self.arrays:
            self.arrays[key] = self.pool.bring(make(micro))
        return self.arrays[key]

    def begin(self, number: int, micros: Iterable[Microbatch]) -> None:
        """Discard the cached arrays of steps before `number`."""
        self.arrays = {key: what for key, what in self.arrays.items() if key[0] >= number}


def microbatches(
    step: int,
    tokens: np.ndarray,
    targets: np.ndarray,
    count: int,
    alone: bool = False,
    cache: Callable[..., Any] = _without_cache,
    context: Context | None = None,
) -> Iterator[Microbatch]:
    """Split a batch [sequences, T] into `count` microbatches; `context` shards the sequences.

    By default, losses are divided by the number of targets in the full batch, so that the
    accumulated gradient is the gradient of the batch's mean loss. If `alone` is True, the loss of
    a microbatch is divided by its own number of targets. Targets equal to IGNORE do not count.
    """
    ends = [len(tokens) * number // count for number in range(count + 1)]
    whole, cut = valid_tokens(targets), context.cut if context else np.asarray
    for first, stop in pairwise(ends):
        part = slice(first, stop)
        valid = valid_tokens(targets[part]) if alone else whole
        yield Microbatch(step, first, cut(tokens[part]), cut(targets[part]), 1 / valid, cache)


def valid_tokens(targets: np.ndarray) -> int:
    return max(1, count_targets(targets))


def count_targets(targets: np.ndarray) -> int:
    """Return the number of targets that count in the loss."""
    # All elements along a dimension with stride 0 are the same element in memory.
    distinct = targets[tuple(slice(None) if step else slice(1) for step in targets.strides)]
    return targets.size // max(1, distinct.size) * int((distinct != IGNORE).sum())
