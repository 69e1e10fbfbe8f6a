"""Decoder for text generation: compute next-token logits for sequences of equal length.

The decoder reuses the training layers (hpc3d.model.stage), so it supports every sharding scheme
and tensor layout. Attention uses a key/value cache (hpc3d.model.key_value_cache), and nothing is
saved for a backward pass.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import lcm, prod
from typing import TYPE_CHECKING

from hpc3d.arrays.pool import contiguous
from hpc3d.model.key_value_cache import CachedAttention, KeptPositions
from hpc3d.model.microbatch import DeviceCache, Microbatch
from hpc3d.model.parameters import Parameters
from hpc3d.model.stage import LayerRange, build
from hpc3d.ops.rows import add_repeated

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import DTypeLike

    from hpc3d.arrays.array import Array
    from hpc3d.comm.mesh import Mesh
    from hpc3d.model.spec import ModelSpec
    from hpc3d.tensor.split import Split


def sequences_for(
    sizes: Mapping[str, int], split: Split, samples: int, mixes: bool = False
) -> int:
    """Return the smallest number of sequences >= `samples` whose rows can be sharded evenly.

    The result is divisible by the number of ranks over which the rows of each matrix product are
    sharded, including the router's product if `mixes` is True (the model has experts). `sizes`
    maps mesh axes to their sizes. Each sequence contributes one row, for its new token.
    """
    ends = split.without_panels()
    splits = split, split.next(), ends, ends.next(), *([split.by_rows()] if mixes else [])
    layouts = [layout for each in splits for layout in (each.x, each.y)]
    rows = lcm(*(prod(sizes.get(axis, 1) for axis in layout[0]) for layout in layouts))
    return -(-samples // rows) * rows


class Decoder:
    """Full model for text generation, on a mesh that has only tensor-parallel axes.

    The key/value caches hold `capacity` positions per sequence. The caller must set the parameter
    values.
    """

    def __init__(self, mesh: Mesh, spec: ModelSpec, dtype: DTypeLike, capacity: int) -> None:
        self.mesh, self.parameters = mesh, Parameters(mesh, dtype)
        self.kept, self.vocabulary = KeptPositions(capacity), spec.sizes.vocabulary
        whole = LayerRange(range(spec.sizes.layers), first=True, last=True)
        (self.stage,) = build(mesh, self.parameters, spec, [whole])
        for block in self.stage.blocks:
            of_layer = spec.of_layer(block.number)
            block.attention = CachedAttention(mesh, of_layer, self.kept, block.window)
        for item in self.parameters:
            item.frozen, item.std = True, 0.0
        self.parameters.allocate(seed=0)

    def forget(self) -> None:
        """Clear the key/value caches, so that the next token starts a new sequence."""
        self.kept.length = 0

    def forward(self, tokens: np.ndarray) -> Array:
        """Return the logits [sequences, vocabulary] of the token that follows `tokens`.

        `tokens` [sequences, t] continue the sequences of the previous calls. The result is
        identical on all ranks.
        """
        count = tokens.shape[1]
        assert self.kept.length + count <= self.kept.capacity
        micro = Microbatch(0, 0, tokens, tokens, 1.0, DeviceCache(self.mesh.pool))
        x = self._embedded(micro, count)
        for block in self.stage.blocks:
            with self.mesh.trace.scope(layer=block.number):
                x, _ = block.forward(x, micro)
        self.kept.length += count
        return self._logits(contiguous(x.reshape(-1, count, x.shape[1])[:, -1]))

    def _embedded(self, micro: Microbatch, count: int) -> Array:
        """Return the embeddings of the new tokens, whose positions follow those in the cache."""
        first, embeddings = self.kept.length, self.stage.embeddings
        assert embeddings
        x, _ = embeddings.lookup.forward(micro)
        if not embeddings.positions:
            return x
        rows = embeddings.positions.rows[first : first + count]
        return add_repeated(x, rows, 0, self.mesh.empty(x.shape, x.dtype))

    def _logits(self, x: Array) -> Array:
        """Compute the unsharded logits [sequences, vocabulary] from the hidden states x."""
        head = self.stage.head
        assert head
        logits, _ = head.logits(x)
        logits = head.matmul.gather(logits, head.layout, head.layout.axes).wait()
        return logits[:, : self.vocabulary]
