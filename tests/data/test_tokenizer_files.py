"""Tokenizers in the file formats of other programs."""

import base64
import hashlib
import json
import pickle
import re

import pytest

from hpc3d.data import tokenizer_files
from hpc3d.data.tokenizer import BpeTokenizer, ByteTokenizer
from hpc3d.data.tokenizer_files import rules_of_bytes, tokenizer_from
from tests.data.prepared import TEXT, nano


def test_tokenizer_json_is_used_as_is(tmp_path, prepared, bpe):
    (tmp_path / "tokenizer.json").write_text(bpe.json)
    (tmp_path / "a.txt").write_text(TEXT)
    ids, tokenizer, _ = prepared("a.txt", "--tokenizer", str(tmp_path))
    assert ids == [*bpe.encode(TEXT.encode()), bpe.end]
    assert tokenizer.decode(ids[:-1]).decode() == TEXT


def test_tiktoken_ranks_and_gpt2_files_match_their_tokenizer(tmp_path, bpe):
    """Tests also the tiktoken form, in which the rank of a byte or a merge is its id."""
    model = json.loads(bpe.json)["model"]
    letters = {letter: byte for byte, letter in _letters_of_gpt2().items()}
    numbers = {token: id for token, id in model["vocab"].items() if token != "<|end|>"}
    ranks = [
        f"{base64.b64encode(bytes(letters[letter] for letter in token)).decode()} {id - 1}"
        for token, id in sorted(numbers.items(), key=lambda item: item[1])
    ]
    (tmp_path / "own.tiktoken").write_text("\n".join(ranks) + "\n")
    text = (TEXT + "ä€ 1234\n\n  x").encode()
    expected = bpe.encode(text)
    found = tokenizer_from(str(tmp_path / "own.tiktoken"))
    assert found.encode(text).tolist() == (expected.astype(int) - 1).tolist()
    assert found.decode(found.encode(text)) == text and found.end == len(numbers)
    (tmp_path / "vocab.json").write_text(json.dumps(model["vocab"]))
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]
    (tmp_path / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges) + "\n")
    assert tokenizer_from(str(tmp_path)).encode(text).tolist() == expected.tolist()


def _letters_of_gpt2():
    """Function bytes_to_unicode of GPT-2's encoder.py."""
    seen = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1)]
    seen += range(ord("®"), ord("ÿ") + 1)
    table, extra = {byte: chr(byte) for byte in seen}, 0
    for byte in range(256):
        if byte not in table:
            table[byte], extra = chr(256 + extra), extra + 1
    return table


@pytest.mark.parametrize("content", ["{}", "no json", '{"model": 1}'])
def test_invalid_tokenizer_is_rejected(content, tmp_path, prepared):
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / "tokenizer.json").write_text(content)
    assert "not a readable tokenizer" in prepared("a.txt", "--tokenizer", str(tmp_path))
    (tmp_path / "tokenizer.json").unlink()
    said = prepared("a.txt", "--tokenizer", str(tmp_path))
    assert re.search(
        "neither tokenizer.json .*; save the tokenizer .*save_pretrained.*, or ", said
    )
    (tmp_path / "snapshots" / "0123").mkdir(parents=True)
    assert "use its snapshot " in prepared("a.txt", "--tokenizer", str(tmp_path))


def test_end_token_is_that_of_the_tokenizer(bpe):
    assert ByteTokenizer.end == bpe.end == 0
    spec = json.loads(bpe.json)
    spec["model"]["vocab"]["<|endoftext|>"] = 300
    del spec["model"]["vocab"]["<|end|>"]
    spec["added_tokens"] = []
    other = BpeTokenizer(json.dumps(spec))
    assert (other.end, other.end_name, other.vocabulary) == (300, "<|endoftext|>", 301)


class Evil:
    def __reduce__(self):
        return print, ("executed",)


@pytest.mark.parametrize("content", [Evil(), {"stoi": Evil()}, {"stoi": {"a": 1}}, {}, [1]])
def test_pickle_other_than_a_plain_dict_is_rejected(content, tmp_path, prepared, capsys):
    nano(tmp_path, "ab")
    (tmp_path / "meta.pkl").write_bytes(pickle.dumps(content))
    said = prepared("train.bin")
    assert "meta.pkl" in said and "executed" not in capsys.readouterr().out


@pytest.mark.parametrize("index", [0x7FFFFFFF, 5])
def test_pickle_cannot_allocate_excessive_memory(index, tmp_path, prepared):
    nano(tmp_path, "ab")
    (tmp_path / "meta.pkl").write_bytes(b"\x80\x04}r" + index.to_bytes(4, "little") + b".")
    assert "not a readable nanoGPT meta.pkl" in prepared("train.bin")


def test_meta_pickle_is_read_in_every_protocol(tmp_path, prepared):
    expected = nano(tmp_path, "O for a Muse")
    meta = pickle.loads((tmp_path / "meta.pkl").read_bytes())
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        (tmp_path / "meta.pkl").write_bytes(pickle.dumps(meta, protocol))
        assert prepared("train.bin")[1].encode(b"O for a Muse").tolist() == expected


@pytest.mark.parametrize(
    ("merges", "numbers"), [("a b", {"a": 0, "b": 1}), ("a", {"a": 0}), ("a c", {"a": 0, "ac": 1})]
)
def test_merges_of_unknown_tokens_are_rejected(merges, numbers, tmp_path, prepared):
    """The tokenizers library would panic."""
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / "vocab.json").write_text(json.dumps(numbers))
    (tmp_path / "merges.txt").write_text(merges)
    assert "merges tokens that are not in the vocab" in prepared(
        "a.txt", "--tokenizer", str(tmp_path)
    )


def test_tiktoken_ranks_with_an_unknown_split_pattern_are_rejected(tmp_path, prepared):
    words = (base64.b64encode(number.to_bytes(3)).decode() for number in range(60_000))
    lines = [f"{word} {number}" for number, word in enumerate(words)]
    (tmp_path / "cl100k_base.tiktoken").write_text("\n".join(lines))
    (tmp_path / "a.txt").write_text("a")
    said = prepared("a.txt", "--tokenizer", str(tmp_path / "cl100k_base.tiktoken"))
    assert "60000 ranks" in said


def test_gpt2_tokenizer_is_read_from_the_tiktoken_cache(tmp_path, prepared, bpe, monkeypatch):
    """Its file name is the SHA-1 of its URL, and its content must be the expected one."""
    (tmp_path / "a.txt").write_text(TEXT)
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path / "none"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "none"))
    monkeypatch.setattr(tokenizer_files.tempfile, "gettempdir", lambda: str(tmp_path / "none"))
    assert "tiktoken.get_encoding" in prepared("a.txt", "--tokenizer", "gpt2")
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    model = json.loads(bpe.json)["model"]
    pairs = [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]
    numbers = json.loads(json.dumps(model["vocab"]).replace("<|end|>", "<|endoftext|>"))
    kept = {"encoder.json": json.dumps(numbers), "vocab.bpe": "\n".join(["#version: 0.2", *pairs])}
    for name, content in kept.items():
        address = "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/" + name
        (tmp_path / hashlib.sha1(address.encode()).hexdigest()).write_text(content)
    assert "tiktoken.get_encoding" in prepared("a.txt", "--tokenizer", "gpt2")
    sums = {name: hashlib.sha256(text.encode()).hexdigest() for name, text in kept.items()}
    monkeypatch.setattr(tokenizer_files, "_GPT2_SHA256", sums)
    ids, tokenizer, _ = prepared("a.txt", "--tokenizer", "gpt2")
    assert ids == [*bpe.encode(TEXT.encode()), 0] and tokenizer.end_name == "<|endoftext|>"


def test_byte_tokenizer_has_an_equivalent_tokenizer_json():
    text = "größer <|end|>\n a\u0100".encode()
    found = BpeTokenizer(rules_of_bytes())
    assert (found.vocabulary, found.end) == (ByteTokenizer.vocabulary, ByteTokenizer.end)
    assert found.encode(text).tolist() == ByteTokenizer().encode(text).tolist()
    assert found.decode(found.encode(text)) == text
