"""Streaming detokenizer, which returns a character once all of its bytes have arrived."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hpc3d.data.tokenizer import Tokenizer

_UNKNOWN = "\ufffd"  # replacement for invalid or incomplete bytes


class TextStream:
    """Incremental decoder of a token sequence.  Invalid UTF-8 becomes U+FFFD.

    Some tokenizers decode a token differently at the beginning of a text. New tokens are therefore
    decoded together with the previous tokens, whose text is then removed from the result.

    A decoder with byte fallback replaces all adjacent byte tokens by U+FFFD if one of their bytes
    is invalid. The text of byte tokens is therefore returned after the last one of them.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer, self.tokens, self.text = tokenizer, [], ""
        self._first = self._given = 0

    def push(self, token: int) -> str:
        """Add a token, and return the newly completed text, which may be empty."""
        self.tokens.append(token)
        if token in self.tokenizer.fallback:
            return ""
        piece = self._piece()
        return "" if piece.endswith(_UNKNOWN) else self._out(piece)

    def end(self) -> str:
        """Return the remaining text, including an incomplete character, after the last token."""
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
