"""Tokens as they come, as text: a letter is given out when all of its bytes are there."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hpc3d.data.tokenizer import Tokenizer

_UNKNOWN = "\ufffd"  # what bytes that are no letter, or not yet, become


class TextStream:
    """The text of a row of tokens, piece by piece.  What is not UTF-8 becomes U+FFFD.

    Some tokenizers write a token otherwise at the beginning of a text: a piece is what the text
    since the piece before that grows by.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer, self.tokens, self.text = tokenizer, [], ""
        self._first = self._given = 0

    def push(self, token: int) -> str:
        """The text that is complete with one more token."""
        self.tokens.append(token)
        piece = self._piece()
        return "" if piece.endswith(_UNKNOWN) else self._out(piece)

    def end(self) -> str:
        """What is left of it."""
        return self._out(self._piece())

    def _piece(self) -> str:
        given = self._decoded(self.tokens[self._first : self._given])
        return self._decoded(self.tokens[self._first :])[len(given) :]

    def _out(self, piece: str) -> str:
        self._first, self._given = self._given, len(self.tokens)
        self.text += piece
        return piece

    def _decoded(self, tokens: list[int]) -> str:
        return self.tokenizer.decode(tokens).decode("utf-8", "replace")
