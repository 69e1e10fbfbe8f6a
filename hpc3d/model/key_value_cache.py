"""Attention that keeps the keys and values of a text, so that a token more costs one row a sample.

A `CachedAttention` stands where a block has its core of attention (hpc3d.model.core_attention).
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
    """How many positions all layers have kept, `length`, of at most `capacity`."""

    def __init__(self, capacity: int) -> None:
        self.length, self.capacity = 0, capacity


class CachedAttention:
    """softmax(q k' / sqrt(D) + mask) v of the new tokens of a microbatch, at the positions from
    `kept.length` on, with all keys and values before them: whole sequences and whole heads on
    every rank, so that nothing is communicated.  Rotary positions turn q and k before k is kept.
    """

    def __init__(self, mesh: Mesh, spec: ModelSpec, kept: KeptPositions) -> None:
        across = mesh.count(spec.splits["dense"].y[1])
        self.mesh, self.sizes, self.form = mesh, spec.sizes, spec.sizes.form_over(across)
        self.rotary, self.kept = spec.family.rotary, kept
        self.cache: Any = None  # [2, B, heads, T, D], keys and values

    def forward(self, qkv: Array, micro: Microbatch) -> tuple[Array, None]:
        """The output [B*t, heads*D]; there is no backward pass."""
        sequence, first = micro.tokens.shape[1], self.kept.length
        self._turn(qkv, sequence, first)
        if self.cache is None:
            batch, heads, _, width = heads_of(qkv, sequence, self.form)[1].shape
            self.cache = self.mesh.empty((2, batch, heads, self.kept.capacity, width), qkv.dtype)
        with self.mesh.trace.span("attention", "attention", self._flops(qkv, first + sequence)):
            out = attend_cached(qkv, sequence, self.form, self.cache, first, self.mesh.empty)
        return out, None

    def _flops(self, qkv, seen):
        """Of q k' and p v: 2 products of 2 `seen` D for every row and head."""
        width, queries = self.form
        return 4 * seen * queries * width * qkv.size // self.form.columns

    def _turn(self, qkv: Array, sequence: int, first: int) -> None:
        """Turn q and k by their positions, in place."""
        if not self.rotary:
            return
        sizes, wide = self.sizes, np.promote_types(qkv.dtype, np.float32)
        table = rotary_table(sizes.rotation, sizes.sequence, self.form.width, wide)
        part = np.ascontiguousarray(table[:, first : first + sequence])
        with self.mesh.trace.span("rotary"):
            rotate(qkv, self.mesh.pool.bring(part), self.form)
