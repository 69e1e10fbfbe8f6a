"""Attention with a key/value cache, which processes only the new tokens of each sequence.

`CachedAttention` replaces the core attention of a block (hpc3d.model.core_attention).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from hpc3d.model.core_attention import HeadBlock
from hpc3d.ops.attention import heads_of, length
from hpc3d.ops.cached_attention import Cache, attend_cached

if TYPE_CHECKING:
    from numpy.typing import DTypeLike

    from hpc3d.arrays.array import Array
    from hpc3d.comm.mesh import Mesh
    from hpc3d.model.microbatch import Microbatch
    from hpc3d.model.spec import ModelSpec


class KeptPositions:
    """Current (`length`) and maximum (`capacity`) number of cached positions per sequence.

    The caches of all layers contain the same positions.
    """

    def __init__(self, capacity: int) -> None:
        self.length, self.capacity = 0, capacity


class CachedAttention(HeadBlock):
    """Attention of new tokens to the cached tokens and, causally, to each other.

    The first new token is at position `kept.length`.  Every rank has complete sequences and
    complete heads, so no communication is needed.  The rotary embedding is applied to q and k
    before k is cached.
    """

    def __init__(self, mesh: Mesh, spec: ModelSpec, kept: KeptPositions, window: int = 0) -> None:
        super().__init__(mesh, "cached attention", spec, window)
        self.kept = kept
        self.cache: Any = None  # [2, B, heads, T, D], keys and values

    def forward(self, qkv: Array, micro: Microbatch) -> tuple[Array, None]:
        """Return the attention output [B*t, heads*D]. A backward pass is not supported."""
        sequence, first = micro.tokens.shape[1], self.kept.length
        qkv = self.turned(qkv, micro)
        if self.cache is None:
            batch, heads, _, width = heads_of(qkv, sequence, self.form)[1].shape
            self.cache = self.mesh.empty((2, batch, heads, self.kept.capacity, width), qkv.dtype)
        cache, empty = Cache(self.cache, first, self.window), self.mesh.empty
        seen = length(cache.seen(sequence))
        with self.mesh.trace.span("attention", "attention", self.flops(qkv, seen)):
            out = attend_cached(qkv, sequence, self.form, cache, empty)
        return out, None

    def table(self, micro: Microbatch, dtype: DTypeLike) -> np.ndarray:
        """Return the rotary table of the new tokens, in float32 or wider."""
        first = self.kept.length
        new = slice(first, first + micro.tokens.shape[1])
        return np.ascontiguousarray(super().table(micro, dtype)[:, new])
