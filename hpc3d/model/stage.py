"""A stage's part of the model: some of its blocks, and perhaps one of its ends.

Forward and backward keep nothing in the stage, so any number of microbatches may be in flight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from hpc3d.model.gpt2 import add_table
from hpc3d.model.layers import immediately
from hpc3d.ops.cross_entropy import IGNORE
from hpc3d.tensor.layout import Layout

if TYPE_CHECKING:
    from hpc3d.arrays.array import Array
    from hpc3d.comm.mesh import Mesh
    from hpc3d.model.families import ModelSpec
    from hpc3d.model.parameters import Parameter, Parameters


def _without_cache(micro: Microbatch, name: str, make: Callable[[Microbatch], Any]) -> Any:
    """How a microbatch brings numbers to arrays of the host: they are there."""
    return make(micro)


class Microbatch(NamedTuple):
    """A microbatch: tokens and targets [sequences, T], the same on all ranks.

    `first` is the number of its first sequence in the batch of training step `step`; the gradient
    is that of its summed loss times `scale`.  `cache` brings numbers of the host to where the
    model's arrays are.
    """

    step: int
    first: int
    tokens: np.ndarray
    targets: np.ndarray
    scale: float
    cache: Callable = _without_cache

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
) -> Iterator[Microbatch]:
    """A batch [sequences, T] cut into `count` microbatches.

    The gradient is that of the mean loss of the whole batch, or with `alone` of each microbatch:
    over the tokens whose target is not IGNORE, so that uneven microbatches weigh what they hold.
    """
    ends = [len(tokens) * number // count for number in range(count + 1)]
    whole = valid_tokens(targets)
    for first, stop in pairwise(ends):
        part = slice(first, stop)
        valid = valid_tokens(targets[part]) if alone else whole
        yield Microbatch(step, first, tokens[part], targets[part], 1 / valid, cache)


def valid_tokens(targets: np.ndarray) -> int:
    return max(1, int((targets != IGNORE).sum()))


def _ignore(unit: str) -> None:
    """The `finished` of a backward pass that nobody waits for."""


class LayerRange(NamedTuple):
    """Which blocks of the model, with which of its ends."""

    layers: range
    first: bool
    last: bool


# A model taken apart: one block, and its ends without any.
FIRST = LayerRange(range(0), first=True, last=False)
LAYER = LayerRange(range(1), first=False, last=False)
LAST = LayerRange(range(0), first=False, last=True)


def build(
    mesh: Mesh,
    parameters: Parameters,
    spec: ModelSpec,
    parts: Sequence[LayerRange],
    tied_peer: int | None = None,
) -> list[Stage]:
    """The stages of this rank by a `ModelSpec`, one a part, their parameters added to
    `parameters`.

    A rank with the first part has the token table, as has, of a tied model, one with the last;
    `tied_peer` is the pipeline stage of the other where these are two.
    """
    table, tied = None, spec.sizes.tied
    if any(part.first or (part.last and tied) for part in parts):
        completed_last = tied and (tied_peer is not None or len(parts) > 1)
        how = {"tied_peer": tied_peer if tied else None, "completed_last": completed_last}
        table = add_table(mesh, parameters, spec, "embedding.token", **how)
    return [Stage(mesh, parameters, spec, part, table) for part in parts]


class Stage:
    """The part of a model that a rank runs in one go."""

    def __init__(
        self,
        mesh: Mesh,
        parameters: Parameters,
        spec: ModelSpec,
        part: LayerRange,
        table: Parameter | None,
    ) -> None:
        self.mesh, self.shape, self.layout = mesh, spec.sizes, spec.splits["dense"].x
        self.embeddings = self.head = None
        if part.first:
            self.embeddings = spec.family.first(mesh, parameters, spec, table)
        self.blocks = [spec.family.block(mesh, parameters, spec, number) for number in part.layers]
        if part.last:
            if not spec.sizes.tied:
                table = add_table(mesh, parameters, spec, "head.table")
            self.head = spec.family.last(mesh, parameters, spec, table)

    def forward(self, x: Array | None, micro: Microbatch) -> tuple[Any, list[Any]]:
        """Y, or of the last part this rank's share of the summed loss; and what backward needs.

        Parts with the embeddings take no x.
        """
        saved: list[Any] = []
        if self.embeddings:
            x = self.collect(saved, self.embeddings.forward(micro))
        for block in self.blocks:
            with self.mesh.trace.scope(layer=block.number):
                x = self.collect(saved, block.forward(x, micro))
        if self.head:
            x = self.collect(saved, self.head.forward(x, micro))
        return x, saved

    def collect(self, saved: list[Any], result: tuple[Any, Any]) -> Any:
        y, kept = result
        saved.append(kept)
        return y

    def backward(
        self,
        dy: Array | None,
        saved: list[Any],
        micro: Microbatch,
        defer: Callable[..., None] = immediately,
        finished: Callable[[str], None] = _ignore,
    ) -> Array | None:
        """The gradient of x; that of matrices goes through `defer`, which then calls
        `finished(unit)` for every part of the model that is through.  Empties `saved`.

        Parts with the head take no dy.
        """
        if self.head:
            dy = self.head.backward(micro, saved.pop(), defer)
            defer(finished, self.head.name)
        for block in reversed(self.blocks):
            with self.mesh.trace.scope(layer=block.number):
                dy = block.backward(dy, saved.pop(), micro, defer)
            defer(finished, block.name)
        if self.embeddings:
            dy = self.embeddings.backward(dy, saved.pop(), micro, defer)
            defer(finished, self.embeddings.name)
        return dy

    @property
    def units(self) -> list[str]:
        """What `finished` is called with."""
        ends = [end.name for end in (self.embeddings, self.head) if end]
        return [*ends, *(block.name for block in self.blocks)]

    def block_of(self, sequences: int) -> tuple[int, ...]:
        """The shape of this rank's block of the activations between stages."""
        return self.layout.block((sequences * self.shape.sequence, self.shape.hidden), self.mesh)
