"""Muon on sharded matrices: Newton-Schulz iterations consist of sharded matrix products.

Let S be the shorter side of a matrix, sharded over s ranks, and L the longer side, sharded over l
ranks.  S_s and L_l denote these shards, and S_sl denotes S sharded over all s l ranks.  An
iteration X = a X + (b G + c G G) X, with G = X X', is three matrix products (hpc3d.tensor.matmul):

    G[S_sl, S]    = X[S_s, L_l] X'[L_l, S_s]       Split(m="s", k="l"), W transposed
    P[S_sl, S]    = b G + c G[S_sl, S] G[S_sl, S]  Split(m="s l")
    P X[S_s, L_l] = P[S_sl, S] X[S_s, L_l]         Split(m="s", n="l")

The last product reuses the X gathered by the first product. Each rank performs 1 / (s l) of the
operations, and receives

    (1 - 1/s) S L / l + (1 - 1/(s l)) S^2 + 2 (1 - 1/l) S^2 / s

elements per iteration: X over s, G over all ranks, and the partial sums and P over l.  No rank
holds more than S L / l elements of X.  If l does not divide the rows of a block, G is all-reduced
over l instead, 2 (1 - 1/l) S^2 / s + (1 - 1/s) S^2 elements in addition to X, and each of these
ranks computes the same product G G.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from hpc3d.ops.update import NEWTON_SCHULZ, NEWTON_SCHULZ_STEPS, SMALLEST_NORM
from hpc3d.tensor.matmul import Split, sharded_matmul
from hpc3d.training.optimizers.muon import Exchange, Muon, owners

if TYPE_CHECKING:
    from hpc3d.arrays.array import Array
    from hpc3d.comm.mesh import Mesh
    from hpc3d.model.parameters import Parameter, WholeMatrix
    from hpc3d.tensor.layout import Layout
    from hpc3d.tensor.matmul import Matmul


class ShardedMuon(Muon):
    """Muon with sharded orthogonalization (`train.orthogonalize = "sharded"`).

    Along axes with `own` storage, complete matrices are still assigned to ranks round-robin.
    """

    def _exchange(self, layout: Layout) -> Exchange:
        mesh = self.parameters.mesh
        return Exchange(mesh, owners(mesh, layout))

    def _orthogonalized(self, whole: Array, count: int, part: WholeMatrix) -> Array:
        mesh = self.parameters.mesh
        out = mesh.empty(whole.shape, whole.dtype, "workspace")
        if count:
            view = _apart(whole[:count], part.item)
            x = mesh.empty(view.shape, whole.dtype, "workspace")
            x[...] = view
            NewtonSchulz(mesh, *_cuts(part)).orthogonalize(_stack(x, part.item))
            _apart(out[:count], part.item)[...] = x
        return out


def _is_tall(item: Parameter) -> bool:
    return item.shape[0] > item.shape[-1] // item.interleaved[0]


def _cuts(part: WholeMatrix) -> tuple[Sequence[str], Sequence[str]]:
    """Return the axes that shard a matrix's shorter side, and those that shard its longer side."""
    rows, columns = part.layout[0], part.layout[-1]
    return (columns, rows) if _is_tall(part.item) else (rows, columns)


def _apart(blocks: Array, item: Parameter) -> Array:
    """Return a 5-D view of blocks [n, a, b] that begins with the dimensions of the shorter side.

    The columns are interleaved: each unit has `width` columns of every interleaved matrix. The
    dimensions are [units, width, n, interleaved matrices, a] if the columns are the shorter side,
    and otherwise [a, n, interleaved matrices, units, width].
    """
    among, width = item.interleaved
    units = blocks.shape[2] // (among * width)
    interleaved = blocks.reshape(*blocks.shape[:2], units, among, width)
    return interleaved.transpose(*((2, 4, 0, 3, 1) if _is_tall(item) else (1, 0, 3, 2, 4)))


def _stack(apart: Array, item: Parameter) -> Array:
    """Reshape the result of `_apart` to a stack [S_s, matrices, L_l]."""
    if _is_tall(item):
        one, two, n, among, longer = apart.shape
        return apart.reshape(one * two, n * among, longer)
    shorter, n, among, one, two = apart.shape
    return apart.reshape(shorter, n * among, one * two)


class NewtonSchulz:
    """Newton-Schulz iterations of `hpc3d.ops.update.orthogonalize` on sharded matrices.

    The matrices are stacked as X[S_s, matrices, L_l], sharded over the axes `shorter` and
    `longer`; S is the shorter side.
    """

    def __init__(self, mesh: Mesh, shorter: Sequence[str], longer: Sequence[str]) -> None:
        self.mesh, self.shorter, self.longer = mesh, " ".join(shorter), " ".join(longer)

    def orthogonalize(self, x: Array) -> None:
        """Overwrite each matrix U S V^T with an approximation of U V^T."""
        self._normalize(x)
        s, l = self.shorter, self.longer
        uneven = len(x) % self.mesh.count(l.split())
        replicate = l if uneven else ""
        make = partial(sharded_matmul, self.mesh, stacked=True)
        gram = make(Split(m=s, k=l, replicate=replicate), keep="w", transposed=True)
        square = make(Split(m=s if uneven else f"{s} {l}".strip()), keep="")
        apply = make(Split(m=s, n=l, replicate=replicate))
        for _ in range(NEWTON_SCHULZ_STEPS):
            self._step(x, gram, square, apply)

    def _normalize(self, x: Array) -> None:
        with self.mesh.trace.span("norm"):
            squared = self.mesh.empty(x.shape, x.dtype, "workspace")
            np.multiply(x, x, out=squared)
            squares = squared.sum(2).sum(0)
        for axis in (*self.shorter.split(), *self.longer.split()):
            squares = self.mesh.comm(axis).all_reduce(squares).wait()
        with self.mesh.trace.span("norm"):
            x /= np.maximum(np.sqrt(squares), SMALLEST_NORM)[:, None]

    def _step(self, x: Array, gram: Matmul, square: Matmul, apply: Matmul) -> None:
        """Compute X = a X + (b G + c G G) X."""
        a, b, c = NEWTON_SCHULZ
        g, saved = gram.forward_saving(x, x)
        rows = square.forward(g, g)
        with self.mesh.trace.span("polynomial"):
            linear = self.mesh.empty(g.shape, g.dtype, "workspace")
            np.multiply(g, b, out=linear)
            rows *= c
            rows += linear
        del g, linear
        p = apply.gather(rows, apply.split.x, apply.axes["n"]).wait()
        moved = apply.multiply(p, saved.w, ())
        with self.mesh.trace.span("polynomial"):
            x *= a
            x += moved
