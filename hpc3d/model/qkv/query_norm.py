"""Normalization of queries and keys, between the QKV projection and the rotary embedding."""

from __future__ import annotations

from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

from hpc3d.model.layers import NormSaved
from hpc3d.ops.column_blocks import copy_block
from hpc3d.tensor.layout import Layout

if TYPE_CHECKING:
    from hpc3d.arrays.array import Array
    from hpc3d.comm.mesh import Mesh
    from hpc3d.model.parameters import Parameter, Parameters
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
        heads = _of_heads(layout)
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
            y, kept = norm.forward(self._rows(vectors))
            with self.mesh.trace.span("join"):
                copy_block(vectors, y.reshape(vectors.shape))
            saved.append(kept)
        return QueryNormSaved(*saved)

    def backward(self, dqkv: Array, saved: QueryNormSaved) -> None:
        """Replace the gradients of the normalized q and k in `dqkv` by those of q and k."""
        for norm, vectors, kept in zip(self.norms, self._vectors(dqkv), saved, strict=True):
            dx = norm.backward(self._rows(vectors), kept, residual=None)
            with self.mesh.trace.span("join"):
                copy_block(vectors, dx.reshape(vectors.shape))

    def _vectors(self, qkv: Array) -> tuple[Array, Array]:
        """Return views of q and k with the shape [rows, groups of heads, vectors, D]."""
        (parts, turned), width = self.form.turned(qkv.shape[1]), self.form.width
        vectors = qkv.reshape(len(qkv), qkv.shape[1] // (parts * width), parts, width)
        queries = turned * self.form.queries // (self.form.queries + 1)
        return vectors[:, :, :queries], vectors[:, :, queries:turned]

    def _rows(self, vectors: Array) -> Array:
        """Return a contiguous matrix whose rows are normalized: the vectors."""
        return self._copied(vectors, (prod(vectors.shape[:3]), self.form.width))

    def _copied(self, vectors: Array, shape: tuple[int, int]) -> Array:
        out = self.mesh.empty(shape, vectors.dtype)
        with self.mesh.trace.span("join"):
            copy_block(out.reshape(vectors.shape), vectors)
        return out


class ProjectionNorm(HeadNorm):
    """Norm of q over all query heads of a token, and of k over all key heads, as in OLMo 2.

    Ranks that shard the heads all-reduce the sums over features (`LayerNorm`). If several ranks
    share a KV head, each of its features occurs `copies` times in these sums.
    """

    def __init__(self, mesh: Mesh, parameters: Parameters, spec: ModelSpec, name: str) -> None:
        sizes, layout = spec.sizes, spec.splits["dense"].y
        self.mesh, self.form = mesh, sizes.form_over(mesh.count(layout[1]))
        queries, keys = (heads * sizes.head_dim for heads in (sizes.heads, sizes.kv_heads))
        norm_type: Any = spec.family.norm
        add = partial(norm_type, mesh, parameters, epsilon=sizes.epsilon)
        self.norms = [add(f"{name}.q_norm", queries, layout)]
        copies = mesh.count(layout[1]) // sizes.kv_heads
        if copies <= 1:
            self.norms.append(add(f"{name}.k_norm", keys, layout))
            return
        norm = add(f"{name}.k_norm", keys, _of_heads(layout))
        assert not norm.centred
        norm.axes = [axis for axis in layout[1] if mesh.size(axis) > 1]
        norm.width = keys * copies
        first = mesh.index(layout[1]) // copies * sizes.head_dim
        norm.gamma = _Columns(norm.gamma, slice(first, first + sizes.head_dim))
        self.norms.append(norm)

    @staticmethod
    def weights(sizes: ModelSizes) -> int:
        return (sizes.heads + sizes.kv_heads) * sizes.head_dim

    def _rows(self, vectors: Array) -> Array:
        return self._copied(vectors, (len(vectors), prod(vectors.shape[1:])))


class _Columns:
    """Some elements of a parameter that is not sharded, of which a rank uses only these."""

    def __init__(self, whole: Parameter, columns: slice) -> None:
        self.whole, self.columns = whole, columns

    value = property(lambda self: self.whole.value[self.columns])
    grad = property(lambda self: self.whole.grad[self.columns])


def _of_heads(layout: Layout) -> Layout:
    """Return the layout of a matrix with one row per token and head, given that of qkv."""
    return Layout(" ".join(layout[0] + layout[1]), "", owned=" ".join(layout.owned))
