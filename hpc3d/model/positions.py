"""Learned position embeddings: a table with one row per position in a sequence."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from hpc3d.comm.mesh import CONTEXT, Mesh
from hpc3d.model.layers import row_axes
from hpc3d.ops.embedding import gather_rows, order_of, scatter_rows
from hpc3d.ops.rows import add_repeated, sum_repeated
from hpc3d.tensor.layout import Layout

if TYPE_CHECKING:
    from hpc3d.arrays.array import Array
    from hpc3d.model.microbatch import Microbatch
    from hpc3d.model.parameters import Parameters
    from hpc3d.model.spec import ModelSpec


class Positions:
    """Learned position embedding, which adds W[position, h] to each row of X[m, h].

    The position of a row is the index of its token in the sequence. The table begins with `unused`
    rows, which belong to no position. X has the same layout as the input of the blocks.
    """

    def __init__(self, mesh: Mesh, parameters: Parameters, spec: ModelSpec) -> None:
        sizes, self.layout = spec.sizes, spec.splits["dense"].x
        self.mesh, self.context = mesh, spec.context
        self.unused = spec.family.unused_positions
        shape = self.unused + sizes.sequence, sizes.hidden
        how: dict[str, Any] = {"std": sizes.std, "decay": True}
        columns = Layout("", " ".join(self.layout[1]))
        self.table = parameters.add(
            "embedding.position", shape, columns, partial=row_axes(self.layout), **how
        )

    @property
    def rows(self) -> Array:
        """Embeddings of the positions, [T, h]."""
        return self.table.value[self.unused :]

    def add(self, x: Array, micro: Microbatch) -> Array:
        """Return X plus the position embeddings as a new array."""
        table = self.rows
        if self.context.parts > 1:
            table = gather_rows(table, micro.cached("embedding.positions", self._here))
        out = self.mesh.empty(x.shape, x.dtype)
        return add_repeated(x, table, self._first(micro), out)

    def weight_grad(self, dx: Array, micro: Microbatch) -> None:
        grad = sum_repeated(dx, self._first(micro), self.context.tokens)
        if self.context.parts > 1:
            here = micro.cached("embedding.positions", self._here)
            order = micro.cached("embedding.positions.order", self._order)
            grad = scatter_rows(grad, here, order, self.rows.shape)
        total = self.table.grad[self.unused :]
        total += grad

    def _here(self, micro: Microbatch) -> np.ndarray:
        """Return the sequence positions of the tokens in this rank's virtual sequences."""
        return self.context.positions(self.mesh.coord(CONTEXT))

    def _order(self, micro: Microbatch) -> np.ndarray:
        return order_of(self._here(micro))

    def _first(self, micro: Microbatch) -> int:
        """Return the index of this rank's first token within its virtual sequence."""
        shape = micro.tokens.size, self.table.shape[1]
        return self.layout.slices(shape, self.mesh)[0].start % self.context.tokens
