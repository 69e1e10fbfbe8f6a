"""Tiles of chunked attention (hpc3d/ops/chunked_attention.py), and their GPU kernel arguments."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from math import sqrt
from typing import TYPE_CHECKING, Any, NamedTuple

from hpc3d.ops.attention import HeadForm, by_cudnn, length, stack_queries
from hpc3d.ops.random import Mask, cuda_mask
from hpc3d.ops.rows import soft_cap

if TYPE_CHECKING:
    from hpc3d.arrays.array import Array
    from hpc3d.cuda.gpu import Gpu

# GPU limits: maximum queries (and keys) per score tile, maximum bytes of scores per head batch.
_TILE, _SCORES = 1024, 1 << 26


class ChunkPair(NamedTuple):
    """Query chunk and key chunk, given as slices of the rows of their blocks.

    `query_position` and `key_position` are the sequence positions of the first tokens in the
    chunks. If `masked` is True, some scores are masked: keys that are later than the query, or
    outside its window.
    """

    queries: slice
    keys: slice
    masked: bool
    query_position: int
    key_position: int


class Hop(NamedTuple):
    """Rectangle of the score matrix that a fused kernel computes for one block of keys.

    `queries` and `keys` are slices of the rows of their blocks. With `causal`, query i of the
    rectangle attends to its keys 0 to i.
    """

    queries: slice
    keys: slice
    causal: bool

    @classmethod
    def of(cls, pairs: Sequence[ChunkPair]) -> Hop:
        """Return the rectangle that the chunk pairs of a block of keys form.

        In zig-zag order, the two query chunks of a rank form a triangle with the rank's own keys.
        Both of them attend to the first key chunk of an earlier ring position, and the second one
        attends to both key chunks of a later ring position.
        """
        queries, keys = (_hull(each) for each in zip(*(pair[:2] for pair in pairs), strict=True))
        areas = [(length(pair.queries) * length(pair.keys), pair.masked) for pair in pairs]
        causal = any(masked for _, masked in areas)
        # In a triangle of n x n chunk pairs, only the n pairs on the diagonal are masked.
        area = sum((1 + causal - masked) * area for area, masked in areas)
        assert area == length(queries) * length(keys)
        return cls(queries, keys, causal)


class Chunks(NamedTuple):
    """Pairs of query and key chunks to process, for heads of the given `form`.

    `padding`, bool [B, t], marks masked keys. Before the product with v, the probabilities are
    multiplied by the dropout mask `drop`, which is generated as a matrix of shape
    [samples*heads*keys, T]. `drop.rows` lists the first matrix row of each sample of this rank. A
    query attends only to the last `window` keys up to its position (0: to all of them). `ring` is
    True if the tokens are sharded over a ring of ranks. `starts`, int64 [B, t], is the sequence
    position of the first token in the document of each query; earlier keys are masked.
    """

    pairs: Sequence[ChunkPair]
    form: HeadForm
    drop: Mask | None = None
    padding: Array | None = None
    window: int = 0
    ring: bool = False
    starts: Array | None = None

    def hop(self) -> Hop:
        """Return the rectangle of scores that a fused kernel computes."""
        if not self.window:
            return Hop.of(self.pairs)
        queries, keys = (_hull(each) for each in zip(*(pair[:2] for pair in self.pairs)))
        return Hop(queries, keys, causal=True)

    def tiles(
        self, kv: Array, tokens: int, nbytes: int
    ) -> Iterator[tuple[tuple[int, slice], ChunkPair]]:
        """Yield the index (sample, heads) and the `ChunkPair` of each tile.

        A tile has at most `tokens` rows and columns. The number of heads in a tile is limited by
        `nbytes`, the maximum size of its scores, but is at least 1.
        """
        _, batch, heads, _, _ = kv.shape
        g = self.form.queries
        for tile in (tile for pair in self.pairs for tile in _cut(pair, g, tokens)):
            rows, keys = length(tile.queries) * g, length(tile.keys)
            count = max(1, nbytes // (rows * keys * kv.itemsize))
            for sample in range(batch):
                for first in range(0, heads, count):
                    yield (sample, slice(first, min(first + count, heads))), tile

    def meter(self, kv: Array, inward: int, outward: int, kernels: Sequence[str]) -> None:
        """Record the cost of the GEMMs and kernels for all (query chunk, key chunk) pairs.

        Per pair and query head, the scores are the result of `inward` GEMMs, and an operand of
        `outward` GEMMs. Other operations, such as the softmax, are recorded as the unchunked
        attention kernels `kernels`, which take the same time per score.
        """
        _, batch, heads, _, width = kv.shape
        sizes = Counter((length(pair.queries), length(pair.keys)) for pair in self.pairs)
        kernels = [*kernels, *([soft_cap.__name__] if self.form.cap else [])]
        for (m, n), pairs in sizes.items():
            count = pairs * batch * heads * self.form.queries
            for shape in inward * [(m, n, width)] + outward * [(m, width, n)]:
                kv.meter.product(*shape, kv.dtype, count)
            for name in kernels:
                kv.meter.kernel(name, count * m * n * kv.itemsize)

    def by_cudnn(self, gpu: Gpu, x: Array) -> bool:
        """Return True if cuDNN can compute this attention for operands like `x`.

        With a window, the scores of a hop in a ring are not a band along the diagonal of a
        rectangle.
        """
        banded = not (self.ring and self.window)
        return banded and by_cudnn(gpu, x, self.form, self.drop, self.starts)


def _hull(slices: Sequence[slice]) -> slice:
    """Return the smallest slice that contains all slices."""
    return slice(min(each.start for each in slices), max(each.stop for each in slices))


def _cut(pair: ChunkPair, g: int, tokens: int) -> Iterator[ChunkPair]:
    rows = max(1, tokens // g)
    for q in range(pair.queries.start, pair.queries.stop, rows):
        queries = slice(q, min(q + rows, pair.queries.stop))
        for k in range(pair.keys.start, pair.keys.stop, tokens):
            keys = slice(k, min(k + tokens, pair.keys.stop))
            positions = (
                pair.query_position + q - pair.queries.start,
                pair.key_position + k - pair.keys.start,
            )
            yield ChunkPair(queries, keys, pair.masked, *positions)


class GpuTile(NamedTuple):
    """A tile of `chunks` on a GPU, for a range of heads of one sample."""

    gpu: Gpu
    chunks: Chunks
    at: tuple[int, slice]
    tile: ChunkPair

    @property
    def work(self) -> tuple[int, int]:
        """Number of query heads in the tile, and number of queries per head."""
        return length(self.at[1]) * self.chunks.form.queries, length(self.tile.queries)

    def queries(self, q: Array) -> Array:
        """Return the tile's queries, a slice of `q` (all queries, or their gradients).

        The result [heads, g*query, D] is contiguous.
        """
        return stack_queries(self.gpu.contiguous(q[self.at][:, :, self.tile.queries]))

    def keys(self, kv: Array) -> list[Array]:
        """Return views [heads, key, D] of the tile's keys and values (or gradients) in `kv`."""
        return [each[self.at][:, self.tile.keys] for each in kv]

    def scores(self, k: Array, q: Array) -> Array:
        """Return the scores k q^T, with shape [heads, key, g*query]."""
        scores = self.gpu.empty((len(k), k.shape[1], q.shape[1]), k.dtype)
        self.gpu.multiply(k, q.swapaxes(1, 2), scores)
        return scores

    def given(self, sequence: int) -> dict[str, Any]:
        """Return all arguments of the softmax kernels except the scores and the sums."""
        tile, (width, g, cap), (sample, _) = self.tile, self.chunks.form, self.at
        keys, padding, starts = length(tile.keys), self.chunks.padding, self.chunks.starts
        return {
            "padding": None if padding is None else padding[sample, tile.keys],
            "starts": None if starts is None else starts[sample, tile.queries],
            "key_position": tile.key_position,
            "keys": keys,
            "queries": length(tile.queries),
            "group": g,
            "ahead": tile.query_position - tile.key_position if tile.masked else keys,
            "window": self.chunks.window if tile.masked else 0,
            "first": tile.queries.start,
            "sequence": sequence,
            "scale": 1 / sqrt(width),
            "cap": cap,
            **cuda_mask(self._drop(), "dropout_key"),
        }

    def _drop(self) -> Mask | None:
        """Return the dropout mask for the first query head in the tile."""
        (sample, heads), tile, drop = self.at, self.tile, self.chunks.drop
        if drop is None:
            return None
        row = drop.rows[sample] + heads.start * self.chunks.form.queries * drop.width
        row += tile.key_position
        columns = range(tile.query_position, drop.width)
        return drop._replace(rows=range(row, row + length(tile.keys)), columns=columns)

    def add(self, added: Array, out: Array, sequence: int, kept: Array | None = None) -> None:
        """Update this tile of `out` in place: out = kept * out + added.

        The shapes are out [B*t, heads*g*D] and added [heads, g*query, D]. `kept` has one factor
        per row of `added`. The default factor is 1.
        """
        (sample, heads), (width, g, _) = self.at, self.chunks.form
        rows = out[sample * sequence :][self.tile.queries]
        columns = len(added) * g * width
        given = {"queries": len(rows), "columns": columns, "width": width, "kept": kept}
        given |= {"first": heads.start * g * width, "stride": out.shape[1]}
        self.gpu.launch("merge_chunk", len(rows), columns, out=rows, added=added, **given)


def gpu_tiles(gpu: Gpu, chunks: Chunks, kv: Array) -> Iterator[GpuTile]:
    """Split the chunk pairs of `chunks` into tiles for the GPU; yield all tiles."""
    for at, tile in gpu.pieces(chunks.tiles(kv, _TILE, _SCORES), _kind):
        yield GpuTile(gpu, chunks, at, tile)


def _kind(piece: tuple[tuple[int, slice], ChunkPair]) -> tuple[int, ...]:
    """Return a grouping key. Tiles with equal keys launch identical kernels."""
    (_, heads), tile = piece
    return length(heads), length(tile.queries), length(tile.keys), tile.masked
