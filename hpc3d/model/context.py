"""How sequences are cut along the context axis c, and which tokens of each a rank has.

The ranks of c are `rings` neighbours of a ring times `heads` that exchange heads for tokens.  Keys
and values go round the ring, chunk by chunk; under a causal mask a later chunk attends to more of
them, so that place i of a ring of r has chunks i and 2r-1-i of 2r: all do the same work.

    r = 4    chunk  0 1 2 3 4 5 6 7        r = 2, heads = 2    chunk  0 0 1 1 2 2 3 3
             place  0 1 2 3 3 2 1 0                            rank   0 1 2 3 2 3 0 1
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import numpy as np


class Context(NamedTuple):
    """Sequences of `length` tokens on `rings` x `heads` ranks of the context axis.

    A microbatch of S sequences is one of c S virtual sequences of T/c tokens, those of rank 0
    first: with c outermost on the rows of every layout, a rank has those that are its own.
    """

    length: int
    rings: int = 1
    heads: int = 1

    @property
    def parts(self) -> int:
        """The ranks, c."""
        return self.rings * self.heads

    @property
    def tokens(self) -> int:
        """Of a virtual sequence: T / c."""
        return self.length // self.parts

    @property
    def chunk(self) -> int:
        """Tokens of one of the two chunks that a place of the ring has."""
        return self.length // (2 * self.rings)

    @property
    def pieces(self) -> int:
        """Of the tokens of a rank, in each of which they follow each other."""
        return 2 if self.rings > 1 else 1

    def starts(self) -> np.ndarray:
        """The first position of each piece of every rank, int64[c, pieces]."""
        return _order(self).reshape(self.parts, self.pieces, -1)[:, :, 0]

    def chunks(self, place: int) -> tuple[int, ...]:
        """The first positions of the chunks at a place of the ring."""
        return place * self.chunk, (2 * self.rings - 1 - place) * self.chunk

    def positions(self, part: int) -> np.ndarray:
        """Where in their sequence the tokens of a rank's virtual sequences are, int64[T/c]."""
        return _order(self)[part]

    def peer(self, number: int, of_first: int) -> int:
        """Whom rank `number` sends to when rank 0 sends to `of_first` and all send as far: around
        the ring, or among neighbours that exchange heads."""
        if of_first % self.heads == 0:
            return (number + of_first) % self.parts
        member = number % self.heads
        return number - member + (member + of_first) % self.heads

    def cut(self, batch: np.ndarray) -> np.ndarray:
        """[S, T] -> [c S, T/c]."""
        if self.parts == 1:
            return batch
        parts = batch[:, _order(self)]  # [S, c, T/c]
        return np.ascontiguousarray(parts.swapaxes(0, 1)).reshape(-1, self.tokens)

    def rows(self, here: slice, sequences: int, first: int) -> range | np.ndarray:
        """The rows of the batch's tensor, one per token of whole sequences in order, that are the
        rows `here` of a microbatch of c S = `sequences` virtual ones, whose first is number
        `first` of the batch."""
        if self.parts == 1:
            return range(first * self.length + here.start, first * self.length + here.stop)
        virtual, token = np.divmod(np.arange(here.start, here.stop), self.tokens)
        part, sequence = np.divmod(virtual, sequences // self.parts)
        return (first + sequence) * self.length + _order(self)[part, token]


WHOLE = Context(0)  # sequences of any length, which nothing cuts


@cache
def _order(context: Context) -> np.ndarray:
    """The position of every token of every part, int64[c, T/c]."""
    if context.rings == 1:
        return np.arange(context.length).reshape(context.parts, -1)
    starts = [context.chunks(place) for place in range(context.rings)]
    chunks = np.array(starts)[:, :, None] + np.arange(context.chunk)  # [r, 2, T / 2r]
    return chunks.reshape(context.parts, -1)
