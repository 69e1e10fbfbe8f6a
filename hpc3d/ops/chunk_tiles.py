"""Tiles of chunked attention (hpc3d/ops/chunked_attention.py), and the description of a tile that
GPU kernels take."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from math import sqrt
from typing import TYPE_CHECKING, Any, NamedTuple

from hpc3d.ops.random import cuda_mask

if TYPE_CHECKING:
    from hpc3d.arrays.array import Array
    from hpc3d.cuda.gpu import Gpu
    from hpc3d.ops.attention import HeadForm
    from hpc3d.ops.random import Mask

# On a GPU: tokens of a tile of scores, on either side, and bytes of the tiles of several heads.
_TILE, _SCORES = 1024, 1 << 26


class ChunkPair(NamedTuple):
    """A chunk of queries and one of keys, as rows of their blocks, with the positions in the
    sequence at which they begin; where `masked`, queries do not see later keys."""

    queries: slice
    keys: slice
    masked: bool
    query_position: int
    key_position: int


class Chunks(NamedTuple):
    """What of a block of keys is attended to: pairs of chunks, of heads of a `form`.

    `padding`, booleans [B, t], says which keys are not seen.  What is multiplied with v are the
    probabilities times the factors of `drop`: draws of a matrix [samples heads key, T], in which
    `rows` are the first of each sample of this rank, as far apart as its heads and keys.
    """

    pairs: Sequence[ChunkPair]
    form: HeadForm
    drop: Mask | None = None
    padding: Array | None = None

    def tiles(
        self, kv: Array, tokens: int, nbytes: int
    ) -> Iterator[tuple[tuple[int, slice], ChunkPair]]:
        """(sample, heads) and part of a pair, for tiles of so many `tokens` on either side at
        most, as many heads at a time as have `nbytes` of scores."""
        _, batch, heads, _, _ = kv.shape
        g = self.form.queries
        for tile in (tile for pair in self.pairs for tile in _cut(pair, g, tokens)):
            rows, keys = _count(tile.queries) * g, _count(tile.keys)
            count = max(1, nbytes // (rows * keys * kv.itemsize))
            for sample in range(batch):
                for first in range(0, heads, count):
                    yield (sample, slice(first, min(first + count, heads))), tile

    def meter(self, kv: Array, inward: int, outward: int, kernels: Sequence[str]) -> None:
        """Tell the meter of so many products that end in scores, and that begin with them, and of
        `kernels` of whole attention that take as long for a score."""
        _, batch, heads, _, width = kv.shape
        sizes = Counter((_count(pair.queries), _count(pair.keys)) for pair in self.pairs)
        for (m, n), pairs in sizes.items():
            count = pairs * batch * heads * self.form.queries
            for shape in inward * [(m, n, width)] + outward * [(m, width, n)]:
                kv.meter.product(*shape, kv.dtype, count)
            for name in kernels:
                kv.meter.kernel(name, count * m * n * kv.itemsize)


def _count(rows: slice) -> int:
    return rows.stop - rows.start


def _cut(pair: ChunkPair, g: int, tokens: int) -> Iterator[ChunkPair]:
    """The tiles of a pair of chunks."""
    rows = max(1, tokens // g)
    for q in range(pair.queries.start, pair.queries.stop, rows):
        queries = slice(q, min(q + rows, pair.queries.stop))
        for k in range(pair.keys.start, pair.keys.stop, tokens):
            keys = slice(k, min(k + tokens, pair.keys.stop))
            places = (
                pair.query_position + q - pair.queries.start,
                pair.key_position + k - pair.keys.start,
            )
            yield ChunkPair(queries, keys, pair.masked, *places)


class GpuTile(NamedTuple):
    """A tile of `chunks` on a GPU: heads of a sample, and its queries and keys."""

    gpu: Gpu
    chunks: Chunks
    at: tuple[int, slice]
    tile: ChunkPair

    @property
    def work(self) -> tuple[int, int]:
        """Heads of queries, and the queries of each."""
        return _count(self.at[1]) * self.chunks.form.queries, _count(self.tile.queries)

    def queries(self, q: Array) -> Array:
        """Those of the tile, or their gradients, [heads, g*query, D] in one piece."""
        part = q[self.at][:, :, self.tile.queries]
        heads, g, tokens, width = part.shape
        return self.gpu.contiguous(part).reshape(heads, g * tokens, width)

    def keys(self, kv: Array) -> list[Array]:
        """Keys and values of the tile, or their gradients, [heads, key, D], views."""
        return [each[self.at][:, self.tile.keys] for each in kv]

    def scores(self, k: Array, q: Array) -> Array:
        """k q' [heads, key, g*query]."""
        scores = self.gpu.empty((len(k), k.shape[1], q.shape[1]), k.dtype)
        self.gpu.multiply(k, q.swapaxes(1, 2), scores)
        return scores

    def given(self, sequence: int) -> dict[str, Any]:
        """The arguments of the kernels of the softmax besides scores and sums."""
        tile, (width, g), padding = self.tile, self.chunks.form, self.chunks.padding
        keys = _count(tile.keys)
        return {
            "padding": None if padding is None else padding[self.at[0], tile.keys],
            "keys": keys,
            "queries": _count(tile.queries),
            "group": g,
            "ahead": tile.query_position - tile.key_position if tile.masked else keys,
            "first": tile.queries.start,
            "sequence": sequence,
            "scale": 1 / sqrt(width),
            **cuda_mask(self._drop(), "dropout_key"),
        }

    def _drop(self) -> Mask | None:
        """That of the first head of queries."""
        (sample, heads), tile, drop = self.at, self.tile, self.chunks.drop
        if drop is None:
            return None
        row = drop.rows[sample] + heads.start * self.chunks.form.queries * drop.width
        row += tile.key_position
        columns = range(tile.query_position, drop.width)
        return drop._replace(rows=range(row, row + _count(tile.keys)), columns=columns)

    def add(self, added: Array, out: Array, sequence: int, kept: Array | None = None) -> None:
        """out = kept out + added [heads, g*query, D], in this part of out [B*t, heads*g*D]."""
        (sample, heads), (width, g) = self.at, self.chunks.form
        rows = out[sample * sequence :][self.tile.queries]
        columns = len(added) * g * width
        given = {"queries": len(rows), "columns": columns, "width": width, "kept": kept}
        given |= {"first": heads.start * g * width, "stride": out.shape[1]}
        self.gpu.launch("merge_chunk", len(rows), columns, out=rows, added=added, **given)


def gpu_tiles(gpu: Gpu, chunks: Chunks, kv: Array) -> Iterator[GpuTile]:
    """All tiles."""
    for at, tile in gpu.pieces(chunks.tiles(kv, _TILE, _SCORES), _kind):
        yield GpuTile(gpu, chunks, at, tile)


def _kind(piece: tuple[tuple[int, slice], ChunkPair]) -> tuple[int, ...]:
    """What tiles have in common that launch the same."""
    (_, heads), tile = piece
    return _count(heads), _count(tile.queries), _count(tile.keys), tile.masked
