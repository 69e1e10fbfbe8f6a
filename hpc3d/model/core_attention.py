"""The core of attention as a layer: what lies between the products qkv and proj."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from hpc3d.model.layers import Dropout
from hpc3d.ops.attention import attend, attend_again, attend_grad

if TYPE_CHECKING:
    from hpc3d.arrays.array import Array
    from hpc3d.comm.mesh import Mesh
    from hpc3d.model.microbatch import Microbatch
    from hpc3d.model.spec import ModelSpec


class AttentionSaved(NamedTuple):
    """What backward works with: [q|k|v], and the probabilities unless they are recomputed."""

    qkv: Array
    probabilities: Array | None


class CoreAttention:
    """softmax(q k' / sqrt(D) + mask) v of [q|k|v] in the layout `split.y`: whole sequences and
    whole heads on every rank, so that nothing is communicated.

    With `recompute` "selective" the backward pass makes the probabilities again from q and k
    (arXiv:2205.05198, section 5).
    """

    def __init__(self, mesh: Mesh, name: str, spec: ModelSpec) -> None:
        self.mesh, self.sizes = mesh, spec.sizes
        self.selective = spec.recompute == "selective"
        self.dropout = Dropout(mesh, name, spec.splits["dense"].y, self.sizes.dropout, spec.seed)

    def forward(self, qkv: Array, micro: Microbatch) -> tuple[Array, AttentionSaved]:
        """The output [B*T, heads*D], and what `backward` needs."""
        sizes, mask = self.sizes, self._mask(micro)
        with self.mesh.trace.span("attention", "attention", self._flops(qkv)):
            out, p = attend(qkv, sizes.sequence, sizes.width, self.mesh.empty, mask)
        return out, AttentionSaved(qkv, None if self.selective else p)

    def backward(self, dout: Array, saved: AttentionSaved, micro: Microbatch) -> Array:
        """The gradient of [q|k|v] from that of the output."""
        qkv, p = saved
        sizes, mask = self.sizes, self._mask(micro)
        if self.selective:
            p = self.recompute(qkv, micro)
        with self.mesh.trace.span("attention", "attention", 2 * self._flops(qkv)):
            return attend_grad(dout, qkv, p, sizes.sequence, sizes.width, self.mesh.empty, mask)

    def recompute(self, qkv: Array, micro: Microbatch) -> Any:
        """The probabilities once more: half of the work."""
        sizes, mask = self.sizes, self._mask(micro)
        trace, half = self.mesh.trace, self._flops(qkv) // 2
        with trace.scope(phase="recompute"), trace.span("attention", "attention", half):
            return attend_again(qkv, sizes.sequence, sizes.width, self.mesh.empty, mask)

    def _mask(self, micro):
        """The `Mask` of this rank's probabilities [B, heads * T * T], or None."""
        return self.dropout.mask(micro, 1, self.sizes.heads * self.sizes.sequence**2)

    def _flops(self, qkv):
        """Of q k' and p v: 2 products of 2 T D for every row and head."""
        return 4 * self.sizes.sequence * qkv.size // 3
