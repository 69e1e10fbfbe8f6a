"""Context parallelism: the sharding of sequences along the context axis c.

The c ranks form a ring of r = `rings` positions, with `heads` ranks at each position. Keys and
values are passed around the ring. Before attention, an all-to-all among the ranks of a position
changes the sharding from tokens to heads (Ulysses); after attention, another one changes it back.
Under a causal mask, later tokens attend to more keys. In a ring, each sequence is therefore
divided into 2r chunks, and position i stores chunks i and 2r-1-i (zig-zag), so that all ranks do
the same work.

    r = 4    chunk  0 1 2 3 4 5 6 7        r = 2, heads = 2    chunk  0 0 1 1 2 2 3 3
         ring rank  0 1 2 3 3 2 1 0                            rank   0 1 2 3 2 3 0 1
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import numpy as np


class Context(NamedTuple):
    """Sharding of sequences of `length` tokens over the `rings` x `heads` ranks of axis c.

    Each rank stores T/c tokens of every sequence. The layers other than attention treat these
    tokens as a separate "virtual sequence": a microbatch of S sequences becomes c S virtual
    sequences of T/c tokens, ordered by rank. Several mesh axes may shard the rows (tokens) of an
    array; in every layout, axis c is the outermost of these axes.
    """

    length: int
    rings: int = 1
    heads: int = 1

    @property
    def parts(self) -> int:
        """Number c of ranks along the context axis."""
        return self.rings * self.heads

    @property
    def tokens(self) -> int:
        """Number of tokens per virtual sequence, T / c."""
        return self.length // self.parts

    @property
    def chunk(self) -> int:
        """Number of tokens per chunk. Each ring position has two chunks."""
        return self.length // (2 * self.rings)

    def chunks(self, ring_rank: int) -> tuple[int, ...]:
        """Return the sequence positions at which the two chunks of a ring position start."""
        return ring_rank * self.chunk, (2 * self.rings - 1 - ring_rank) * self.chunk

    def hops(self, window: int = 0) -> tuple[int, ...]:
        """Return the distances around the ring from which a rank needs keys and values.

        A query attends to the last `window` tokens up to its position (0: to all of them). The
        window of the first query in a chunk reaches n chunks back. Two such chunks are at most n
        ranks apart, in either direction.
        """
        reach = -(-(window - 1) // self.chunk) if window else self.rings
        return tuple(hop for hop in range(1, self.rings) if min(hop, self.rings - hop) <= reach)

    def positions(self, part: int) -> np.ndarray:
        """Return the sequence positions of one rank's tokens, int64[T/c]."""
        return _order(self)[part]

    def peer(self, number: int, of_first: int) -> int:
        """Return the rank to which rank `number` sends if rank 0 sends to rank `of_first`.

        All ranks send over the same distance, either around the ring or within the all-to-all
        group.
        """
        if of_first % self.heads == 0:
            return (number + of_first) % self.parts
        member = number % self.heads
        return number - member + (member + of_first) % self.heads

    def cut(self, batch: np.ndarray) -> np.ndarray:
        """Split a batch [S, T] into virtual sequences [c S, T/c]."""
        if self.parts == 1:
            return batch
        parts = batch[:, _order(self)]  # [S, c, T/c]
        return np.ascontiguousarray(parts.swapaxes(0, 1)).reshape(-1, self.tokens)

    def joined(self, parts: np.ndarray) -> np.ndarray:
        """Join virtual sequences [c S, T/c] to a batch [S, T], the inverse of `cut`."""
        if self.parts == 1:
            return parts
        batch = np.empty((len(parts) // self.parts, self.length), parts.dtype)
        batch[:, _order(self)] = parts.reshape(self.parts, -1, self.tokens).swapaxes(0, 1)
        return batch

    def rows(self, here: slice, sequences: int, first: int) -> range | np.ndarray:
        """Return the indices, in the full batch, of the rows `here` of a microbatch.

        The full batch has one row per token, ordered by sequence and position. The microbatch
        consists of c S = `sequences` virtual sequences, and its first sequence has index `first`
        in the batch.
        """
        if self.parts == 1:
            return range(first * self.length + here.start, first * self.length + here.stop)
        virtual, token = np.divmod(np.arange(here.start, here.stop), self.tokens)
        part, sequence = np.divmod(virtual, sequences // self.parts)
        return (first + sequence) * self.length + _order(self)[part, token]


WHOLE = Context(0)  # placeholder that ModelSpec replaces by Context(sequence length)


@cache
def _order(context: Context) -> np.ndarray:
    """Return the sequence positions of each rank's tokens, int64[c, T/c]."""
    if context.rings == 1:
        return np.arange(context.length).reshape(context.parts, -1)
    starts = [context.chunks(ring_rank) for ring_rank in range(context.rings)]
    chunks = np.array(starts)[:, :, None] + np.arange(context.chunk)  # [r, 2, T / 2r]
    return chunks.reshape(context.parts, -1)
