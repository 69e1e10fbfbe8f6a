"""Normalization of queries and keys, between the QKV projection and the rotary embedding."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from hpc3d.ops.column_blocks import copy_block
from hpc3d.tensor.layout import Layout

if TYPE_CHECKING:
    from hpc3d.arrays.array import Array
    from hpc3d.comm.mesh import Mesh
    from hpc3d.model.layers import NormSaved
    from hpc3d.model.parameters import Parameters
    from hpc3d.model.spec import ModelSizes, ModelSpec


class QueryNormSaved(NamedTuple):
    """Data saved for the backward pass of the norms of q and k."""

    q: NormSaved
    k: NormSaved


class HeadNorm:
    """Norm of the q and k vectors of each head (Henry et al. 2020, arXiv:2010.04245), as in Qwen3.

    All query heads share one weight vector gamma[D], and all key heads another one. Each rank has
    complete heads, so no communication is needed. Ranks that share a KV head have partial
    gradients of its keys. The norm's gradients are linear in them, so the sums over ranks are
    correct.
    """

    def __init__(self, mesh: Mesh, parameters: Parameters, spec: ModelSpec, name: str) -> None:
        sizes, layout = spec.sizes, spec.splits["dense"].y
        self.mesh, self.form = mesh, sizes.form_over(mesh.count(layout[1]))
        heads = Layout(" ".join(layout[0] + layout[1]), "", owned=" ".join(layout.owned))
        self.norms = [
            spec.family.norm(
                mesh, parameters, f"{name}.{each}_norm", sizes.head_dim, heads, sizes.epsilon
            )
            for each in "qk"
        ]

    @staticmethod
    def weights(sizes: ModelSizes) -> int:
        """Return the number of elements of both weight vectors."""
        return 2 * sizes.head_dim

    def forward(self, qkv: Array) -> QueryNormSaved:
        """Normalize q and k of `qkv` in place; return the data saved for the backward pass."""
        saved = []
        for norm, vectors in zip(self.norms, self._vectors(qkv), strict=True):
            y, kept = norm.forward(self._copied(vectors))
            with self.mesh.trace.span("join"):
                copy_block(vectors, y.reshape(vectors.shape))
            saved.append(kept)
        return QueryNormSaved(*saved)

    def backward(self, dqkv: Array, saved: QueryNormSaved) -> None:
        """Replace the gradients of the normalized q and k in `dqkv` by those of q and k."""
        for norm, vectors, kept in zip(self.norms, self._vectors(dqkv), saved, strict=True):
            dx = norm.backward(self._copied(vectors), kept, residual=None)
            with self.mesh.trace.span("join"):
                copy_block(vectors, dx.reshape(vectors.shape))

    def _vectors(self, qkv: Array) -> tuple[Array, Array]:
        """Return views of q and k with the shape [rows, groups of heads, vectors, D]."""
        (parts, turned), width = self.form.turned(qkv.shape[1]), self.form.width
        vectors = qkv.reshape(len(qkv), qkv.shape[1] // (parts * width), parts, width)
        queries = turned * self.form.queries // (self.form.queries + 1)
        return vectors[:, :, :queries], vectors[:, :, queries:turned]

    def _copied(self, vectors: Array) -> Array:
        """Return the vectors as the rows of a contiguous matrix."""
        rows = vectors.size // self.form.width
        out = self.mesh.empty((rows, self.form.width), vectors.dtype)
        with self.mesh.trace.span("join"):
            copy_block(out.reshape(vectors.shape), vectors)
        return out
