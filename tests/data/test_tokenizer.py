"""Conversion of text to tokens and back."""

import os

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from hpc3d.data import tokenizer as text_module
from hpc3d.data.tokenizer import BpeTokenizer, ByteTokenizer, library, pieces
from tests.data.prepared import TEXT, python


@given(data=st.binary())
def test_byte_tokenizer_round_trips(data):
    ids = ByteTokenizer().encode(data)
    assert ids.dtype == np.uint8 and ids.tolist() == list(data)
    assert ByteTokenizer().decode(ids) == data.replace(b"\0", b"")


@given(text=st.text(st.characters(exclude_characters="\0", codec="utf-8")), size=st.integers(1, 9))
@example(text="a\r\nb\rc\n\ufeffd", size=2)
def test_pieces_concatenate_to_the_text(tmp_path_factory, text, size):
    path = tmp_path_factory.getbasetemp() / "pieces.txt"
    path.write_bytes(text.encode())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text_module, "PIECE", size)
        found = list(pieces(path))
    assert b"".join(found) == text.encode()
    assert all(0 < len(piece.decode()) <= 2 * size for piece in found)


def test_pieces_end_at_line_breaks(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("one\ntwo\nthree\n")
    monkeypatch.setattr(text_module, "PIECE", 6)
    assert list(pieces(tmp_path / "a.txt")) == [b"one\ntwo\n", b"three\n"]


@given(text=st.text(st.characters(codec="utf-8")) | st.just("a<|end|>b"))
def test_bpe_round_trips_any_text(bpe, text):
    ids = bpe.encode(text.encode())
    assert bpe.decode(ids) == text.encode()
    assert all(ids > 0) and all(ids < bpe.vocabulary)
    assert BpeTokenizer(bpe.json).encode(text.encode()).tolist() == ids.tolist()


def test_bpe_learns_frequent_words(bpe):
    assert bpe.vocabulary == 275
    assert len(bpe.encode(b" the the the")) == 3


def test_bpe_training_is_deterministic_across_processes(bpe):
    program = (
        "import sys; from hpc3d.data.tokenizer import train_bpe\n"
        "print(train_bpe([sys.stdin.buffer.read()], 275).json, end='')"
    )
    for threads in ("1", "3"):
        environment = os.environ | {"PYTHONHASHSEED": threads, "RAYON_NUM_THREADS": threads}
        done = python("-c", program, input=TEXT.encode(), env=environment)
        assert done.stdout.decode() == bpe.json


def test_truncation_padding_and_bpe_dropout_are_disabled(bpe):
    """The tokenizer.json of a sentence encoder may enable them."""
    loaded, text = library().Tokenizer.from_str(bpe.json), TEXT.encode()
    loaded.enable_truncation(3)
    loaded.enable_padding(length=len(text) + 1)
    loaded.model.dropout = 0.9
    asking = BpeTokenizer(loaded.to_str())
    assert asking.encode(text).tolist() == bpe.encode(text).tolist()
    (found,) = asking.encode_batch([text])
    assert found.tolist() == bpe.encode(text).tolist()


def test_special_tokens_are_recognized_only_on_request(bpe):
    """Documents are encoded as ordinary text, also after a prompt with special tokens."""
    loaded = library().Tokenizer.from_str(bpe.json)
    loaded.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    tokenizer = BpeTokenizer(loaded.to_str())
    special = [0, *(tokenizer.id_of(name) for name in ("<|im_start|>", "<|im_end|>"))]
    text = b"<|im_start|>user\nthe rain<|im_end|>\n<|end|>"
    ids = tokenizer.encode(text, special=True).tolist()
    assert ids == loaded.encode(text.decode()).ids
    assert {*special} < {*ids}
    (batch,) = tokenizer.encode_batch([text])
    tokenizer.special = True
    assert [each.tolist() for each in tokenizer.encode_batch([text])] == [ids]
    for plain in (batch, tokenizer.encode(text)):
        assert not {*special} & {*plain.tolist()} and tokenizer.decode(plain) == text


def test_invalid_tokenizer_json_is_rejected(bpe):
    for damaged in ("", "{}", bpe.json[:500]):
        with pytest.raises(ValueError, match="BPE tokenizer"):
            BpeTokenizer(damaged)
