"""The core of attention as a layer: what lies between the products qkv and proj."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from hpc3d.model.layers import Dropout
from hpc3d.ops.attention import AttentionMask, attend, attend_again, attend_grad
from hpc3d.ops.rotary import rotary_table, rotate

if TYPE_CHECKING:
    from numpy.typing import DTypeLike

    from hpc3d.arrays.array import Array
    from hpc3d.comm.mesh import Mesh
    from hpc3d.model.microbatch import Microbatch
    from hpc3d.model.spec import ModelSpec


class AttentionSaved(NamedTuple):
    """What backward works with: [q|k|v], turned where positions are rotary, and the probabilities
    unless they are recomputed."""

    qkv: Array
    probabilities: Array | None


class CoreAttention:
    """softmax(q k' / sqrt(D) + mask) v of [q|k|v] in the layout `split.y`: whole sequences and
    whole heads on every rank, so that nothing is communicated.  Rotary positions turn q and k.

    With `recompute` "selective" the backward pass makes the probabilities again from q and k
    (arXiv:2205.05198, section 5).
    """

    def __init__(self, mesh: Mesh, name: str, spec: ModelSpec) -> None:
        self.mesh, self.sizes, self.form = mesh, spec.sizes, spec.sizes.form
        self.rotary, self.causal = spec.family.rotary, spec.family.causal
        self.layout = spec.splits["dense"].y
        self.selective = spec.recompute == "selective"
        self.dropout = Dropout(mesh, name, spec.splits["dense"].y, self.sizes.dropout, spec.seed)

    def forward(self, qkv: Array, micro: Microbatch) -> tuple[Array, AttentionSaved]:
        """The output [B*T, heads*D], and what `backward` needs."""
        qkv = self._turned(qkv, micro)
        how = self.form, self.mesh.empty, self._drop(micro), self._mask(micro)
        with self.mesh.trace.span("attention", "attention", self._flops(qkv)):
            out, p = attend(qkv, self.sizes.sequence, *how)
        return out, AttentionSaved(qkv, None if self.selective else p)

    def backward(self, dout: Array, saved: AttentionSaved, micro: Microbatch) -> Array:
        """The gradient of [q|k|v] from that of the output."""
        qkv, p = saved
        if self.selective:
            p = self.recompute(qkv, micro)
        how = self.form, self.mesh.empty, self._drop(micro), self._mask(micro)
        with self.mesh.trace.span("attention", "attention", 2 * self._flops(qkv)):
            dqkv = attend_grad(dout, qkv, p, self.sizes.sequence, *how)
        return self._turned(dqkv, micro, sign=-1)

    def recompute(self, qkv: Array, micro: Microbatch) -> Any:
        """The probabilities once more: half of the work."""
        trace, half = self.mesh.trace, self._flops(qkv) // 2
        how = self.form, self.mesh.empty, self._drop(micro), self._mask(micro)
        with trace.scope(phase="recompute"), trace.span("attention", "attention", half):
            return attend_again(qkv, self.sizes.sequence, *how)

    def _turned(self, qkv: Array, micro: Microbatch, sign: int = 1) -> Array:
        """With q and k turned by their positions, in place."""
        if not self.rotary:
            return qkv
        dtype = qkv.dtype
        table = micro.cached("attention.rotary", lambda micro: self._table(dtype))
        with self.mesh.trace.span("rotary"):
            return rotate(qkv, table, self.form, sign)

    def _table(self, dtype: DTypeLike) -> np.ndarray:
        """Of the positions of a sequence; where numbers have less than 32 bits, with 32."""
        sizes, wide = self.sizes, np.promote_types(dtype, np.float32)
        return rotary_table(sizes.rotation, sizes.sequence, self.form.width, wide)

    def _mask(self, micro: Microbatch) -> AttentionMask:
        """Which keys the queries of this rank's samples see."""
        if self.sizes.padding is None:
            return AttentionMask(self.causal)
        return AttentionMask(self.causal, micro.cached("attention.padding", self._padding))

    def _padding(self, micro: Microbatch) -> np.ndarray:
        """Which tokens [B, T] of this rank's samples are padding."""
        return micro.rows(micro.tokens, self.layout, self.mesh) == self.sizes.padding

    def _drop(self, micro):
        """The `Mask` of this rank's probabilities [B, heads * T * T], or None."""
        return self.dropout.mask(micro, 1, self.sizes.heads * self.sizes.sequence**2)

    def _flops(self, qkv):
        """Of q k' and p v: 2 products of 2 T D for every row and head."""
        width, queries = self.form
        return 4 * self.sizes.sequence * queries * width * qkv.size // self.form.columns
