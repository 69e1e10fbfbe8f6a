"""Sharded matrix product in chunks, whose communication overlaps with computation.

If X is gathered, dimension k is split into chunks: the next chunk of X is gathered while the
current chunk is multiplied.  If Y is reduced, dimension n is split into chunks: a chunk of Y is
reduced while the next chunk is computed (Wang et al., ASPLOS 2023; Jangda et al. 2022,
arXiv:2105.05720).  With two chunks of each dimension:

    gather     X_0   X_1
    multiply         Y_0 = X_0 W_00   Y_1 = X_0 W_01   Y_0 += X_1 W_10   Y_1 += X_1 W_11
    reduce                                                               Y_0               Y_1

In the backward pass, dY is gathered in chunks.  dX is not split, because its reduction already
overlaps with the computation of dW.  A chunk has all rows of a block, so chunks are gathered and
reduced like complete blocks, and the number of received bytes is the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from hpc3d.comm.communicator import Pending, ready
from hpc3d.ops.column_blocks import join_columns
from hpc3d.ops.product import accumulate_product
from hpc3d.tensor.matmul import Matmul, Saved, SavedForWeight, sharded_matmul
from hpc3d.tensor.rounding import EXACT

if TYPE_CHECKING:
    from numpy.typing import DTypeLike

    from hpc3d.arrays.array import Array
    from hpc3d.comm.mesh import Mesh
    from hpc3d.tensor.layout import Layout
    from hpc3d.tensor.split import Split

_ALIGNED = 64  # the chunks of wide blocks start at multiples of this number of columns


class _Side(NamedTuple):
    """Layout and foreign axes of X or Y, and the numbers of chunks of its gather and reduction."""

    layout: Layout
    foreign: Sequence[str]
    gathered: int
    reduced: int


class Chunked(Matmul):
    """Sharded matrix product that gathers X and dY and reduces Y in chunks.

    X and dY are saved as lists of chunks, and dW = X' dY is computed from these chunks.
    """

    def __init__(
        self,
        mesh: Mesh,
        split: Split,
        keep: str,
        chunks: int,
        fused: bool,
        reduced: DTypeLike | None = None,
    ) -> None:
        super().__init__(mesh, split, keep, False, EXACT, fused, reduced)
        of_x = chunks if {*self.axes["n"]} & {*split.x.axes} else 1
        of_dy = chunks if {*self.axes["k"]} & {*split.y.axes} else 1
        self.x_side = _Side(split.x, self.axes["n"], of_x, 1)
        self.y_side = _Side(split.y, self.axes["k"], of_dy, chunks if self.axes["k"] else 1)

    def forward_saving(self, x: Array, w: Array, **epilogue: Any) -> tuple[Array, Saved]:
        sides = self.x_side, self.y_side
        xs, b, ys = self._in_chunks(x, self._gather_w(w, x), *sides, **epilogue)
        a: Any = xs if "x" in self.keep else x
        saved = Saved(a, b if "w" in self.keep else w, self.keep)
        return self._joined([y.wait() for y in ys]), saved

    def backward_input(
        self, saved: Saved, dy: Array, **epilogue: Any
    ) -> tuple[Pending, SavedForWeight]:
        assert not epilogue
        w = ready(saved.w) if "w" in saved.kept else self._gather_w(saved.w, saved.x)
        turned = w.then(lambda block: block.T)
        dys: Any
        dys, _, (dx,) = self._in_chunks(dy, turned, self.y_side, self.x_side)
        return dx, SavedForWeight(saved.x, dys, saved.kept)

    def backward_weight(self, rest: SavedForWeight) -> Pending:
        xs, dys = self._chunks_of(rest)
        inner, outer = _ends(xs), _ends(dys)
        shape = inner[-1].stop, *xs[0].shape[1:-1], outer[-1].stop
        dw = self.send_buffer(shape, self.dw_type(xs[0].dtype), self.axes["m"])
        for x, rows in zip(xs, inner):
            for dy, columns in zip(dys, outer):
                self.multiply(x.T, dy, (), dw[rows][..., columns])
        return self.reduce_w(dw)

    def _rows_of_w(self, x: Any) -> int:
        return _ends(x if isinstance(x, list) else [x])[-1].stop

    def add_w(self, rest: SavedForWeight, grad: Array, bias_grad: Array | None = None) -> None:
        xs, dys = self._chunks_of(rest)
        for x, rows in zip(xs, _ends(xs)):
            for dy, columns in zip(dys, _ends(dys)):
                with self._span(x.T, dy):
                    accumulate_product(grad[rows, columns], x.T, dy, bias_grad)
            bias_grad = None

    def _chunks_of(self, rest: SavedForWeight) -> tuple[Any, Any]:
        return rest.x if "x" in rest.kept else [self._gather_x(rest.x).wait()], rest.dy

    def _in_chunks(
        self, x: Array, w: Pending, source: _Side, target: _Side, **epilogue: Any
    ) -> tuple[list[Array], Array, list[Pending]]:
        """Compute Y = X W: gather chunks of X as `source` describes, and reduce chunks of Y.

        Returns the gathered chunks of X, the gathered W, and a `Pending` for each chunk of Y,
        which is reduced as `target` describes.  The `epilogue` may contain a bias and a residual
        if Y has a single chunk.
        """
        inner = _parts(x.shape[-1], source.gathered)
        pending, b = self._gather_columns(x, inner[0], source), w.wait()
        outer = _parts(b.shape[-1], target.reduced)
        xs: list[Array] = []
        ys: list[Any] = [epilogue.get("residual")] * len(outer)
        for number, rows in enumerate(inner):
            xs.append(pending.wait())
            last = number + 1 == len(inner)
            if not last:
                pending = self._gather_columns(x, inner[number + 1], source)
            for index, columns in enumerate(outer):
                factors = xs[-1], b[rows][..., columns]
                bias = epilogue.get("bias") if last else None
                y = self._added(ys[index], factors, target.foreign, bias)
                ys[index] = self.reduce(y, target.layout, target.foreign) if last else y
        return xs, b, ys

    def _gather_columns(self, x: Array, part: slice, side: _Side) -> Pending:
        chunk = x[..., part]
        if chunk.shape != x.shape:
            with self.mesh.trace.span("join"):
                chunk = join_columns(self.mesh.empty(chunk.shape, chunk.dtype), chunk)
        return self.gather(chunk, side.layout, side.foreign)

    def _added(
        self, total: Any, factors: tuple[Array, Array], foreign: Sequence[str], bias: Any
    ) -> Array:
        """Return the product of two factors, plus `total` and `bias` if they are not `None`."""
        if self.mesh.pool.on_device:
            return self.multiply(*factors, foreign, residual=total, bias=bias)
        y = self.multiply(*factors, foreign)
        if total is not None:
            y += total
        return y

    def _joined(self, blocks: list[Array]) -> Array:
        if len(blocks) == 1:
            return blocks[0]
        columns = _ends(blocks)[-1].stop
        out = self.mesh.empty((*blocks[0].shape[:-1], columns), blocks[0].dtype)
        with self.mesh.trace.span("join"):
            return join_columns(out, *blocks)


def _parts(size: int, most: int) -> list[slice]:
    """Split `size` columns into at most `most` chunks; return the slice of each chunk."""
    count = min(most, size)
    unit = _ALIGNED if size >= _ALIGNED * count else 1
    ends = [size * number // count // unit * unit for number in range(count)]
    return [slice(*each) for each in pairwise([*ends, size])]


def _ends(chunks: Sequence[Array]) -> list[slice]:
    """Return the column slice of each chunk in the concatenated matrix."""
    ends = [0, *accumulate(chunk.shape[-1] for chunk in chunks)]
    return [slice(*each) for each in pairwise(ends)]


def chunked_matmul(mesh: Mesh, split: Split, chunks: int, keep: str = "xw", **how: Any) -> Matmul:
    """Create a sharded matrix product that is split into up to `chunks` chunks.

    The product is not split if X is not gathered and Y is not reduced.  The other arguments are
    passed to `hpc3d.tensor.matmul.sharded_matmul`; panels, owners, a transposed W and rounding
    are not supported if `chunks` is greater than 1.
    """
    moved = [axis for axis in split.n.split() if axis in split.x.axes] + split.k.split()
    if chunks == 1 or all(mesh.size(axis) == 1 for axis in moved):
        return sharded_matmul(mesh, split, keep, **how)
    fused = mesh.pool.on_device and not how.get("stacked")
    return Chunked(mesh, split, keep, chunks, fused, how.get("reduced"))
