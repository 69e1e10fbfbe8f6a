"""The core of attention as a layer: what lies between the products qkv and proj."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from hpc3d.model.layers import Dropout
from hpc3d.ops.attention import attend, attend_again, attend_grad
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
        self.mesh, self.sizes, layout = mesh, spec.sizes, spec.splits["dense"].y
        self.form = spec.sizes.form_over(mesh.count(layout[1]))
        self.rotary = spec.family.rotary
        self.selective = spec.recompute == "selective"
        self.dropout = Dropout(mesh, name, layout, self.sizes.dropout, spec.seed)

    def forward(self, qkv: Array, micro: Microbatch) -> tuple[Array, AttentionSaved]:
        """The output [B*T, heads*D], and what `backward` needs."""
        mask, qkv = self._mask(micro), self._turned(qkv, micro)
        with self.mesh.trace.span("attention", "attention", self._flops(qkv)):
            out, p = attend(qkv, self.sizes.sequence, self.form, self.mesh.empty, mask)
        return out, AttentionSaved(qkv, None if self.selective else p)

    def backward(self, dout: Array, saved: AttentionSaved, micro: Microbatch) -> Array:
        """The gradient of [q|k|v] from that of the output."""
        qkv, p = saved
        sequence, mask = self.sizes.sequence, self._mask(micro)
        if self.selective:
            p = self.recompute(qkv, micro)
        with self.mesh.trace.span("attention", "attention", 2 * self._flops(qkv)):
            dqkv = attend_grad(dout, qkv, p, sequence, self.form, self.mesh.empty, mask)
        return self._turned(dqkv, micro, sign=-1)

    def recompute(self, qkv: Array, micro: Microbatch) -> Any:
        """The probabilities once more: half of the work."""
        mask, trace, half = self._mask(micro), self.mesh.trace, self._flops(qkv) // 2
        with trace.scope(phase="recompute"), trace.span("attention", "attention", half):
            return attend_again(qkv, self.sizes.sequence, self.form, self.mesh.empty, mask)

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

    def _mask(self, micro):
        """The `Mask` of this rank's probabilities [B, heads * T * T], or None."""
        return self.dropout.mask(micro, 1, self.sizes.heads * self.sizes.sequence**2)

    def _flops(self, qkv):
        """Of q k' and p v: 2 products of 2 T D for every row and head."""
        width, queries = self.form
        return 4 * self.sizes.sequence * queries * width * qkv.size // self.form.columns
