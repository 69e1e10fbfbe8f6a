"""The qkv product of grouped-query attention, with separate weights for q, k and v.

Each rank computes a single product of X and the columns [Wq | Wk | Wv] of its heads, ordered as in
`hpc3d.ops.attention`. The ranks along the mesh axes of n shard the columns. If the number of KV
heads is not divisible by the number of these ranks, the number of ranks must be a multiple of the
number of KV heads. Wk and Wv are then replicated along n, and ranks whose query heads share a KV
head use the same columns. Example with 4 query heads and 2 KV heads:

    over 2 ranks    q0 q1 k0 v0             q2 q3 k1 v1
    over 4 ranks    q0 k0 v0    q1 k0 v0    q2 k1 v1    q3 k1 v1

The gradient of a replicated Wk or Wv is a partial sum on each rank, zero in the columns that the
rank did not use.  It is reduced over the mesh axes of n at the end of the step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from hpc3d.arrays.array import Array, SavedActivation, SavedWeight
from hpc3d.model.layers import Linear, gradient, immediately, row_axes
from hpc3d.ops.column_blocks import accumulate_columns, join_columns
from hpc3d.ops.rows import sum_rows
from hpc3d.tensor.layout import Layout
from hpc3d.tensor.matmul import Saved

if TYPE_CHECKING:
    from hpc3d.model.parameters import Parameter, Parameters
    from hpc3d.model.spec import ModelSizes
    from hpc3d.tensor.matmul import Matmul, SavedForWeight


class _Part(NamedTuple):
    """Weight and bias of q, k or v.

    `needed` is the slice of weight columns that this rank multiplies, and `joined` is the slice of
    the rank's result [q | k | v] that receives the product.
    """

    weight: Parameter
    bias: Parameter | None
    needed: slice
    joined: slice


class GroupedSaved(NamedTuple):
    """Data saved for the backward pass of the qkv product: X and the gathered W.

    `w` is `None` if W is not saved, or if gathering W needs no communication. In both cases, the
    backward pass reassembles W from `weights`, so that microbatches in flight do not each store a
    copy of W.
    """

    x: SavedActivation
    w: SavedWeight | None
    kept: str
    weights: list[SavedWeight]


class GroupedQkv(Linear):
    """Linear layer [q | k | v] = X [Wq | Wk | Wv] + b, computed by a sharded `matmul`."""

    def __init__(
        self,
        parameters: Parameters,
        name: str,
        sizes: ModelSizes,
        matmul: Matmul,
        std: float,
        biased: bool,
    ) -> None:
        self.mesh, self.matmul, self.width = matmul.mesh, matmul, sizes.form.width
        self.across = matmul.split.y[1]
        self.parts: list[_Part] = []
        start = 0
        for letter, heads in ("q", sizes.heads), ("k", sizes.kv_heads), ("v", sizes.kv_heads):
            shape = sizes.hidden, heads * self.width
            weight, bias = self._added(parameters, f"{name}.{letter}", shape, std, biased)
            needed = self._needed(heads)
            joined = slice(start, start + needed.stop - needed.start)
            self.parts.append(_Part(weight, bias, needed, joined))
            start = joined.stop
        self.columns = start

    def _added(
        self,
        parameters: Parameters,
        name: str,
        shape: tuple[int, int],
        std: float,
        biased: bool,
    ) -> tuple[Parameter, Parameter | None]:
        """Register a weight and a bias, sharded along n if possible and replicated otherwise."""
        split, how = self.matmul.split, gradient(self.matmul)
        weight, bias, rows = split.w, Layout(" ".join(self.across)), row_axes(split.y)
        if not self._is_cut(shape[1] // self.width):
            weight, bias = _uncut(weight), _uncut(bias)
            how["grad_layout"] = _uncut(how["grad_layout"])
            how["partial"] += self.across
            rows += self.across
        return (
            parameters.add(f"{name}.weight", shape, weight, std=std, decay=True, **how),
            parameters.add(f"{name}.bias", shape[1:], bias, partial=rows) if biased else None,
        )

    def _is_cut(self, heads: int) -> bool:
        return heads % self.mesh.count(self.across) == 0

    def _needed(self, heads: int) -> slice:
        """Return the slice of the stored weight block's columns that this rank multiplies.

        The unsharded weight has `heads` heads.
        """
        members = self.mesh.count(self.across)
        if self._is_cut(heads):
            return slice(0, heads // members * self.width)
        head = self.mesh.index(self.across) * heads // members
        return slice(head * self.width, (head + 1) * self.width)

    def forward(  # type: ignore[override]
        self, x: Array
    ) -> tuple[Array, GroupedSaved]:
        """Return [q | k | v] and the data saved for the backward pass."""
        weights = self._weights()
        biases = [part.bias.value for part in self.parts if part.bias]
        b = self._joined(biases) if biases else None
        y, saved = self.affine(x, self._joined(weights), b)
        if "w" in saved.kept and self.matmul.moves_w:
            return y, GroupedSaved(*saved, weights)
        return y, GroupedSaved(saved.x, None, saved.kept.replace("w", ""), weights)

    def _joined(self, blocks: Sequence[Array]) -> Array:
        """Concatenate this rank's columns of the q, k and v weights (or biases) in `blocks`."""
        first = blocks[0]
        out = self.mesh.empty((*first.shape[:-1], self.columns), first.dtype)
        needed = (block[..., part.needed] for block, part in zip(blocks, self.parts, strict=True))
        with self.mesh.trace.span("join"):
            return join_columns(out, *needed)

    def _weights(self) -> list[Array]:
        return [part.weight.value for part in self.parts]

    def stored_w(self, saved: Any = None) -> Array:
        return self._joined(self._weights() if saved is None else saved.weights)

    def backward(  # type: ignore[override]
        self, dy: Array, saved: GroupedSaved, defer: Callable[..., None] = immediately
    ) -> Array:
        x, w, kept, weights = saved
        w = self._joined(weights) if w is None else w
        return super().backward(dy, Saved(x, w, kept), defer)

    def weight_grad(self, dy: Array, rest: SavedForWeight) -> None:
        self.reduce_weight_grad(dy, rest)

    def add_grads(self, dy: Array, dw: Array) -> None:
        """Accumulate the gradients of all weights and biases."""
        with self.mesh.trace.span("gradient"):
            sums: Any = sum_rows(dy) if self.parts[0].bias else None
            for weight, bias, needed, joined in self.parts:
                accumulate_columns(weight.grad, needed, dw, joined.start)
                if bias:
                    bias.grad[needed] += sums[joined]


def _uncut(layout: Layout) -> Layout:
    """Return a copy of the layout in which the columns are not sharded."""
    return layout.with_dims(*layout[:-1], ())
