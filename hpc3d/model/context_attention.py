"""Context-parallel attention: ring attention, all-to-all (Ulysses), or both combined.

Chunked attention on a single rank is implemented as ring attention with a ring of size 1.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from hpc3d.arrays.array import Array, SavedActivation
from hpc3d.arrays.narrow import wide
from hpc3d.comm.communicator import Communicator, Pending
from hpc3d.comm.mesh import CONTEXT, Mesh
from hpc3d.model.core_attention import CoreAttention, HeadBlock
from hpc3d.ops.chunk_tiles import ChunkPair, Chunks
from hpc3d.ops.chunked_attention import (
    ChunkGrad,
    begin_merging,
    chunks_grad,
    end_merging,
    join_grads,
    keys_and_values,
    merge_chunks,
    row_dots,
)
from hpc3d.ops.random import Mask

if TYPE_CHECKING:
    from hpc3d.model.context import Context
    from hpc3d.model.microbatch import Microbatch
    from hpc3d.model.spec import ModelSpec

# Chunked attention without a ring: default chunk size in tokens, maximum number of chunks.
_CHUNK, _CHUNKS = 256, 64


def attention_of(mesh: Mesh, name: str, spec: ModelSpec, window: int = 0) -> Any:
    """Return the core attention layer: plain or chunked, with or without all-to-alls."""
    core = (RingAttention if spec.chunked else CoreAttention)(mesh, name, spec, window)
    return HeadExchange(mesh, spec.context, core) if spec.context.heads > 1 else core


class RingSaved(NamedTuple):
    """Data saved for the backward pass of ring attention.

    `qkv` is [q|k|v] after the rotary embedding, `out` is the output, and `sums` are the
    log-sum-exps of the scores.
    """

    qkv: SavedActivation
    out: SavedActivation
    sums: Array


class RingAttention(HeadBlock):
    """Ring attention: softmax(q k^T / sqrt(D) + mask) v with tokens sharded over a ring of ranks.

    Each rank passes keys and values around the ring in one message, which overlaps with the
    computation (Liu et al. 2023, arXiv:2310.01889). If k has K elements on a rank, the rank
    receives 2 (c - 1) K elements in the forward pass. In the backward pass, the rank receives
    these elements again, as well as the gradients of keys and values in float32 or wider, which
    are accumulated around the ring until they reach their owner. The rank saves the output and one
    log-sum-exp per row, and needs memory for the scores of one tile. On a GPU, cuDNN computes each
    hop of the ring without storing scores (hpc3d.ops.chunk_tiles.Hop).

    With a window, chunks outside it are not computed, and blocks that contain only such chunks are
    not sent: c - 1 becomes the number of hops `Context.hops(window)`.
    """

    def __init__(self, mesh: Mesh, name: str, spec: ModelSpec, window: int = 0) -> None:
        super().__init__(mesh, name, spec, window)
        self.ring = Ring(mesh.comm(CONTEXT), self.context, window)
        self.stand_for(self.ring_rank)

    def stand_for(self, ring_rank: int) -> None:
        """Compute the scores of ring position `ring_rank`: another one only in a simulation."""
        rings, ahead = self.context.rings, ring_rank - self.ring_rank
        seen = self.causal, self.window
        self.pairs = [
            _pairs(self.context, ring_rank, (other + ahead) % rings, *seen)
            for other in range(rings)
        ]

    def forward(self, qkv: Array, micro: Microbatch) -> tuple[Array, RingSaved]:
        """Return the attention output [B*t, heads*D] and the data saved for `backward`."""
        qkv, chunks = self.turned(qkv, micro), self._chunks_seen(micro)
        with self.mesh.trace.span("keys and values"):
            merged = begin_merging(qkv, self.tokens, self.form, self.mesh.empty)
            kv = keys_and_values(qkv, self.tokens, self.form, self.mesh.empty)
        for ring_rank, block in self.ring.around(kv):
            with self._span(kv, ring_rank, 4):
                merge_chunks(qkv, block, merged, chunks(ring_rank))
        out = end_merging(merged, qkv.dtype, self.mesh.empty)
        return out, RingSaved(qkv, out, merged.sums)

    def backward(self, dout: Array, saved: RingSaved, micro: Microbatch) -> Array:
        """Compute the gradient of [q|k|v] from the gradient of the attention output."""
        qkv, out, sums = saved
        chunks, empty = self._chunks_seen(micro), self.mesh.empty
        with self.mesh.trace.span("keys and values"):
            dots = row_dots(dout, out, self.tokens, chunks(self.ring_rank), empty)
            grad = ChunkGrad(dout, sums, dots)
            kv = keys_and_values(qkv, self.tokens, self.form, empty)
            dq = empty(dout.shape, wide(dout.dtype))
            dq.fill(0)
        coming, steps = None, iter(self.ring.steps[1:])
        for ring_rank, block in self.ring.around(kv, home_last=True):
            with self._span(kv, ring_rank, 10):
                dkv = chunks_grad(qkv, block, grad, dq, chunks(ring_rank), empty)
            if coming:
                dkv += coming.wait()
            home = ring_rank == self.ring_rank
            coming = None if home else self.ring.pass_on(dkv, next(steps))
        with self.mesh.trace.span("keys and values"):
            dqkv = join_grads(qkv, dq, dkv, self.form, empty)
        return self.turned(dqkv, micro, sign=-1)

    def _span(self, kv: Array, ring_rank: int, products: int) -> Any:
        """Return a trace span for attention to the keys at ring position `ring_rank`.

        `products` is twice the number of matrix products per pair of chunks, which is 2 in the
        forward pass and 5 in the backward pass. The FLOP count of the span is `products` times the
        number of scores per head, the number of heads and the head dimension.
        """
        scores = sum(
            (pair.queries.stop - pair.queries.start) * (pair.keys.stop - pair.keys.start)
            for pair in self.pairs[ring_rank]
        )
        heads = kv.size // (2 * self.tokens)  # samples * KV heads * D
        flops = products * scores * heads * self.form.queries
        return self.mesh.trace.span("attention", "attention", flops)

    def _chunks_seen(self, micro: Microbatch) -> Callable[[int], Chunks]:
        """Return a function that maps a ring position to the `Chunks` of its keys."""
        drop, starts = self._drop(micro), self.starts(micro)

        def at(ring_rank):
            pairs, padding = self.pairs[ring_rank], self.padding(micro, ring_rank)
            ring = self.context.rings > 1
            return Chunks(pairs, self.form, drop, padding, self.window, ring, starts)

        return at

    def _drop(self, micro: Microbatch) -> Mask | None:
        """Return the dropout `Mask` of the probabilities, or `None` without dropout.

        The random numbers of all ranks form a matrix with one row per (sample, head, key) and one
        column per query. `Mask.rows` contains, for each sample, the index of the first row that
        belongs to this rank's heads.
        """
        if not self.drops(micro):
            return None
        length, samples = self.context.length, self.samples(micro)
        sample, first = self.sizes.heads * length, self.heads().start * length
        start, stop = (
            (micro.first + edge) * sample + first for edge in (samples.start, samples.stop)
        )
        rows = range(start, stop, sample)
        key = micro.dropout_key(self.name, self.seed)
        return Mask(key, self.sizes.dropout, rows, range(length), length)


@lru_cache(4096)
def _pairs(
    context: Context, ring_rank: int, other: int, causal: bool, window: int
) -> tuple[ChunkPair, ...]:
    """Pair each query chunk of `ring_rank` with the key chunks of `other` that it attends to."""
    (mine, size), (theirs, _) = (_chunks(context, rank, window) for rank in (ring_rank, other))
    rows, pairs = [slice(start, start + size) for start in range(0, size * len(mine), size)], []
    for queries, position in zip(rows, mine, strict=True):
        # the first and the last chunk with a key that some query in the chunk attends to
        first = bisect_left(theirs, position - window - size + 2) if window else 0
        last = bisect_right(theirs, position) if causal else len(theirs)
        for keys, start in zip(rows[first:last], theirs[first:last], strict=True):
            masked = (causal and position == start) or 0 < window < position + size - start
            pairs.append(ChunkPair(queries, keys, masked, position, start))
    return tuple(pairs)


def _chunks(context: Context, ring_rank: int, window: int) -> tuple[Sequence[int], int]:
    """Return the first sequence positions of the chunks of a ring position, and the chunk size.

    In a ring, a rank has two chunks. With a window, they are divided into smaller chunks, so that
    fewer scores outside the window are computed.
    """
    starts: Sequence[int] = (0,)
    size = context.length
    if context.rings > 1:
        starts, size = context.chunks(ring_rank), context.chunk
        if not window:
            return starts, size
    count = min(max(1, size // _CHUNK), size if window else _CHUNKS)
    part = size // next(n for n in range(count, 0, -1) if size % n == 0)
    return [first for start in starts for first in range(start, start + size, part)], part


class Ring:
    """Ring of ranks along the context axis, with a stride of `context.heads` ranks.

    With a window, ranks need blocks only from the distances `hops`. A block moves from a rank
    directly to the next rank that needs it. `steps` are the distances of these moves; the last one
    is the distance to the owner of the block.
    """

    def __init__(self, comm: Communicator, context: Context, window: int = 0) -> None:
        self.comm, self.size, self.stride = comm, context.rings, context.heads
        self.ring_rank, self.member = divmod(comm.rank, context.heads)
        self.hops = context.hops(window)
        self.steps = [stop - start for start, stop in pairwise((0, *self.hops, self.size))]

    def peer(self, step: int) -> int:
        """Return the rank that is `step` positions further along the ring."""
        return (self.ring_rank + step) % self.size * self.stride + self.member

    def around(self, block: Array, home_last: bool = False) -> Iterator[tuple[int, Array]]:
        """Pass blocks around the ring; yield (ring position, block) for every block needed.

        This rank's own block comes first, or last if `home_last` is True. The other blocks arrive
        in order of distance, starting with the direct predecessor. The next block is in transfer
        while the caller uses the current block.
        """
        coming = self._next(block, 0)
        if not home_last:
            yield self.ring_rank, block
        for number, hop in enumerate(self.hops, 1):
            other = coming.wait()
            coming = self._next(other, number)
            yield (self.ring_rank - hop) % self.size, other
        if home_last:
            yield self.ring_rank, block

    def _next(self, block: Array, number: int) -> Any:
        return self.pass_on(block, self.steps[number]) if number < len(self.hops) else None

    def pass_on(self, block: Array, step: int = 1) -> Pending:
        """Send a block `step` ranks along the ring; return a handle to the received block."""
        with self.comm.grouped():
            sent = self.comm.send(block, self.peer(step))
            received = self.comm.recv(block.shape, block.dtype, self.peer(-step))

        def finish():
            theirs = received.wait()
            sent.wait()
            return theirs

        return Pending(finish)


class HeadExchange:
    """Ulysses attention: attention between two all-to-alls (Jacobs et al. 2023, arXiv:2309.14509).

    The first all-to-all changes the sharding from tokens to heads, and the second one changes it
    back. In between, each of u ranks has 1/u of the heads and u times as many tokens. The u ranks
    are adjacent on the context axis. If q and k have Q and K elements on a rank, the rank receives
    (1 - 1/u) (2 Q + 2 K) elements in the forward pass and as many in the backward pass.

    If there are fewer KV heads than ranks, u/k ranks share each of the k KV heads, and divide its
    query heads. A rank then receives its KV head once, as if there were u KV heads. The owner of a
    token sums the gradients of the u/k ranks.
    """

    def __init__(self, mesh: Mesh, context: Context, core: CoreAttention | RingAttention) -> None:
        self.mesh, self.comm, self.core = mesh, mesh.comm(CONTEXT), core
        self.members, self.tokens = context.heads, context.tokens
        self.first = self.comm.rank // self.members * self.members
        self.form = core.form  # before the exchange
        kv_heads = len(core.heads()) * self.members // self.form.queries
        shared = max(1, self.members // kv_heads)
        core.form = self.form._replace(queries=self.form.queries // shared)

    def forward(self, qkv: Array, micro: Microbatch) -> tuple[Array, Any]:
        """Return the attention output [B*t, heads*D] and the data saved for `backward`."""
        whole = self.to_heads(qkv, self.form.stretches(qkv.shape[1]))
        out, saved = self.core.forward(whole, micro)
        return self.to_tokens(out, [slice(0, out.shape[1] * self.members)]), saved

    def backward(self, dout: Array, saved: Any, micro: Microbatch) -> Array:
        """Compute the gradient of [q|k|v] from the gradient of the attention output."""
        whole = self.to_heads(dout, [slice(0, dout.shape[1])])
        dqkv = self.core.backward(whole, saved, micro)
        columns = dout.shape[1] // self.form.queries // self.form.width * self.form.columns
        return self.to_tokens(dqkv, self.form.stretches(columns))

    def to_heads(self, x: Array, stretches: Sequence[slice]) -> Array:
        """Redistribute x from [B*t, heads] to [B*u*t, heads/u] with an all-to-all.

        `stretches` are the column ranges of x. The heads of each range are divided evenly among
        the u ranks, or repeated if there are fewer.
        """
        u, rows = self.members, x.shape[0]
        width = sum(self._share(stretch)[1] for stretch in stretches)
        parts = self.mesh.empty((u * rows, width), x.dtype)
        with self.mesh.trace.span("exchange of heads"):
            for mine, theirs in self._columns(x, parts, stretches):
                theirs[...] = mine
        parts = self._exchange(parts).reshape(u, -1, self.tokens, width)
        return self._in_one_piece(parts.swapaxes(0, 1), (u * rows, width))

    def to_tokens(self, x: Array, stretches: Sequence[slice]) -> Array:
        """Redistribute x from [B*u*t, heads/u] to [B*t, heads], and sum repeated heads."""
        rows, width = x.shape
        u = self.members
        parts = x.reshape(-1, u, self.tokens, width).swapaxes(0, 1)
        parts = self._exchange(self._in_one_piece(parts, x.shape))
        out = self.mesh.empty((rows // u, stretches[-1].stop), x.dtype)
        with self.mesh.trace.span("exchange of heads"):
            for mine, theirs in self._columns(out, parts, stretches):
                mine[...] = theirs[:, :1]
                for number in range(1, theirs.shape[1]):
                    mine += theirs[:, number : number + 1]
        return out

    def _share(self, stretch: slice) -> tuple[int, int]:
        """Return the number of different shares of a column range, and the columns of a share."""
        columns = stretch.stop - stretch.start
        count = min(self.members, columns // self.form.width)
        return count, columns // count

    def _columns(
        self, whole: Array, parts: Array, stretches: Sequence[slice]
    ) -> Iterator[tuple[Array, Array]]:
        """Yield views of `whole` and `parts` with the same heads: one pair per column range.

        `whole` has the shape [rows, heads], with the heads of all u ranks, and `parts` has one
        matrix of as many rows per rank. For a range of n shares with w columns, the views have the
        shapes [n, 1, rows, w] and [n, u/n, rows, w].
        """
        start = 0
        for stretch in stretches:
            count, width = self._share(stretch)
            mine = whole[:, stretch].reshape(-1, count, 1, width).swapaxes(0, 1).swapaxes(1, 2)
            theirs = parts.reshape(count, self.members // count, -1, parts.shape[1])
            yield mine, theirs[..., start : start + width]
            start += width

    def _in_one_piece(self, view: Array, shape: Sequence[int]) -> Array:
        out = self.mesh.empty(shape, view.dtype)
        with self.mesh.trace.span("exchange of heads"):
            out.reshape(view.shape)[...] = view
        return out

    def _exchange(self, parts: Array) -> Array:
        """Send block j to rank j of the group, and return the blocks received from all ranks."""
        if self.members == self.comm.size:
            return self.comm.all_to_all(parts).wait()
        blocks = parts.reshape(self.members, -1, parts.shape[1])
        mine = self.comm.rank - self.first
        others = [number for number in range(self.members) if number != mine]
        with self.comm.grouped():
            sent = [self.comm.send(blocks[number], self.first + number) for number in others]
            received = [
                self.comm.recv(blocks[0].shape, parts.dtype, self.first + number)
                for number in others
            ]
        out = self.mesh.empty(parts.shape, parts.dtype)
        into = out.reshape(blocks.shape)
        into[mine] = blocks[mine]
        for number, block in zip(others, received, strict=True):
            into[number] = block.wait()
        for each in sent:
            each.wait()
        return out
