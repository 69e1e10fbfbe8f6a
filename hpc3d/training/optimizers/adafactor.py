"""Adafactor: the second moment of a matrix's gradient is factored into row and column means.

For update t of a matrix w with gradient g, learning rate lr and weight decay `decay`:

    R_i = b R_i + (1 - b) (mean_j g_ij^2 + eps);  C_j likewise over i;  b = 1 - t^-0.8
    V_ij = R_i C_j / mean(R);  U = g / sqrt(V);  w = (1 - lr decay) w - lr U / max(1, rms(U))

Shazeer and Stern, arXiv:1804.04235, algorithms 4 and 5, with the configured learning rate and
without momentum.  The second moment of a vector is not factored.

The means are over the unsharded matrix. Row sums are all-reduced over the axes that shard the
columns, column sums and the sum of R over the axes that shard the rows, and the sum of U^2 over
all of these axes. Two collective calls per axis reduce the sums of all matrices. For a block A x
B, a rank receives 2 (1 - 1/g) (A + 1) elements if g ranks shard the columns, and 2 (1 - 1/g) (B +
2) if g ranks shard the rows, for each expert of a stack.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from hpc3d.ops.factored import descend_scaled, sum_squares_of_lines, sum_squares_scaled
from hpc3d.training.optimizers.optimizer import Optimizer, StateSpec, is_matrix, is_vector

if TYPE_CHECKING:
    from hpc3d.arrays.array import Array
    from hpc3d.comm.mesh import Mesh
    from hpc3d.model.parameters import Parameter, WholeMatrix

_Sum = tuple["Array", Iterable[str]]  # (local partial sum, axes to all-reduce over)


class _Step(NamedTuple):
    """Factored update U of a matrix w: U[i, j] = rows[i] grad[i, j] columns[j]."""

    item: Parameter
    arrays: tuple[Array, Array | None, Array]
    keep: float
    rows: Array
    columns: Array
    axes: tuple[str, ...]

    def squares(self) -> Array:
        """Return the sum of the squared updates U^2 over this rank's block."""
        sums = np.empty_like(self.rows.sum(0))
        sum_squares_scaled(self.arrays[2], self.rows, self.columns, sums)
        return sums

    def descend(self, factor: Array) -> None:
        value, master, grad = self.arrays
        descend_scaled(value, master, grad, self.rows * factor, self.columns, self.keep)


class _VectorStep(NamedTuple):
    """Update U (`update`) of a vector, or of this rank's slice of a sharded vector."""

    item: Parameter
    arrays: tuple[Array, Array | None, Array]
    keep: float
    update: Array
    axes: tuple[str, ...]

    def squares(self) -> Array:
        return (self.update * self.update)[None].sum(1)

    def descend(self, factor: Array) -> None:
        value, master, _ = self.arrays
        exact = value if master is None else master
        exact *= self.keep
        exact -= self.update * factor
        if master is not None:
            value[...] = exact


class Adafactor(Optimizer):
    EPSILON, LARGEST, EXPONENT = 1e-30, 1.0, -0.8  # eps, threshold of rms(U), exponent of t in b
    STATES = (
        StateSpec("row_means", per=(1, None), of=is_matrix),
        StateSpec("column_means", per=(None, 1), of=is_matrix),
        StateSpec("second", of=is_vector),
    )
    WHOLE_MATRICES = is_matrix

    def update(self, learning_rate: float, scale: float) -> None:
        """Update the parameters, using `scale` times the gradients."""
        self.steps += 1
        decay = learning_rate * self.weight_decay
        # Update within the loop body: `batches` writes offloaded values back when it advances.
        for found in self.batches([self.parameters.matrices], decay):
            matrices = self._matrix_steps(found, scale)
            self._descend([*matrices, *self._vector_steps(decay, scale)], learning_rate)

    def _descend(self, steps: Sequence[_Step | _VectorStep], learning_rate: float) -> None:
        """Update all matrices and vectors by U / max(1, rms(U))."""
        mesh = self.parameters.mesh
        with mesh.trace.span("squares"):
            shares = [(step.squares(), step.axes) for step in steps]
        sums = _summed(mesh, shares)
        with mesh.trace.span("update"):
            for step, squares in zip(steps, sums, strict=True):
                rms = np.sqrt(squares / _elements(step.item))
                step.descend(learning_rate / np.maximum(1.0, rms / self.LARGEST))

    def _move(self, state: Array, mean: Array) -> None:
        """Update the moving average `state` of squared gradients with this step's `mean`."""
        rest = self.steps**self.EXPONENT
        state *= 1 - rest
        state += rest * (mean + self.EPSILON)

    def _matrix_steps(self, found: Sequence[tuple], scale: float) -> list[_Step]:
        """Update the states of all matrices and return the matrices' updates."""
        mesh = self.parameters.mesh
        with mesh.trace.span("squares"):
            rows, columns = self._squares_of_lines(found, scale)
        row_sums = _summed(mesh, rows)
        with mesh.trace.span("means"):
            for (part, _, states, _), squares in zip(found, row_sums, strict=True):
                self._move(states["row_means"], squares / part.item.shape[-1])
            totals = [
                (states["row_means"].sum(0), axes)
                for (_, _, states, _), (_, axes) in zip(found, columns, strict=True)
            ]
        sums = _summed(mesh, [*columns, *totals])
        with mesh.trace.span("means"):
            every = zip(found, sums[: len(found)], sums[len(found) :], strict=True)
            return [self._matrix_step(*matrix, *lines, scale) for matrix, *lines in every]

    def _squares_of_lines(
        self, found: Sequence[tuple], scale: float
    ) -> tuple[list[_Sum], list[_Sum]]:
        """Return this rank's partial sums of squared gradients per row and per column."""
        rows, columns = [], []
        for part, (_, _, grad), states, _ in found:
            of_rows = np.empty_like(states["row_means"])
            of_columns = np.empty_like(states["column_means"])
            sum_squares_of_lines(grad, scale, of_rows, of_columns)
            rows.append((of_rows, part.layout[-1]))
            columns.append((of_columns, (*part.layout[0], *part.layout.owned)))
        return rows, columns

    def _matrix_step(
        self,
        part: WholeMatrix,
        arrays: tuple[Array, Array | None, Array],
        states: dict[str, Array],
        keep: float,
        squares: Array,
        total: Array,
        scale: float,
    ) -> _Step:
        """Compute a matrix's update from the column sums of g^2 and the sum of its row means."""
        count = _rows(part.item)
        self._move(states["column_means"], squares / count)
        scales = np.sqrt(total / count / states["row_means"]) * scale
        axes = (*part.layout[0], *part.layout[-1], *part.layout.owned)
        return _Step(part.item, arrays, keep, scales, 1 / np.sqrt(states["column_means"]), axes)

    def _vector_steps(self, decay: float, scale: float) -> Iterator[_VectorStep]:
        """Update the second moments of all vectors and yield the vectors' updates."""
        pieces = zip(self.parameters.pieces, self.pieces(decay), strict=True)
        for piece, ((value, master, grad), states, keep) in pieces:
            scaled, second = grad * scale, states["second"]
            self._move(second, scaled * scaled)
            update = scaled / np.sqrt(second)
            sizes = [self.parameters.slices[item].own for item in piece.items]
            for item, edges in zip(piece.items, pairwise(accumulate(sizes, initial=0))):
                part = slice(*edges)
                exact = None if master is None else master[part]
                arrays = value[part], exact, grad[part]
                yield _VectorStep(item, arrays, keep, update[part], self._axes_of(item))

    def _axes_of(self, item: Parameter) -> tuple[str, ...]:
        """Return the mesh axes over which the update of a vector is distributed."""
        replicas = item.replicas if self.parameters.shared_out(item) else ()
        layout = item.updated_layout
        return (*(axis for dim in layout for axis in dim), *layout.owned, *replicas)


def _rows(item: Parameter) -> int:
    """Return the number of rows of a matrix, excluding padding."""
    return item.rows or item.shape[0]


def _elements(item: Parameter) -> int:
    """Return the number of elements in a vector, a matrix, or one matrix of a stack."""
    return _rows(item) * (item.shape[-1] if is_matrix(item.name, item.shape) else 1)


def _summed(mesh: Mesh, shares: Sequence[_Sum]) -> list[Array]:
    """All-reduce arrays over their axes, with one call per axis for all arrays."""
    sums = [array for array, _ in shares]
    for axis in mesh.sizes:
        along = [index for index, (_, axes) in enumerate(shares) if axis in axes]
        if mesh.size(axis) == 1 or not along:
            continue
        flat = np.concatenate([sums[index].ravel() for index in along])
        total = mesh.comm(axis).all_reduce(flat).wait()
        edges = pairwise(accumulate((sums[index].size for index in along), initial=0))
        for index, (start, stop) in zip(along, edges, strict=True):
            sums[index] = total[start:stop].reshape(sums[index].shape)
    return sums
