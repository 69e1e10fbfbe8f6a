"""Model chunk of a pipeline stage: a range of blocks, with or without the embedding and the head.

The forward and backward passes store no state in the model chunk, so any number of microbatches
may be in flight.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from hpc3d.model.block import Block
from hpc3d.model.gpt2 import add_table
from hpc3d.model.kept import FetchedWeights, KeptForm
from hpc3d.model.layers import immediately

if TYPE_CHECKING:
    from hpc3d.arrays.array import Array
    from hpc3d.comm.mesh import Mesh
    from hpc3d.model.microbatch import Microbatch
    from hpc3d.model.parameters import Parameter, Parameters
    from hpc3d.model.spec import ModelSpec


def _ignore(unit: str) -> None:
    """Do nothing. This is the default of the callbacks `starting` and `finished` of a pass."""


def _collect(
    saved: list[Any],
    micro: Microbatch,
    result: tuple[Any, Any],
    form: Callable[[Any], Any] | None = None,
) -> Any:
    """Return Y from the pair `result` = (Y, saved data) of a layer.

    If the microbatch has a backward pass, append the saved data, converted by `form` if given, to
    `saved`.
    """
    y, kept = result
    if micro.training:
        saved.append(form(kept) if form else kept)
    return y


class LayerRange(NamedTuple):
    """Range of blocks, with the embedding if `first` is True and the head if `last` is True."""

    layers: range
    first: bool
    last: bool


# Layer ranges that contain only the embedding, only one block, or only the head.
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
    """Build this rank's model chunks of a `ModelSpec`, one for each layer range in `parts`.

    The parameters of the chunks are added to `parameters`. Ranks with the embedding store the
    token table; in a tied model, ranks with the head also store it. If the embedding and the head
    are on different ranks, `tied_peer` is the pipeline stage of the other rank.
    """
    table, tied = None, spec.sizes.tied
    if any(part.first or (part.last and tied) for part in parts):
        completed_last = tied and (tied_peer is not None or len(parts) > 1)
        how = {"tied_peer": tied_peer if tied else None, "completed_last": completed_last}
        table = add_table(mesh, parameters, spec, "embedding.token", **how)
    return [Stage(mesh, parameters, spec, part, table) for part in parts]


class Stage:
    """Model chunk of a rank: consecutive layers that a forward or backward pass runs as a unit."""

    def __init__(
        self,
        mesh: Mesh,
        parameters: Parameters,
        spec: ModelSpec,
        part: LayerRange,
        table: Parameter | None,
    ) -> None:
        self.mesh, self.shape, self.layout = mesh, spec.sizes, spec.splits["dense"].x
        self.dtype = parameters.dtype
        offload = "activations" in parameters.offload
        self.kept = KeptForm(mesh, self.dtype, spec.keep_dtype, offload)
        self.embeddings = self.head = None
        if part.first:
            self.embeddings = spec.family.first(mesh, parameters, spec, table)
        self.blocks: list[Any] = [Block(mesh, parameters, spec, number) for number in part.layers]
        self.weights = FetchedWeights(parameters, [block.name for block in self.blocks])
        if part.last:
            if not spec.sizes.tied:
                table = add_table(mesh, parameters, spec, "head.table")
            self.head = spec.family.last(mesh, parameters, spec, table)

    @property
    def auxiliary_loss(self) -> Any:
        """This rank's share of the routers' auxiliary losses in the last forward pass."""
        return sum(block.mlp.auxiliary_loss for block in self.blocks if block.mixes)

    def forward(
        self,
        x: Array | None,
        micro: Microbatch,
        starting: Callable[[str], None] = _ignore,
    ) -> tuple[Any, list[Any]]:
        """Return Y (or, with the head, the loss) and the data saved for the backward pass.

        Nothing is saved if the microbatch is not for training.  If the model chunk has the
        embedding, x is ignored. `starting(unit)` is called before the pass of each unit.
        """
        saved: list[Any] = []
        trace = self.mesh.trace
        if self.embeddings:
            starting(self.embeddings.name)
            with trace.scope(part=self.embeddings.name):
                x = _collect(saved, micro, self.embeddings.forward(micro))
        for number, block in enumerate(self.blocks):
            starting(block.name)
            with trace.scope(layer=block.number), self.weights.of(number, number + 1):
                form = partial(self._put_away, number)
                x = _collect(saved, micro, block.forward(x, micro), form)
        if self.head:
            starting(self.head.name)
            with trace.scope(part=self.head.name):
                x = _collect(saved, micro, self.head.forward(x, micro))
        return x, saved

    def backward(
        self,
        dy: Array | None,
        saved: list[Any],
        micro: Microbatch,
        defer: Callable[..., None] = immediately,
        finished: Callable[[str], None] = _ignore,
    ) -> Array | None:
        """Return the gradient of the chunk's input x.

        `defer` receives the computation of the weight gradients, followed by a call to
        `finished(unit)` for each completed unit of the model. `saved` is emptied. If the model
        chunk has the head, dy is ignored.
        """
        trace = self.mesh.trace
        if self.head:
            with trace.scope(part=self.head.name):
                dy = self.head.backward(micro, self.kept.pop(saved), defer)
            defer(finished, self.head.name)
        for number, block in reversed([*enumerate(self.blocks)]):
            with trace.scope(layer=block.number), self.weights.of(number, number - 1):
                dy = block.backward(dy, self._taken(number, saved), micro, defer)
            defer(finished, block.name)
        if self.embeddings:
            with trace.scope(part=self.embeddings.name):
                dy = self.embeddings.backward(dy, saved.pop(), micro, defer)
            defer(finished, self.embeddings.name)
        return dy

    def _put_away(self, number: int, saved: Any) -> Any:
        return self.kept.put_away(self.weights.without(saved, number))

    def _taken(self, number: int, saved: list[Any]) -> Any:
        return self.weights.within(self.kept.take(saved), number)

    @property
    def units(self) -> list[str]:
        """Names of the chunk's units (embedding, head and blocks), as passed to `finished`."""
        ends = [end.name for end in (self.embeddings, self.head) if end]
        return [*ends, *(block.name for block in self.blocks)]

    def incoming(self, kind: str, micro: Microbatch) -> list[tuple[tuple[int, ...], Any]]:
        """Return the shape and dtype of each block received from another stage.

        An activation and its gradient have the same shape and dtype.
        """
        return [(self.block_of(micro.tokens.size), self.dtype)]

    def block_of(self, tokens: int) -> tuple[int, ...]:
        """Return the shape of this rank's block of an activation sent between stages."""
        return self.layout.block((tokens, self.shape.hidden), self.mesh)
