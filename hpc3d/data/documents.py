"""Texts whose documents have a new random order in each epoch."""

import numpy as np

from hpc3d.data.token_file import Tokens
from hpc3d.data.tokenizer import PIECE

_ORDERS = 2**62  # the documents in epoch e use the random numbers of epoch _ORDERS + e


def permutation(count: int, seed: int, epoch: int) -> np.ndarray:
    """Return the order of `count` windows or documents in an epoch, int64[count].

    The order does not depend on the orders of earlier epochs.
    """
    bits = np.random.Philox(key=np.array([seed, epoch], np.uint64))
    return np.random.Generator(bits).permutation(count)


def refuse_other_end(text: Tokens, separator: int, trained: int | None = None) -> None:
    """Raise a one-line ValueError unless the token `separator` ends the documents of `text`.

    `trained` is the end-of-document token of the training text. If `separator` is a different
    token, the user has chosen it, and `text` only needs to contain it. The text is read only if
    its own end-of-document token is not `separator`.
    """
    end = text.end()
    if end == separator:
        wrong = text.documents == 0
    else:
        wrong = (end is not None and trained == separator) or not _contains(text, separator)
    if wrong:
        found = f"contains no token {separator}"
        if end not in (None, separator):
            found = f"has the end-of-document token {end} ({text.end_name or 'default'})"
        raise ValueError(
            f"data.path: {text.path} {found}, but documents end with token {separator} "
            "(data.separator); use a text whose documents end with this token "
            "(python -m hpc3d.prepare --end TOKEN)"
        )


def _contains(text: Tokens, token: int) -> bool:
    """Return True if `text` contains a token; read the text up to the first one."""
    starts = range(0, len(text), PIECE)
    return any((text.read(each, min(each + PIECE, len(text))) == token).any() for each in starts)


class ShuffledDocuments:
    """Token ids of a text, with its documents in a random order that depends on the epoch.

    The token `end` ends each document. Tokens after the last end token always remain at the end.
    The text is read once, to find the documents.
    """

    def __init__(self, tokens: Tokens, end: int, seed: int) -> None:
        self._tokens, self._seed, self._epoch = tokens, seed, -1
        ends = [np.zeros(1, np.int64)]
        for start in range(0, len(tokens), PIECE):
            piece = tokens.read(start, min(start + PIECE, len(tokens)))
            ends.append(start + 1 + np.flatnonzero(piece == end))
        self._bounds = np.concatenate(ends)

    def read(self, epoch: int, start: int, stop: int) -> np.ndarray:
        """Return the ids [start, stop) of the text in the order of `epoch`, as int32."""
        if epoch != self._epoch:
            order = permutation(len(self._bounds) - 1, self._seed, _ORDERS + epoch)
            self._begins, self._epoch = self._bounds[:-1][order], epoch
            self._starts = np.cumsum([0, *np.diff(self._bounds)[order]])
        first = int(np.searchsorted(self._starts, start, "right")) - 1
        pieces = []
        while start < stop:
            if first < len(self._begins):
                begin, end = int(self._begins[first]), int(self._starts[first + 1])
            else:
                begin, end = int(self._bounds[-1]), len(self._tokens)
            offset, part = start - int(self._starts[first]), min(stop, end) - start
            pieces.append(self._tokens.read(begin + offset, begin + offset + part))
            start, first = start + part, first + 1
        return np.concatenate(pieces)
