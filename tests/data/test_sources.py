"""Texts and tokens in the formats of other programs."""

import bz2
import gzip
import json
import lzma
import re
import struct

import numpy as np
import pytest

from hpc3d.data import sources
from hpc3d.data.sources import Source, opened_ids
from hpc3d.data.token_file import open_tokens
from hpc3d.data.tokenizer import ByteTokenizer
from hpc3d.data.tokenizer_files import characters
from tests.data.prepared import TEXT, call, nano, row
from tests.elided import elided


def test_each_json_line_is_a_document(tmp_path, prepared):
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
        ('{"body": "a"}\n', 'line 1 has no text field "text"; set --field to one ...: body'),
        ("[1]\n", "line 1: not a JSON object"),
        ('{"text": 3}\n', 'line 1 has no text field "text"; use a file with text fields'),
        (
            '{"text": [{"role": "user", "content": "a"}], "id": "b"}\n',
            'line 1 has no text field "text"; this field is a list; if it contains chat messages, '
            "apply the chat template of the model first, and write the result to a text field",
        ),
        ('{"text": "a\\u0000"}\n', "line 1: the text contains NUL"),
        (b'{"text": "\xff"}\n', "line 1"),
        (b"\xff\xfe{\0", "line 1"),  # UTF-16
        ('\n{"text": "\\ud800"}\n', "line 2: surrogates"),
        ("[" * 100_000, "line 1"),
        ("\n \n", "the file has no documents"),
    ],
)
def test_invalid_json_lines_are_located(content, said, tmp_path, prepared):
    content = content if isinstance(content, bytes) else content.encode()
    (tmp_path / "a.jsonl").write_bytes(content)
    line = prepared("a.jsonl")
    assert re.search(elided(said), line)
    assert ("not a readable JSON lines file" in line) != ("no text field" in line)


def test_each_parquet_row_is_a_document(tmp_path, prepared):
    pyarrow = pytest.importorskip("pyarrow", reason="extra parquet")
    from pyarrow import parquet

    table = pyarrow.table({"text": ["one", "two"], "n": [1, 2]})
    parquet.write_table(table, tmp_path / "a.parquet")
    assert bytes(prepared("a.parquet")[0]) == b"one\0two\0"
    line = prepared("a.parquet", "--field", "body")
    assert line.endswith(
        "a.parquet has no column body; set --column to one of its columns: text, n\n"
    )
    line = prepared("a.parquet", "--field", "n")
    assert re.search(r"a\.parquet: row 1 of column n has type int64, not text; set --column", line)
    (tmp_path / "b.parquet").write_bytes(b"PAR1 no")
    assert "not a readable Parquet" in prepared("b.parquet")


# Tokens of nanoGPT


def test_nanogpt_character_ids_are_preserved(tmp_path, prepared, capsys):
    text = "O for a\nMuse of fire, that would ascend"
    expected = nano(tmp_path, text)
    ids, tokenizer, _ = prepared("train.bin")
    printed = capsys.readouterr()
    assert ids == expected and "tokenizer   characters\n" in printed.out
    assert "format of nanoGPT" not in printed.err  # meta.pkl determines the format
    assert tokenizer.decode(ids).decode() == text
    assert tokenizer.encode(text.encode()).tolist() == expected


def test_character_missing_from_the_tokenizer_is_named(tmp_path, prepared):
    (tmp_path / "tokenizer.json").write_text(characters({"O": 0, "\n": 1, " ": 2}).json)
    (tmp_path / "b.txt").write_text("O O\nO ☃")
    how = ["--tokenizer", str(tmp_path), "--end", "\n"]
    assert "b.txt is not encodable with this tokenizer (it contains '☃', which" in prepared(
        "b.txt", *how
    )
    (tmp_path / "b.txt").write_text("O O\nO ")
    assert prepared("b.txt", *how)[0] == [0, 2, 0, 1, 0, 2, 1]


@pytest.mark.parametrize("kind", ["<i4", "<u4", "<i8"])
def test_nanogpt_ids_wider_than_16_bits_are_rejected(kind, tmp_path, prepared):
    """Otherwise, both halves of an id would be read as ids."""
    ids = np.array(nano(tmp_path, TEXT))
    ids.astype(kind).tofile(tmp_path / "train.bin")
    assert "every second id is at most 0" in prepared("train.bin")


def test_all_nanogpt_files_must_use_the_same_characters(tmp_path, prepared, capsys):
    other = tmp_path / "other"
    other.mkdir()
    ids = [*nano(tmp_path, "abc abc"), *nano(other, "cab")]
    both = [tmp_path / "train.bin", other / "train.bin", "-o", tmp_path / "both.h5"]
    code, _, said = call(capsys, *both)
    assert code == 2 and "differs from the tokenizer next to" in said
    (other / "tokenizer.json").write_text(characters({"x": 0, "y": 1}).json)
    assert "prepare it separately" in prepared("train.bin", "--tokenizer", str(other))
    ids[7:] = nano(other, " cba")
    assert call(capsys, *both)[0] == 0
    assert row(tmp_path / "both.h5", None).tolist() == ids


def test_gpt2_ids_require_their_tokenizer(tmp_path, prepared, bpe, capsys):
    ids = [5, 274, 0, 7]
    np.array(ids, np.uint16).tofile(tmp_path / "train.bin")
    (tmp_path / "tokenizer.json").write_text(bpe.json)
    assert "--tokenizer" in prepared("train.bin")
    assert "not from the tokenizer byte" in prepared("train.bin", "--tokenizer", "byte")
    assert prepared("train.bin", "--tokenizer", str(tmp_path / "tokenizer.json"))[0] == ids
    line = "train.bin: read as uint16 token ids, the format of nanoGPT; ... put train.idx, which "
    assert re.search(elided(line), capsys.readouterr().err)
    np.array([5, 300], np.uint16).tofile(tmp_path / "train.bin")
    beyond = prepared("train.bin", "--tokenizer", str(tmp_path / "tokenizer.json"))
    assert f"id 300 is not among the {bpe.vocabulary} ids of the tokenizer" in beyond
    (tmp_path / "train.bin").write_bytes(b"abc")
    assert "3 bytes" in prepared("train.bin", "--tokenizer", str(tmp_path / "tokenizer.json"))


# An indexed dataset of Megatron-LM


def megatron(folder, documents, code=8, kind="<u2", version=1):
    """Write a.bin and a.idx; a document consists of sequences."""
    sequences = [each for document in documents for each in document]
    np.concatenate([np.array(each, kind) for each in sequences]).tofile(folder / "a.bin")
    sizes = np.array([len(each) for each in sequences], "<i4")
    starts = np.cumsum([0, *sizes[:-1]]) * np.dtype(kind).itemsize
    edges = np.cumsum([0, *map(len, documents)])
    head = struct.pack("<QBQQ", version, code, len(sizes), len(edges))
    body = sizes.tobytes() + starts.astype("<i8").tobytes() + edges.astype("<i8").tobytes()
    (folder / "a.idx").write_bytes(b"MMIDIDX\x00\x00" + head + body)


@pytest.mark.parametrize(("code", "kind"), [(8, "<u2"), (1, "u1"), (5, "<i8")])
def test_documents_of_an_indexed_dataset_end_with_the_end_token(
    tmp_path, bpe, code, kind, monkeypatch
):
    """One document has the end token already, one is empty, and one has two sequences."""
    megatron(tmp_path, [[[1, 2], [3]], [[4, 0]], [[]], [[5, 6, 7]]], code, kind)
    for piece in range(1, 10):
        monkeypatch.setattr(sources, "PIECE", piece)
        source = Source(tmp_path / "a.bin", bpe)
        ids = np.concatenate([part for part, _ in source]).tolist()
        assert ids == [1, 2, 3, 0, 4, 0, 5, 6, 7, 0]


@pytest.mark.parametrize(
    ("place", "content", "said"),
    [
        (8, b"\x01", "not a Megatron-LM index file"),
        (9, b"\x02", "version 2"),
        (17, b"\x63", "type 99"),
        (17, b"\x07", "type 7"),  # float32
        (18, struct.pack("<Q", 2**60), "is truncated"),
        (26, struct.pack("<Q", 2**63), "is truncated"),
        (18, struct.pack("<QQ", 0, 1), "no documents"),
        (34, struct.pack("<i", 9), "sequences are not contiguous"),
        (34, struct.pack("<i", -3), "sequences are not contiguous"),
        (38, struct.pack("<i", 3), "5 ids, but a.idx lists 6"),
        (42, struct.pack("<q", -8), "sequences are not contiguous"),
        (58, struct.pack("<q", 1), "documents are not contiguous"),
        (66, struct.pack("<q", 2**40), "documents are not contiguous"),
    ],
)
def test_damaged_dataset_index_is_rejected(place, content, said, tmp_path):
    megatron(tmp_path, [[[1, 2, 3]], [[4, 5]]])
    index = tmp_path / "a.idx"
    good = index.read_bytes()
    index.write_bytes(good[:place] + content + good[place + len(content) :])
    with pytest.raises(ValueError, match=rf"\Adata\.path: .*{said}"):
        opened_ids(tmp_path / "a.bin")


def test_truncated_dataset_is_rejected(tmp_path):
    megatron(tmp_path, [[[1, 2, 3]], [[4, 5]]])
    for name in ("a.idx", "a.bin"):
        good = (tmp_path / name).read_bytes()
        for size in range(len(good)):
            (tmp_path / name).write_bytes(good[:size])
            with pytest.raises(ValueError, match=r"\Adata\.path: "):
                opened_ids(tmp_path / "a.bin")
        (tmp_path / name).write_bytes(good)


def test_short_documents_are_encoded_in_one_batch(tmp_path):
    lines = [json.dumps({"text": str(number)}) for number in range(1000)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    ((ids, size),) = Source(tmp_path / "a.jsonl", ByteTokenizer())
    assert bytes(ids.tolist()) == "".join(f"{number}\0" for number in range(1000)).encode()
    assert size == (tmp_path / "a.jsonl").stat().st_size


def test_long_document_is_encoded_in_pieces(tmp_path, bpe, monkeypatch):
    monkeypatch.setattr(sources, "PIECE", 10)
    text = "the cat sat on the mat"
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": text}) + "\n")
    parts = [ids for ids, _ in Source(tmp_path / "a.jsonl", bpe)]
    assert len(parts) == 3 and bpe.decode(np.concatenate(parts)) == text.encode()
    assert sum(int((ids == bpe.end).sum()) for ids in parts) == 1 and parts[-1][-1] == bpe.end


def test_documents_without_a_known_end_token_are_rejected(tmp_path, prepared, bpe):
    """The end token of this vocabulary has an unknown name."""
    spec = json.loads(bpe.json.replace("<|end|>", "<|over|>"))
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec))
    (tmp_path / "a.txt").write_text("the cat")
    words = "a.txt", "--tokenizer", str(tmp_path)
    assert "--end" in prepared(*words)
    error = prepared(*words, "--end", "<|none|>")
    assert f"--end <|none|>: '<|none|>' is not a token of the tokenizer {tmp_path}; use" in error
    ids, tokenizer, _ = prepared(*words, "--end", "<|over|>")
    assert ids[-1] == tokenizer.end == 0 and tokenizer.end_name == "<|over|>"
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": {"content": "<|over|>"}}')
    assert prepared(*words)[0] == ids


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet", "a.bin"])
def test_training_on_other_formats_suggests_prepare(name, tmp_path):
    (tmp_path / name).write_text("{}")
    with pytest.raises(
        ValueError, match=r"^data\.path: .* is not a token file; .* hpc3d\.prepare "
    ):
        open_tokens(tmp_path / name)


@pytest.mark.parametrize("pack", [gzip.compress, bz2.compress, lzma.compress])
def test_compressed_text_is_rejected(pack, tmp_path, prepared):
    (tmp_path / "a.txt").write_bytes(pack(TEXT.encode()))
    assert "a.txt is compressed; unpack it first" in prepared("a.txt")
