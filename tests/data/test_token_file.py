"""Token files: writing, and validation when they are read."""

import hashlib
import json
import os
import tracemalloc

import h5py
import numpy as np
import pytest

from hpc3d.checkpoints.run_tokenizer import refuse_another
from hpc3d.config.input_file import ModelConfig
from hpc3d.data.mixture import open_texts
from hpc3d.data.token_file import open_tokens, write_tokens
from hpc3d.data.tokenizer import ByteTokenizer
from hpc3d.data.tokenizer_files import characters, meta_tokenizer
from hpc3d.data.validation import separate_texts
from tests.data.prepared import TEXT, call, nano, row


@pytest.mark.slow
def test_large_text_is_not_loaded_into_memory(tmp_path, output):
    large = tmp_path / "large.txt"
    large.write_bytes(b"one long line " * (4 << 20))
    tracemalloc.start()
    write_tokens(output, [large], ByteTokenizer())
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < large.stat().st_size / 3
    assert len(row(output)) == large.stat().st_size + 1


def test_end_of_document_token_is_known(tmp_path, bpe, output):
    (tmp_path / "a.txt").write_text("four")
    write_tokens(output, [tmp_path / "a.txt"], bpe)
    for path, end in ((tmp_path, 0), (output, bpe.end)):
        with open_tokens(path) as tokens:
            assert tokens.end() == end == tokens.read(len(tokens) - 1, len(tokens))[0]


def test_messages_describe_the_type_of_the_tokenizer(tmp_path, bpe, output):
    text = tmp_path / "a.txt"
    text.write_text("xx")
    found = []
    for tokenizer in (ByteTokenizer(), bpe, characters({"x": 0, "y": 1})):
        write_tokens(output, [text], tokenizer)
        with open_tokens(output) as tokens:
            found.append(tokens.described())
    letters = "characters, vocabulary 2"
    assert found == ["byte, vocabulary 256", "bpe, vocabulary 275", letters]
    with pytest.raises(ValueError, match=rf"\({letters}\) differs from .* \({found[0]}\);"):
        open_texts([text, output], [1, 1])
    with pytest.raises(ValueError, match=rf"\({letters}\) differs from .* \({found[0]}\);"):
        separate_texts([output], open_tokens(text))
    (tmp_path / "tokenizer.json").write_text(bpe.json)
    with open_tokens(output) as tokens, pytest.raises(ValueError, match=rf"\({letters}\) differs"):
        refuse_another(tmp_path, tokens, ModelConfig())


@pytest.mark.slow
def test_large_vocabulary_is_stored_as_uint32(tmp_path, output):
    class Wide:
        name, vocabulary, json = "wide", 70_000, "x" * 200_000
        end, end_name = 0, None

        def encode_batch(self, texts):
            return [np.arange(len(text), dtype=np.uint32) + 69_000 for text in texts]

    (tmp_path / "a.txt").write_text("four")
    write_tokens(output, [tmp_path / "a.txt"] * 5000, Wide())
    with h5py.File(output) as raw:
        assert raw["tokens"].dtype == np.uint32 and len(raw.attrs["tokenizer_json"]) == 200_000
    assert row(output, "wide")[:6].tolist() == [69_000, 69_001, 69_002, 69_003, 0, 69_000]


def test_verify_reports_the_file_contents(capsys, text, output):
    call(capsys, text, "-o", output)
    code, lines, error = call(capsys, "--verify", output, "--json")
    assert code == 0 and error == ""
    assert json.loads(lines[-1])["sha256"] == hashlib.sha256(TEXT.encode() + b"\0").hexdigest()


def test_verify_of_a_damaged_file_exits_with_3(capsys, text, output):
    call(capsys, text, "-o", output)
    with h5py.File(output, "r+") as raw:
        raw["tokens"][7] = 7
    code, lines, error = call(capsys, "--verify", output, "--json")
    assert code == 3 and lines == [] and error.count("\n") == 1
    assert error.startswith(f"hpc3d.prepare: {output} ") and "SHA-256" in error
    output.write_bytes(output.read_bytes()[:5000])
    assert call(capsys, "--verify", output)[0] == 3


@pytest.mark.parametrize("name", ["pipe", "pipe.h5", "/dev/null", "empty", "empty.txt"])
def test_text_that_is_not_a_regular_file_or_is_empty_is_rejected(name, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "a.txt").touch()
    (tmp_path / "empty.txt").touch()
    for pipe in ("pipe", "pipe.h5"):
        os.mkfifo(tmp_path / pipe)
    what = "is empty" if "empty" in name else "is not a regular file"
    with pytest.raises(ValueError, match=f"^data.path: {tmp_path / name} {what}; "):
        open_tokens(tmp_path / name)


def test_unreadable_folder_of_texts_is_named(tmp_path, monkeypatch):
    def denied(path):
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr(os, "listdir", denied)
    with pytest.raises(ValueError, match=f"^data.path: {tmp_path}: Permission denied; "):
        open_tokens(tmp_path)


def test_size_of_the_text_is_known_unless_the_file_was_made_from_ids(tmp_path, text, bpe, output):
    """Tests texts, JSON lines, ids, and files of earlier versions, which lack the attribute."""
    lines = tmp_path / "lines.jsonl"
    lines.write_text("".join(json.dumps({"text": each}) + "\n" for each in ("größer", "cat")))
    nano(tmp_path, "cat")
    size = len(TEXT.encode())
    character = meta_tokenizer(tmp_path / "train.bin")
    for texts, tokenizer, expected in [
        ([text], bpe, size),
        ([text, lines], ByteTokenizer(), size + 8 + 3),
        ([tmp_path / "train.bin"], character, None),
        ([text], ByteTokenizer(), size),
    ]:
        write_tokens(output, texts, tokenizer)
        with open_tokens(output) as tokens:
            assert tokens.text_bytes == expected
    with h5py.File(output, "r+") as raw:
        del raw.attrs["text_bytes"]
    with open_tokens(output) as tokens, open_tokens(text) as same:
        assert tokens.text_bytes == same.text_bytes == size
