"""Core attention layer: the operations between the QKV projection and the output projection."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from hpc3d.arrays.array import Array, SavedActivation
from hpc3d.comm.mesh import CONTEXT, Mesh
from hpc3d.model.spec import ModelSpec, recompute_of
from hpc3d.ops.attention import AttentionMask, attend, attend_again, attend_grad
from hpc3d.ops.random import Mask
from hpc3d.ops.rotary import rotary_table, rotate

if TYPE_CHECKING:
    from numpy.typing import DTypeLike

    from hpc3d.model.microbatch import Microbatch


class AttentionSaved(NamedTuple):
    """Data saved for the backward pass of core attention.

    `qkv` is [q|k|v] after the rotary embedding. `probabilities` is `None` if they are recomputed.
    """

    qkv: SavedActivation
    probabilities: SavedActivation | None


class HeadBlock:
    """Base class of attention layers, which determines the tokens and heads of a rank.

    With context parallelism, a rank processes complete heads for `tokens` tokens of each of its
    sequences, namely the tokens assigned to its ring position. The rotary embedding uses token
    positions in the full sequence. Dropout masks are generated from sample, head and position
    indices, so that the same probabilities are dropped on every mesh. A query attends to the last
    `window` tokens up to its own position (0: to all of them).
    """

    def __init__(self, mesh: Mesh, name: str, spec: ModelSpec, window: int = 0) -> None:
        self.mesh, self.name, self.seed = mesh, name, spec.seed
        self.context, self.sizes, self.layout = spec.context, spec.sizes, spec.splits["dense"].y
        self.form = spec.sizes.form_over(mesh.count(self.layout[1]))
        self.tokens = self.context.length // self.context.rings
        self.ring_rank, self.member = divmod(mesh.coord(CONTEXT), self.context.heads)
        self.rotary, self.causal = spec.family.rotary, spec.family.causal
        self.window = window
        self.rotary_name = f"attention.rotary.{spec.sizes.rotation}"

    def turned(self, qkv: Array, micro: Microbatch, sign: int = 1) -> Array:
        """Apply the rotary embedding to q and k of `qkv` in place; return `qkv`."""
        if not self.rotary:
            return qkv
        dtype = qkv.dtype
        table = micro.cached(self.rotary_name, lambda micro: self.table(micro, dtype))
        with self.mesh.trace.span("rotary"):
            return rotate(qkv, table, self.form, sign)

    def table(self, micro: Microbatch, dtype: DTypeLike) -> np.ndarray:
        """Return the rotary table of this rank's tokens, in float32 or wider."""
        sizes, wide = self.sizes, np.promote_types(dtype, np.float32)
        table = rotary_table(sizes.rotation, sizes.sequence, self.form.width, wide)
        if self.context.rings == 1:
            return table
        first, count = self.ring_rank * self.context.heads, self.context.heads
        parts = [self.context.positions(first + number) for number in range(count)]
        return np.ascontiguousarray(table[:, np.concatenate(parts)])

    def flops(self, qkv: Array, keys: int) -> int:
        """Return the FLOPs of q k^T and p v if each query attends to `keys` keys.

        Each of the two products takes 2 `keys` D FLOPs per row and query head.
        """
        width, queries = self.form[:2]
        return 4 * keys * queries * width * qkv.size // self.form.columns

    def drops(self, micro: Microbatch) -> bool:
        """Return True if dropout is applied to the attention probabilities."""
        return self.sizes.dropout > 0 and micro.training

    def samples(self, micro: Microbatch) -> range:
        """Return the indices, within the microbatch, of the sequences that this rank processes."""
        (here,) = self.layout.rows.slices((micro.sequences,), self.mesh)
        first = here.start % (micro.sequences // self.context.parts)
        return range(first, first + here.stop - here.start)

    def padding(self, micro: Microbatch, ring_rank: int) -> Any:
        """Return the padding mask [B, t] of the tokens at ring position `ring_rank`.

        Returns `None` if the model has no padding token.
        """
        if self.sizes.padding is None:
            return None
        name = f"attention.padding.{ring_rank}"
        return micro.cached(name, lambda micro: self._padding(micro, ring_rank))

    def _padding(self, micro: Microbatch, ring_rank: int) -> np.ndarray:
        return self._at(micro, micro.tokens, ring_rank) == self.sizes.padding

    def _at(self, micro: Microbatch, values: np.ndarray, ring_rank: int) -> np.ndarray:
        """Return the `values` [c S, T/c] of the tokens [B, t] at ring position `ring_rank`."""
        context, samples = self.context, self.samples(micro)
        parts = values.reshape(context.rings, context.heads, -1, context.tokens)
        here = parts[ring_rank, :, samples.start : samples.stop].swapaxes(0, 1)
        return here.reshape(len(samples), self.tokens)

    def starts(self, micro: Microbatch) -> Any:
        """Return the beginnings [B, t] of the documents of this rank's tokens.

        Returns `None` if sequences are not divided into documents.
        """
        if self.sizes.separator is None:
            return None
        return micro.cached("attention.starts", self._starts)

    def _starts(self, micro: Microbatch) -> np.ndarray:
        starts = micro.document_starts(self.context, self.sizes.separator)
        return np.ascontiguousarray(self._at(micro, starts, self.ring_rank))

    def heads(self) -> range:
        """Return the indices of this rank's query heads."""
        (columns,) = self.layout.columns.slices((self.sizes.heads,), self.mesh)
        count = (columns.stop - columns.start) // self.context.heads
        first = columns.start + self.member * count
        return range(first, first + count)


class CoreAttention(HeadBlock):
    """Attention softmax(q k^T / sqrt(D) + mask) v on complete sequences and complete heads.

    The scores have a soft cap if `sizes.score_cap` is set. No communication is needed. If
    "core_attn" is recomputed, the backward pass recomputes the probabilities from q and k
    (arXiv:2205.05198, section 5).
    """

    def __init__(self, mesh: Mesh, name: str, spec: ModelSpec, window: int = 0) -> None:
        super().__init__(mesh, name, spec, window)
        self.recomputed = "core_attn" in recompute_of(spec.recompute)
        self.seen = window or self.tokens  # keys per query in the FLOP counts

    def forward(self, qkv: Array, micro: Microbatch) -> tuple[Array, AttentionSaved]:
        """Return the attention output [B*T, heads*D] and the data saved for `backward`."""
        qkv = self.turned(qkv, micro)
        empty, masks = self.mesh.empty, self._masks(micro)
        with self.mesh.trace.span("attention", "attention", self.flops(qkv, self.seen)):
            out, p = attend(qkv, self.tokens, self.form, empty, **masks)
        return out, AttentionSaved(qkv, None if self.recomputed else p)

    def backward(self, dout: Array, saved: AttentionSaved, micro: Microbatch) -> Array:
        """Compute the gradient of [q|k|v] from the gradient of the attention output."""
        qkv, p = saved
        if self.recomputed:
            p = self.recompute(qkv, micro)
        empty, masks = self.mesh.empty, self._masks(micro)
        products = 5 if self.form.cap else 4  # a soft cap recomputes the scores
        flops = products * self.flops(qkv, self.seen) // 2
        with self.mesh.trace.span("attention", "attention", flops):
            dqkv = attend_grad(dout, qkv, p, self.tokens, self.form, empty, **masks)
        return self.turned(dqkv, micro, sign=-1)

    def recompute(self, qkv: Array, micro: Microbatch) -> Any:
        """Recompute the attention probabilities; this takes half the FLOPs of the forward pass."""
        trace, half = self.mesh.trace, self.flops(qkv, self.seen) // 2
        empty, masks = self.mesh.empty, self._masks(micro)
        with trace.scope(phase="recompute"), trace.span("attention", "attention", half):
            return attend_again(qkv, self.tokens, self.form, empty, **masks)

    def _masks(self, micro: Microbatch) -> dict[str, Any]:
        padding, starts = self.padding(micro, 0), self.starts(micro)
        mask = AttentionMask(self.causal, padding, self.window, starts)
        return {"drop": self._drop(micro), "mask": mask}

    def _drop(self, micro: Microbatch) -> Mask | None:
        """Return the dropout `Mask` of this rank's probabilities [B, heads * T * T], or `None`."""
        if not self.drops(micro):
            return None
        square, heads = self.tokens**2, self.heads()
        columns = range(heads.start * square, heads.stop * square)
        samples, width = self.samples(micro), self.sizes.heads * square
        rows = range(micro.first + samples.start, micro.first + samples.stop)
        key = micro.dropout_key(self.name, self.seed)
        return Mask(key, self.sizes.dropout, rows, columns, width)
