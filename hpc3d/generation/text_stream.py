"""Streaming detokenizer: a character is returned once all of its bytes have arrived."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hpc3d.data.tokenizer import Tokenizer

_UNKNOWN = "\ufffd"  # replaces invalid or incomplete bytes


class TextStream:
    """Text of a sequence of tokens, piece by piece.  Invalid UTF-8 becomes U+FFFD.

    Some tokenizers decode a token differently at the beginning of a text, so a piece is the growth
    of the text since the previous piece.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer, self.tokens, self.text = tokenizer, [], ""
        self._first = self._given = 0

    def push(self, token: int) -> str:
        """Add a token, and return the text that it completes."""
        self.tokens.append(token)
        piece = self._piece()
        return "" if piece.endswith(_UNKNOWN) else self._out(piece)

    def end(self) -> str:
        """Return the remaining text."""
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
