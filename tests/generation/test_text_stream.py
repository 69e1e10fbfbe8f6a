"""Pieces of a streamed text contain whole characters and concatenate to the text."""

import numpy as np
import pytest

from hpc3d.data.tokenizer import BpeTokenizer, ByteTokenizer, train_bpe
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


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize(
    "ids",
    [
        pytest.param([2, *[4 + 0xD8] * 9], id="only-invalid-bytes"),
        pytest.param([2, 4 + 0xC3, 4 + 0xA9, 4 + 0xD8, 3, 4 + 0xD8], id="valid-then-invalid"),
        pytest.param([4 + 0xC3, 4 + 0xA9, 3, 2, 4 + 0xC3, 4 + 0xA9], id="only-valid-bytes"),
    ],
)
def test_byte_fallback_equals_the_decoder_of_tokenizers(ids, special):
    bpe = pytest.importorskip("tokenizers")
    names = ["<unk>", "<eos>", "iz", "▁a", *(f"<0x{byte:02X}>" for byte in range(256))]
    vocabulary = {name: number for number, name in enumerate(names)}
    plain = bpe.Tokenizer(bpe.models.BPE(vocabulary, [], byte_fallback=True, unk_token="<unk>"))
    step = bpe.decoders
    plain.decoder = step.Sequence([step.Replace("▁", " "), step.ByteFallback(), step.Fuse()])
    plain.add_special_tokens([*names[:2], *(names[4:] if special else ())])
    pieces, stream = pushed(BpeTokenizer(plain.to_str()), ids)
    assert "".join(pieces) == stream.text == plain.decode(ids, skip_special_tokens=False)
    assert BpeTokenizer(plain.to_str()).decode([1, *ids, 0]) == stream.text.encode()


class Spaced:
    """Tokenizer that writes a space before each word but the first, as in SentencePiece."""

    fallback = ()

    def decode(self, tokens):
        return " ".join(["one", "two", "three"][token] for token in np.asarray(tokens)).encode()


def test_tokenizer_may_render_the_first_token_differently():
    pieces, _ = pushed(Spaced(), [0, 1, 1, 2])
    assert pieces == ["one", " two", " two", " three", ""]
