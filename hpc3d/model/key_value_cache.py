"""Attention with a key/value cache, which processes only the new tokens of each sequence.

`CachedAttention` replaces the core attention of a block (hpc3d.model.core_attention).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from hpc3d.ops.attention import heads_of
from hpc3d.ops.cached_attention import attend_cached
from hpc3d.ops.rotary import rotary_table, rotate

if TYPE_CHECKING:
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


class CachedAttention:
    """Attention of new tokens to the cached tokens and, causally, to each other.

    The first new token is at position `kept.length`.  Every rank has complete sequences and
    complete heads, so no communication is needed.  The rotary embedding is applied to q and k
    before k is cached.
    """

    def __init__(self, mesh: Mesh, spec: ModelSpec, kept: KeptPositions) -> None:
        across = mesh.count(spec.splits["dense"].y[1])
        self.mesh, self.sizes, self.form = mesh, spec.sizes, spec.sizes.form_over(across)
        self.rotary, self.kept = spec.family.rotary, kept
        self.cache: Any = None  # [2, B, heads, T, D], keys and values

    def forward(self, qkv: Array, micro: Microbatch) -> tuple[Array, None]:
        """Return the attention output [B*t, heads*D]. A backward pass is not supported."""
        sequence, first = micro.tokens.shape[1], self.kept.length
        self._turn(qkv, sequence, first)
        if self.cache is None:
            batch, heads, _, width = heads_of(qkv, sequence, self.form)[1].shape
            self.cache = self.mesh.empty((2, batch, heads, self.kept.capacity, width), qkv.dtype)
        with self.mesh.trace.span("attention", "attention", self._flops(qkv, first + sequence)):
            out = attend_cached(qkv, sequence, self.form, self.cache, first, self.mesh.empty)
        return out, None

    def _flops(self, qkv, seen):
        """Return the FLOPs of the GEMMs q k^T and softmax(...) v if queries attend to `seen` keys.

        Each new token needs 4 * D * `seen` FLOPs per query head, where D is the head size.
        """
        width, queries = self.form
        return 4 * seen * queries * width * qkv.size // self.form.columns

    def _turn(self, qkv: Array, sequence: int, first: int) -> None:
        """Apply the rotary embedding to q and k in place."""
        if not self.rotary:
            return
        sizes, wide = self.sizes, np.promote_types(qkv.dtype, np.float32)
        table = rotary_table(sizes.rotation, sizes.sequence, self.form.width, wide)
        part = np.ascontiguousarray(table[:, first : first + sequence])
        with self.mesh.trace.span("rotary"):
            rotate(qkv, self.mesh.pool.bring(part), self.form)
