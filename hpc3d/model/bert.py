"""Embeddings and head of BERT (Devlin et al. 2019, arXiv:1810.04805).

The embeddings include segment embeddings and a norm. The head predicts masked tokens.

Next-sentence prediction is omitted, so all tokens are in segment 0. The segment table still has
all rows, so that published weights can be imported and exported completely. RoBERTa (Liu et al.
2019, arXiv:1907.11692) has one segment, and does not use the first rows of the position table.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from hpc3d.arrays.array import Array
from hpc3d.model.gpt2 import Embeddings, Head, LogitsSaved
from hpc3d.model.layers import EmbeddingSaved, Linear, NormSaved, row_axes
from hpc3d.ops.gelu import GELU, gelu_grad
from hpc3d.ops.rows import add_bias, sum_rows
from hpc3d.tensor.layout import Layout
from hpc3d.tensor.matmul import Saved, sharded_matmul

if TYPE_CHECKING:
    from hpc3d.comm.mesh import Mesh
    from hpc3d.model.microbatch import Microbatch
    from hpc3d.model.parameters import Parameter, Parameters
    from hpc3d.model.spec import ModelSpec


class SegmentedSaved(NamedTuple):
    """Data saved for the backward pass of the embeddings (lookup and norm)."""

    lookup: EmbeddingSaved
    norm: NormSaved


class SegmentedEmbeddings(Embeddings):
    """BERT embeddings X[m, h] = dropout(norm(table[token] + position row + segment row 0))."""

    def __init__(
        self, mesh: Mesh, parameters: Parameters, spec: ModelSpec, table: Parameter
    ) -> None:
        super().__init__(mesh, parameters, spec, table)
        sizes, layout = spec.sizes, spec.splits["dense"].x
        shape, columns = (spec.family.segments, sizes.hidden), Layout("", " ".join(layout[1]))
        how: dict[str, Any] = {"std": sizes.std, "decay": True}
        self.segments = parameters.add(
            "embedding.segment", shape, columns, partial=row_axes(layout), **how
        )
        self.norm = spec.family.norm(
            mesh, parameters, "embedding.norm", sizes.hidden, layout, sizes.epsilon
        )

    def forward(self, micro: Microbatch) -> tuple[Array, SegmentedSaved]:
        x, saved = self.placed(micro)
        with self.mesh.trace.span("embedding", "lookup"):
            x = add_bias(x, self.segments.value[0], x)
        x, saved_norm = self.norm.forward(x)
        return self.drop.apply(x, micro, self.shape.hidden), SegmentedSaved(saved, saved_norm)

    def backward(
        self, dx: Array, saved: SegmentedSaved, micro: Microbatch, defer: Callable[..., None]
    ) -> None:
        dx = self.drop.apply(dx, micro, self.shape.hidden)
        dx = self.norm.backward(dx, saved.norm, residual=None)
        defer(self.weight_grad, dx, saved.lookup, micro)

    def weight_grad(self, dx: Array, saved: EmbeddingSaved, micro: Microbatch) -> None:
        with self.mesh.trace.span("embedding", "lookup"):
            first = self.segments.grad[0]
            first += sum_rows(dx)
        super().weight_grad(dx, saved, micro)


class MaskedLogitsSaved(NamedTuple):
    """Data saved for the backward pass of the logits."""

    dense: Saved
    slopes: Array
    rest: LogitsSaved


class MaskedHead(Head):
    """Head of BERT: logits Y[m, v] = norm(gelu(X W + b)) table^T + b', and their cross-entropy.

    Only masked tokens contribute to the cross-entropy. The logits reuse the embedding table, in
    the layout of the embedding lookup. The product with this table therefore requires an input
    with the same layout as X. With the split `Split.alike`, the product X W has this layout.
    """

    def __init__(
        self, mesh: Mesh, parameters: Parameters, spec: ModelSpec, table: Parameter
    ) -> None:
        hidden, alike = spec.sizes.hidden, spec.splits["dense"].alike()
        matmul = sharded_matmul(mesh, alike, spec.keep, reduced=spec.reduced)
        self.gelu = GELU[spec.sizes.gelu]
        self.dense = Linear(parameters, "head.dense", (hidden, hidden), matmul, spec.sizes.std)
        super().__init__(mesh, parameters, spec, table)
        how: dict[str, Any] = {"partial": row_axes(self.layout), "rows": table.rows}
        self.bias = parameters.add("head.bias", table.shape[:1], self.layout.columns, **how)

    def logits(self, x: Array) -> tuple[Array, MaskedLogitsSaved]:
        """Return the logits Y and the data saved for `logits_grad`."""
        h, saved = self.dense.forward(x)
        with self.mesh.trace.span("gelu"):
            g = self.gelu(h, self.mesh.empty(h.shape, h.dtype))
        logits, rest = super().logits(g)
        with self.mesh.trace.span("bias"):
            add_bias(logits, self.bias.value, logits)
        return logits, MaskedLogitsSaved(saved, h, rest)

    def logits_grad(
        self, dlogits: Array, saved: MaskedLogitsSaved, defer: Callable[..., None]
    ) -> Array:
        """Compute the gradient of the head's input X from the gradient of the logits Y."""
        defer(self.bias_grad, dlogits)
        dg = super().logits_grad(dlogits, saved.rest, defer)
        with self.mesh.trace.span("gelu"):
            dh = gelu_grad(saved.slopes, dg)
        return self.dense.backward(dh, saved.dense, defer)

    def bias_grad(self, dlogits: Array) -> None:
        with self.mesh.trace.span("gradient"):
            self.bias.grad += sum_rows(dlogits)
