"""Rounding of matrix product operands to float8, with the same results on every layout.

Each tile of the full matrix has one scale.  Several ranks may share a tile:

    scales      X[m, k] and dY[m, n]    W[k, n]         source
    block       1 x 128                 128 x 128       DeepSeek-V3, arXiv:2412.19437, section 3.3
    tensor      all                     all             Micikevicius et al., arXiv:2209.05433

X and W are rounded to float8_e4m3fn; dY, which has a wider range, to float8_e5m2.  Ranks whose
blocks share a tile compute its maximum with an all-reduce.  The rows of the full matrices X and dY
are those of one microbatch on all replicas.  The product dW = X' dY reuses the scales of X and dY
from the other two products.  DeepSeek-V3 uses tiles of 128 tokens for dW, but the contents of such
tiles would depend on how the batch is sharded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from hpc3d.arrays.narrow import wide
from hpc3d.ops.float8 import (
    E4M3,
    E5M2,
    Coded,
    Tiles,
    encode_tensor,
    round_tiles,
    tile_maxima,
)

if TYPE_CHECKING:
    from hpc3d.arrays.array import Array
    from hpc3d.comm.mesh import Mesh
    from hpc3d.tensor.split import Split

TILE = 128
_WHOLE = 0  # means that one tile covers the full dimension
_TILES = {
    "block": {"x": (1, TILE), "w": (TILE, TILE), "dy": (1, TILE)},
    "tensor": dict.fromkeys(("x", "w", "dy"), (_WHOLE, _WHOLE)),
}
_TYPES = {"x": E4M3, "w": E4M3, "dy": E5M2}


class Operands(NamedTuple):
    """Functions that round the operands X, W and dY before a matrix product."""

    x: Callable[[Array], Array]
    w: Callable[[Array], Array]
    dy: Callable[[Array], Array]


def _as_it_is(block: Array) -> Array:
    return block


EXACT = Operands(_as_it_is, _as_it_is, _as_it_is)


def rounded_operands(mesh: Mesh, split: Split, scales: str, dense: bool) -> Operands:
    """Return the functions that round the operands of a matrix product to float8.

    `scales` is "block" or "tensor". `dense` is True for products without panels and without
    stacked experts. If `dense` is True and `scales` is "tensor", operands are stored as float8
    codes on GPUs that support float8 GEMMs.
    """
    m, n, k = (axes.split() for axes in (split.m, split.n, split.k))
    # Mesh axes that shard the rows and the columns of each matrix at the time of rounding.
    # Matrices are rounded after the gather, but panels of X and W are rounded before the
    # broadcast.
    axes: dict[str, tuple[Sequence[str], Sequence[str]]] = {"x": (m, k), "w": (k, n), "dy": (m, n)}
    if split.panels:
        axes |= {"x": (split.x[0], split.x[1]), "w": (split.w[0][:1], n)}
    coded = dense and scales == "tensor" and mesh.pool.float8
    kind = Coding if coded else Rounding
    return Operands(
        **{
            name: kind(mesh, _TYPES[name], _TILES[scales][name], each)
            for name, each in axes.items()
        }
    )


class _Dim(NamedTuple):
    """Tiles along one dimension of a rank's block.

    Each tile has `extent` elements.  The block covers tiles `first` to `last` (exclusive) of the
    `total` tiles of the matrix, and starts at element `offset` of tile `first`.  `shared` lists
    the mesh axes along which several ranks may share a tile.
    """

    extent: int
    offset: int
    first: int
    last: int
    total: int
    shared: list[str]

    @property
    def tiles(self) -> slice:
        """Slice of the all-reduce buffer with the maximum absolute values of this block's tiles.

        If ranks share tiles, the buffer has an entry for every tile of the dimension; otherwise,
        it has entries only for the tiles of this block.
        """
        return slice(self.first, self.last) if self.shared else slice(self.last - self.first)


class Rounding:
    """Function that rounds a block of a matrix to a float8 `dtype`, with one scale per tile.

    `tiles` is the shape of a tile (rows, columns). `cuts` holds the mesh axes that shard the rows,
    and those that shard the columns.
    """

    def __init__(
        self,
        mesh: Mesh,
        dtype: str,
        tiles: tuple[int, int],
        cuts: tuple[Sequence[str], Sequence[str]],
    ) -> None:
        self.mesh, self.dtype, self.tiles = mesh, dtype, tiles
        self.cuts = [[axis for axis in axes if mesh.size(axis) > 1] for axes in cuts]

    def __call__(self, block: Array) -> Array:
        """Return a rounded copy of a block [m, n], or of stacked expert blocks [m, e, n].

        Each expert has its own scales.
        """
        stack = block if block.ndim == 3 else block.reshape(len(block), 1, -1)
        rows, columns = map(self._dim, (len(stack), stack.shape[2]), self.tiles, self.cuts)
        tiles = Tiles(rows.extent, columns.extent, rows.offset, columns.offset)
        with self.mesh.trace.span("round"):
            maxima = self._maxima(stack, tiles)
        maxima = self._of_all_ranks(maxima, rows, columns)
        with self.mesh.trace.span("round"):
            return self.rounded(stack, maxima, tiles, block.shape)

    def rounded(self, stack: Array, maxima: Array, tiles: Tiles, shape: Sequence[int]) -> Any:
        """Return a copy of `stack` that is rounded to float8 and reshaped to `shape`."""
        out = self.mesh.empty(stack.shape, stack.dtype, "workspace")
        return round_tiles(stack, maxima, tiles, self.dtype, out).reshape(shape)

    def _dim(self, size: int, extent: int, axes: list[str]) -> _Dim:
        count = self.mesh.count(axes)
        start, whole = self.mesh.index(axes) * size, count * size
        extent = max(1, extent or whole)
        first, offset = divmod(start, extent)
        last, total = (-(-end // extent) for end in (start + size, whole))
        return _Dim(extent, offset, first, last, total, axes if size % extent else [])

    def _maxima(self, stack: Array, tiles: Tiles) -> Array:
        down, across = tiles.grid(len(stack), stack.shape[2])
        shape = down, stack.shape[1], across
        maxima = self.mesh.empty(shape, wide(stack.dtype), "workspace")
        tile_maxima(stack, tiles, maxima)
        return maxima

    def _of_all_ranks(self, maxima: Array, rows: _Dim, columns: _Dim) -> Array:
        """Combine the tile maxima of this block with those of the ranks that share the tiles."""
        shared = rows.shared + columns.shared
        if not shared:
            return maxima
        down, across = (
            dim.total if dim.shared else dim.last - dim.first for dim in (rows, columns)
        )
        message = self.mesh.zeros((down, maxima.shape[1], across), maxima.dtype, "communication")
        message[rows.tiles, :, columns.tiles] = maxima
        for axis in shared:
            message = self.mesh.comm(axis).all_reduce(message, "max").wait()
        return message[rows.tiles, :, columns.tiles]


class Coding(Rounding):
    """Function that encodes a matrix with a single scale as float8 codes, for GPU float8 GEMMs."""

    def rounded(self, stack: Array, maxima: Array, tiles: Tiles, shape: Sequence[int]) -> Coded:
        codes = self.mesh.empty(shape, np.uint8, "workspace")
        scale = self.mesh.empty((1,), np.float32, "workspace")
        encode_tensor(stack.reshape(*shape), maxima, self.dtype, codes, scale)
        return Coded(codes, scale, self.dtype, stack.dtype)
