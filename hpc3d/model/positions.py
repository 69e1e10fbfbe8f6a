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

    The position of a row is the index of its token in the sequence or, if sequences are divided
    into documents, in its document. The table begins with `unused` rows, which belong to no
    position. X has the same layout as the input of the blocks.
    """

    def __init__(self, mesh: Mesh, parameters: Parameters, spec: ModelSpec) -> None:
        sizes, self.layout = spec.sizes, spec.splits["dense"].x
        self.separator = sizes.separator
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
        table, first = self.rows, self._first(micro)
        if self.gathers:
            table = gather_rows(table, micro.cached("embedding.positions", self._here))
        out = self.mesh.empty(x.shape, x.dtype)
        return add_repeated(x, table, first if self.separator is None else 0, out)

    @property
    def gathers(self) -> bool:
        """True if the rows of the table are gathered for this rank's tokens."""
        return self.context.parts > 1 or self.separator is not None

    def weight_grad(self, dx: Array, micro: Microbatch) -> None:
        grad = dx
        if self.separator is None:
            grad = sum_repeated(dx, self._first(micro), self.context.tokens)
        if self.gathers:
            here = micro.cached("embedding.positions", self._here)
            order = micro.cached("embedding.positions.order", self._order)
            grad = scatter_rows(grad, here, order, self.rows.shape)
        total = self.table.grad[self.unused :]
        total += grad

    def _here(self, micro: Microbatch) -> np.ndarray:
        """Return the positions of the tokens in this rank's virtual sequences.

        In sequences of documents, return the positions, within the documents, of this rank's rows.
        """
        if self.separator is None:
            return self.context.positions(self.mesh.coord(CONTEXT))
        starts = micro.document_starts(self.context, self.separator)
        everywhere = np.broadcast_to(np.arange(self.context.length), (1, self.context.length))
        positions = np.repeat(self.context.cut(everywhere), len(starts) // self.context.parts, 0)
        return (positions - starts).ravel()[self._rows(micro)]

    def _order(self, micro: Microbatch) -> np.ndarray:
        return order_of(self._here(micro))

    def _first(self, micro: Microbatch) -> int:
        """Return the index of this rank's first token within its virtual sequence."""
        return self._rows(micro).start % self.context.tokens

    def _rows(self, micro: Microbatch) -> slice:
        """Return this rank's rows of X."""
        return self.layout.slices((micro.tokens.size, self.table.shape[1]), self.mesh)[0]
