"""The two ends of models that continue a text: token and position embeddings; final norm, head
and loss.

Radford et al. 2019, and Llama without a table of positions.  Between them lie the blocks
(hpc3d.model.block); hpc3d.model.stage puts the three together.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from hpc3d.comm.mesh import CONTEXT
from hpc3d.model.layers import Dropout, Embedding, NormSaved, gradient, owned, row_axes
from hpc3d.model.loss import CrossEntropy, LossSaved
from hpc3d.ops.embedding import gather_rows, scatter_rows
from hpc3d.ops.rows import add_repeated, sum_repeated
from hpc3d.tensor.layout import Layout
from hpc3d.tensor.matmul import Matmul, Saved

if TYPE_CHECKING:
    from hpc3d.arrays.array import Array
    from hpc3d.comm.mesh import Mesh
    from hpc3d.model.layers import EmbeddingSaved
    from hpc3d.model.microbatch import Microbatch
    from hpc3d.model.parameters import Parameter, Parameters
    from hpc3d.model.spec import ModelSpec
    from hpc3d.tensor.matmul import SavedForWeight


def add_table(
    mesh: Mesh, parameters: Parameters, spec: ModelSpec, name: str, **how: Any
) -> Parameter:
    """A table W[v, h]: one row per token, padded so that the vocabulary divides over its axes."""
    matmul, sizes = Matmul(mesh, spec.splits["dense"].without_panels().next()), spec.sizes
    count = mesh.count(matmul.dw_layout[0])
    rows = -(-sizes.vocabulary // count) * count  # type: ignore[operator]  # a number by now
    shape = (rows, sizes.hidden)
    how |= {"std": sizes.std, "decay": True, "rows": sizes.vocabulary, **gradient(matmul)}
    return parameters.add(name, shape, matmul.w_layout, **how)


class Embeddings:
    """X[m, h] = table[token] + positions, unless these are rotary, and dropout."""

    name = "embedding"

    def __init__(
        self, mesh: Mesh, parameters: Parameters, spec: ModelSpec, table: Parameter
    ) -> None:
        shape, split = spec.sizes, spec.splits["dense"]
        self.mesh, self.shape = mesh, shape
        self.lookup = Embedding(mesh, table, split.without_panels().next())
        self.positions = None if spec.family.rotary else Positions(mesh, parameters, spec)
        self.drop = Dropout(mesh, "embedding.drop", split.x, spec)

    def forward(self, micro: Microbatch) -> tuple[Array, EmbeddingSaved]:
        x, saved = self.lookup.forward(micro)
        if self.positions:
            x = self.positions.add(x, micro)
        return self.drop.apply(x, micro, self.shape.hidden), saved

    def backward(
        self, dx: Array, saved: EmbeddingSaved, micro: Microbatch, defer: Callable[..., None]
    ) -> None:
        dx = self.drop.apply(dx, micro, self.shape.hidden)
        defer(self.weight_grad, dx, saved, micro)

    def weight_grad(self, dx: Array, saved: EmbeddingSaved, micro: Microbatch) -> None:
        if self.positions:
            self.positions.weight_grad(dx, micro)
        self.lookup.backward(dx, saved, micro)


class Positions:
    """A table of positions [T, h], added to X[m, h]; along a context axis a rank has the rows of
    the positions of its tokens."""

    def __init__(self, mesh: Mesh, parameters: Parameters, spec: ModelSpec) -> None:
        sizes, self.layout = spec.sizes, spec.splits["dense"].x
        self.mesh, self.context = mesh, spec.context
        columns, partial = Layout("", " ".join(self.layout[1])), row_axes(self.layout)
        shape, how = (sizes.sequence, sizes.hidden), {"std": sizes.std, "decay": True}
        self.table = parameters.add(
            "embedding.position", shape, columns, partial=partial, **how
        )

    def add(self, x: Array, micro: Microbatch) -> Array:
        """X with the positions of its rows."""
        with self.mesh.trace.span("embedding", "lookup"):
            table = self.table.value
            if self.context.parts > 1:
                table = gather_rows(table, micro.cached("embedding.positions", self.mine))
            out = self.mesh.empty(x.shape, x.dtype)
            return add_repeated(x, table, self.first(micro), out)

    def weight_grad(self, dx: Array, micro: Microbatch) -> None:
        """The gradient of the table: rows of X at the same position are summed."""
        with self.mesh.trace.span("embedding", "lookup"):
            grad = sum_repeated(dx, self.first(micro), self.context.tokens)
            if self.context.parts == 1:
                self.table.grad += grad
                return
            index = micro.cached("embedding.positions", self.mine)
            order = micro.cached("embedding.positions.order", self.order)
            self.table.grad += scatter_rows(grad, index, order, self.table.value.shape)

    def mine(self, micro: Microbatch) -> np.ndarray:
        """The positions of the tokens of this rank's virtual sequences."""
        return self.context.positions(self.mesh.coord(CONTEXT))

    def order(self, micro: Microbatch) -> np.ndarray:
        """Their numbers by position."""
        return np.argsort(self.mine(micro), kind="stable")

    def first(self, micro: Microbatch) -> int:
        """The place in its virtual sequence of the first token of this rank's rows."""
        rows = Layout(" ".join(self.layout[0]), owned=" ".join(self.layout.owned))
        return rows.slices((micro.tokens.size,), self.mesh)[0].start % self.context.tokens


class HeadSaved(NamedTuple):
    """What the backward pass of the head works with."""

    norm: NormSaved
    product: Saved
    loss: LossSaved


class Head:
    """Logits Y[m, v] = norm(X) table' and their cross-entropy."""

    name = "head"

    def __init__(
        self, mesh: Mesh, parameters: Parameters, spec: ModelSpec, table: Parameter
    ) -> None:
        sizes, split = spec.sizes, spec.splits["dense"]
        whole = split.without_panels()
        self.mesh, self.table, self.layout = mesh, table, whole.y
        how = sizes.hidden, split.x, sizes.epsilon
        self.norm = spec.family.norm(mesh, parameters, "head.norm", *how)
        self.matmul = Matmul(mesh, whole, spec.keep, transposed=True)
        vocabulary: Any = sizes.vocabulary  # a number, where a model is built
        self.loss = CrossEntropy(mesh, self.layout[1], vocabulary)

    def forward(self, x: Array, micro: Microbatch) -> tuple[Any, HeadSaved]:
        """The summed loss of this rank's rows, 0 where another rank counts the same rows."""
        x, saved_norm = self.norm.forward(x)
        logits, saved_product = self.matmul.forward_saving(x, self.table.value)
        logits = owned(self.mesh, logits)
        targets = micro.cached("head.targets", self.targets)
        loss, saved_loss = self.loss.forward(logits, targets, micro.factor())
        saved = HeadSaved(saved_norm, saved_product, saved_loss)
        return loss if self.counts() else 0.0, saved

    def targets(self, micro: Microbatch) -> np.ndarray:
        """Those of this rank's rows."""
        return micro.rows(micro.targets, self.layout, self.mesh).ravel().astype(np.int64)

    def backward(self, micro: Microbatch, saved: HeadSaved, defer: Callable[..., None]) -> Array:
        """The gradient of X, of the summed loss times its factor."""
        dlogits = self.loss.backward(saved.loss, micro.factor())
        dx, rest = self.matmul.backward_input(saved.product, dlogits)
        defer(self.weight_grad, rest)
        return self.norm.backward(dx.wait(), saved.norm, residual=None)

    def weight_grad(self, rest: SavedForWeight) -> None:
        if self.matmul.dw_is_complete:
            self.matmul.add_w(rest, self.table.grad)
            return
        self.table.grad += self.matmul.backward_weight(rest).wait()

    def counts(self) -> bool:
        """Whether this rank's rows of the loss are the copy that counts."""
        split = (*row_axes(self.layout), "p")
        return all(self.mesh.coord(axis) == 0 for axis in self.mesh.sizes if axis not in split)
