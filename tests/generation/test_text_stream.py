"""Pieces of a streamed text contain whole characters and concatenate to the text."""

import numpy as np
import pytest

from hpc3d.data.tokenizer import ByteTokenizer, train_bpe
from hpc3d.generation.text_stream import TextStream

TEXT = "naïve: 日本 \N{GRINNING FACE} e\N{COMBINING ACUTE ACCENT} end"


def pushed(tokenizer, tokens):
    stream = TextStream(tokenizer)
    pieces = [stream.push(int(token)) for token in tokens]
    return [*pieces, stream.end()], stream


@pytest.mark.parametrize("kind", ["byte", "bpe"])
def test_stream_emits_only_complete_characters(kind):
    if kind == "bpe":
        pytest.importorskip("tokenizers")
    tokenizer = ByteTokenizer() if kind == "byte" else train_bpe([TEXT.encode()], 262)
    tokens = tokenizer.encode(TEXT.encode())
    pieces, stream = pushed(tokenizer, tokens)
    assert "".join(pieces) == stream.text == TEXT
    assert "\ufffd" not in "".join(pieces)
    assert pieces[-1] == "" and len([*filter(None, pieces)]) > 10
    assert stream.tokens == [*tokens]


def test_invalid_bytes_are_replaced_once_known():
    pieces, _ = pushed(ByteTokenizer(), b"a\xe2\x82b\xff")
    assert pieces == ["a", "", "", "\ufffdb", "", "\ufffd"]


class Spaced:
    """Tokenizer that writes a space before each word but the first, as in SentencePiece."""

    def decode(self, tokens):
        return " ".join(["one", "two", "three"][token] for token in np.asarray(tokens)).encode()


def test_tokenizer_may_render_the_first_token_differently():
    pieces, _ = pushed(Spaced(), [0, 1, 1, 2])
    assert pieces == ["one", " two", " two", " three", ""]
