"""Texts and tokens in the formats of others."""

import base64
import json
import pickle
import struct

import numpy as np
import pytest

from hpc3d import prepare
from hpc3d.data.sources import opened_ids
from hpc3d.data.token_file import TokenFile, open_tokens, tokenizer_of
from hpc3d.data.tokenizer import BpeTokenizer, ByteTokenizer, tokenizer_from, train_bpe

TEXT = "Let us go then, you and I, when the evening is spread out against the sky. " * 40


@pytest.fixture(scope="module")
def bpe():
    return train_bpe([TEXT.encode()], 300)


@pytest.fixture
def prepared(tmp_path, capsys):
    """The ids and the tokenizer of a token file made of a file, or what is wrong."""

    def make(name, *words):
        out = tmp_path / "tokens.h5"
        out.unlink(missing_ok=True)
        code = prepare.main([str(tmp_path / name), "-o", str(out), *words])
        if code:
            error = capsys.readouterr().err
            assert code == 2 and error.count("\n") == 1, error
            assert not out.exists()
            return error
        with TokenFile(out) as tokens:
            return tokens.read(0, len(tokens)).tolist(), tokenizer_of(out), tokens.documents

    return make


def test_json_lines_are_a_document_each(tmp_path, prepared):
    lines = [{"text": "one", "id": 1}, {"text": "zwei ä\n", "id": 2}]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    ids, _, documents = prepared("a.jsonl")
    assert bytes(ids) == "one\0zwei ä\n\0".encode() and documents == 2
    (tmp_path / "b.jsonl").write_text('{"body": "x"}\n')
    assert bytes(prepared("b.jsonl", "--field", "body")[0]) == b"x\0"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ('{"text": "a"}\n{"text": ', "line 2"),
        ('{"body": "a"}\n', "line 1: no text .text. in it, but body"),
        ("[1]\n", "line 1: no text"),
        ('{"text": 3}\n', "line 1: no text"),
        ('{"text": "a\\u0000"}\n', "line 1: it holds NUL"),
        (b'{"text": "\xff"}\n', "line 1"),
    ],
)
def test_json_lines_that_are_wrong_are_named(content, said, tmp_path, prepared):
    content = content if isinstance(content, bytes) else content.encode()
    (tmp_path / "a.jsonl").write_bytes(content)
    assert said.replace(".text.", '"text"') in prepared("a.jsonl")


def test_parquet_is_a_document_a_row(tmp_path, prepared):
    pyarrow = pytest.importorskip("pyarrow", reason="extra parquet")
    from pyarrow import parquet

    table = pyarrow.table({"text": ["one", "two"], "n": [1, 2]})
    parquet.write_table(table, tmp_path / "a.parquet")
    assert bytes(prepared("a.parquet")[0]) == b"one\0two\0"
    assert "no column body, but text, n" in prepared("a.parquet", "--field", "body")
    assert "no text" in prepared("a.parquet", "--field", "n")
    (tmp_path / "b.parquet").write_bytes(b"PAR1 no")
    assert "no readable parquet" in prepared("b.parquet")


# Tokens of nanoGPT


def nano(folder, text):
    """train.bin and meta.pkl as its shakespeare_char/prepare.py writes them."""
    letters = sorted({*text})
    stoi = {letter: number for number, letter in enumerate(letters)}
    itos = dict(enumerate(letters))
    np.array([stoi[letter] for letter in text], np.uint16).tofile(folder / "train.bin")
    meta = {"vocab_size": len(letters), "itos": itos, "stoi": stoi}
    (folder / "meta.pkl").write_bytes(pickle.dumps(meta))
    return [stoi[letter] for letter in text]


def test_characters_of_nanogpt_keep_their_numbers(tmp_path, prepared):
    text = "O for a\nMuse of fire, that would ascend"
    expected = nano(tmp_path, text)
    ids, tokenizer, _ = prepared("train.bin")
    assert ids == expected
    assert tokenizer.decode(ids).decode() == text
    assert tokenizer.encode(text.encode()).tolist() == expected


class Evil:
    def __reduce__(self):
        return print, ("executed",)


@pytest.mark.parametrize("content", [Evil(), {"stoi": Evil()}, {"stoi": {"a": 1}}, {}, [1]])
def test_a_pickle_that_is_no_plain_dict_is_refused(content, tmp_path, prepared, capsys):
    nano(tmp_path, "ab")
    (tmp_path / "meta.pkl").write_bytes(pickle.dumps(content))
    said = prepared("train.bin")
    assert "meta.pkl" in said and "executed" not in capsys.readouterr().out


def test_ids_of_gpt2_want_its_tokenizer(tmp_path, prepared, bpe):
    ids = [5, 299, 0, 7]
    np.array(ids, np.uint16).tofile(tmp_path / "train.bin")
    (tmp_path / "tokenizer.json").write_text(bpe.json)
    assert "--tokenizer" in prepared("train.bin")
    assert "not of byte" in prepared("train.bin", "--tokenizer", "byte")
    assert prepared("train.bin", "--tokenizer", str(tmp_path / "tokenizer.json"))[0] == ids
    np.array([5, 300], np.uint16).tofile(tmp_path / "train.bin")
    beyond = prepared("train.bin", "--tokenizer", str(tmp_path / "tokenizer.json"))
    assert "id 300 is not below the tokenizer's 300" in beyond
    (tmp_path / "train.bin").write_bytes(b"abc")
    assert "3 bytes" in prepared("train.bin", "--tokenizer", str(tmp_path / "tokenizer.json"))


# An indexed dataset of Megatron-LM


def megatron(folder, sequences, code=8, kind="<u2", version=1):
    np.concatenate([np.array(each, kind) for each in sequences]).tofile(folder / "a.bin")
    sizes = np.array([len(each) for each in sequences], "<i4")
    starts = np.cumsum([0, *sizes[:-1]]) * np.dtype(kind).itemsize
    documents = np.arange(len(sequences) + 1, dtype="<i8")
    head = struct.pack("<QBQQ", version, code, len(sizes), len(documents))
    body = sizes.tobytes() + starts.astype("<i8").tobytes() + documents.tobytes()
    (folder / "a.idx").write_bytes(b"MMIDIDX\x00\x00" + head + body)


@pytest.mark.parametrize(("code", "kind"), [(8, "<u2"), (4, "<i4")])
def test_an_indexed_dataset_is_read(tmp_path, prepared, bpe, code, kind):
    (tmp_path / "tokenizer.json").write_text(bpe.json)
    megatron(tmp_path, [[1, 2, 3], [4], [5, 6]], code, kind)
    ids, _, documents = prepared("a.bin", "--tokenizer", str(tmp_path / "tokenizer.json"))
    assert ids == [1, 2, 3, 4, 5, 6] and documents == 3


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda data: b"MMIDIDX\x00\x01" + data[9:], "no index of Megatron-LM"),
        (lambda data: data[:20], "no index of Megatron-LM"),
        (lambda data: data[:40], "is cut short"),
        (lambda data: data[:9] + struct.pack("<Q", 2) + data[17:], "version 2"),
        (lambda data: data[:17] + b"\x63" + data[18:], "type 99"),
        (lambda data: data[:34] + struct.pack("<i", 9) + data[38:], "is of another file"),
    ],
)
def test_an_index_that_is_damaged_is_refused(damage, said, tmp_path):
    megatron(tmp_path, [[1, 2, 3], [4]])
    index = tmp_path / "a.idx"
    index.write_bytes(damage(index.read_bytes()))
    with pytest.raises(ValueError, match=said):
        opened_ids(tmp_path / "a.bin")


# Tokenizers of others


def test_a_tokenizer_json_is_taken_as_it_is(tmp_path, prepared, bpe):
    (tmp_path / "tokenizer.json").write_text(bpe.json)
    (tmp_path / "a.txt").write_text(TEXT)
    ids, tokenizer, _ = prepared("a.txt", "--tokenizer", str(tmp_path))
    assert ids == [*bpe.encode(TEXT.encode()), bpe.end]
    assert tokenizer.decode(ids[:-1]).decode() == TEXT


def test_ranks_and_the_two_files_of_gpt2_cut_as_their_tokenizer_does(tmp_path, bpe):
    """The same vocabulary as ranks of tiktoken, where a byte or a merge has the rank of its id."""
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
    """bytes_to_unicode of GPT-2's encoder.py."""
    seen = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1)]
    seen += range(ord("®"), ord("ÿ") + 1)
    table, extra = {byte: chr(byte) for byte in seen}, 0
    for byte in range(256):
        if byte not in table:
            table[byte], extra = chr(256 + extra), extra + 1
    return table


@pytest.mark.parametrize("content", ["{}", "no json", '{"model": 1}'])
def test_a_tokenizer_that_is_none_is_refused(content, tmp_path, prepared):
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / "tokenizer.json").write_text(content)
    assert "no readable tokenizer" in prepared("a.txt", "--tokenizer", str(tmp_path))
    (tmp_path / "tokenizer.json").unlink()
    assert "it has no tokenizer.json" in prepared("a.txt", "--tokenizer", str(tmp_path))


def test_the_end_of_a_document_is_that_of_the_tokenizer(bpe):
    assert ByteTokenizer.end == bpe.end == 0
    spec = json.loads(bpe.json)
    spec["model"]["vocab"]["<|endoftext|>"] = 300
    del spec["model"]["vocab"]["<|end|>"]
    spec["added_tokens"] = []
    other = BpeTokenizer(json.dumps(spec))
    assert (other.end, other.end_name, other.vocabulary) == (300, "<|endoftext|>", 301)


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet", "a.bin"])
def test_training_wants_a_token_file_of_them(name, tmp_path):
    (tmp_path / name).write_text("{}")
    with pytest.raises(ValueError, match=r"^data\.path: .* is no text: .* hpc3d\.prepare "):
        open_tokens(tmp_path / name)
