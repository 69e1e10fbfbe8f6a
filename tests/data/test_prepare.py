"""The command `prepare`: token files made from texts, and error messages."""

import hashlib
import json
import os
import platform
import re
import runpy
import shutil
import signal
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest

from hpc3d import prepare
from hpc3d.config.input_file import Config, DataConfig
from hpc3d.config.load import to_toml
from hpc3d.data.token_file import TokenFile, write_tokens
from hpc3d.data.tokenizer import BpeTokenizer, ByteTokenizer
from tests.data.prepared import ROOT, TEXT, call, nano, python, row
from tests.elided import elided
from tests.runs import without_progress

CORPUS = ROOT / "inputs" / "corpus"


def test_prepare_writes_a_token_file_that_open_tokens_reads(text, output):
    done = python("-m", "hpc3d.prepare", text, "-o", output, "--json")
    assert done.returncode == 0 and not without_progress(done.stderr.decode())
    printed = done.stdout.decode()
    assert row(output).tolist() == [*TEXT.encode(), 0]
    result = json.loads(printed.splitlines()[-1])
    digest = hashlib.sha256(TEXT.encode() + b"\0").hexdigest()
    expected = {"tokens": len(TEXT.encode()) + 1, "vocabulary": 256, "tokenizer": "byte"}
    expected |= {"documents": 1, "bytes": len(TEXT.encode()), "sha256": digest}
    assert result.items() >= expected.items() and result["seconds"] > 0
    assert "tokens      2,281\n" in printed and "vocabulary  256\n" in printed


def test_sizes_that_token_ids_do_not_determine_are_unknown(capsys, tmp_path, text, output):
    """A train.bin of characters has no end-of-document tokens. JSON lines are longer."""
    nano(tmp_path, TEXT)
    code, lines, _ = call(capsys, tmp_path / "train.bin", "-o", output, "--json")
    found = json.loads(lines[-1])
    assert code == 0 and (found["documents"], found["bytes"]) == (None, None)
    assert "documents   unknown" in lines and "bytes       unknown" in lines
    (tmp_path / "text.jsonl").write_text(json.dumps({"text": TEXT}))
    call(capsys, tmp_path / "text.jsonl", "-o", output, "--force")
    _, lines, _ = call(capsys, "--verify", output, "--json")
    found = json.loads(lines[-1])
    assert (found["documents"], found["bytes"]) == (1, len(TEXT.encode()))
    assert lines[0] == f"{output}: the SHA-256 of the tokens matches"


def test_missing_meta_pkl_is_named(capsys, tmp_path, output):
    nano(tmp_path, TEXT)
    (tmp_path / "meta.pkl").unlink()
    code, _, error = call(capsys, tmp_path / "train.bin", "-o", output)
    assert code == 2 and "or put meta.pkl of nanoGPT into the same folder" in error


def test_token_ids_in_a_folder_of_texts_are_named(capsys, tmp_path, text, output):
    nano(text.parent, TEXT)
    code, _, error = call(capsys, text.parent, "-o", output)
    said = f"only its *.txt files are read; specify {text.parent / 'train.bin'} to read its token"
    assert code == 0 and said in error


def test_output_contains_no_json_without_the_option(capsys, text, output):
    code, lines, error = call(capsys, text, "-o", output)
    assert code == 0 and error == "" and not any("{" in line for line in lines)


def test_folders_and_texts_keep_their_order(capsys, tmp_path, output):
    for name in ("z.txt", "a.txt"):
        (tmp_path / name).write_text(name)
    (tmp_path / "first.md").write_text("first")
    assert call(capsys, tmp_path / "first.md", tmp_path, "-o", output)[0] == 0
    assert row(output).tolist() == list(b"first\0a.txt\0z.txt\0")


def test_bpe_token_file_can_be_decoded(capsys, bpe, text, output):
    copied = shutil.copy(text, text.with_name("copied.txt"))
    words = (text, copied, "-o", output, "--tokenizer", "bpe", "--vocabulary", 275, "--json")
    code, lines, error = call(capsys, *words)
    assert code == 0 and json.loads(lines[-1])["vocabulary"] == 275 and error == ""
    with h5py.File(output) as raw:
        assert raw["tokens"].dtype == np.uint16
        tokenizer = BpeTokenizer(raw.attrs["tokenizer_json"].decode())
    ids = row(output, "bpe")
    assert tokenizer.decode(ids) == (TEXT + TEXT).encode()
    assert (ids == 0).sum() == 2 and ids[-1] == 0


def test_smaller_vocabulary_than_requested_is_reported(capsys, text, output):
    pytest.importorskip("tokenizers")
    words = (text, "-o", output, "--tokenizer", "bpe", "--vocabulary", 5000, "--json")
    code, lines, error = call(capsys, *words)
    found = json.loads(lines[-1])["vocabulary"]
    assert code == 0 and 257 < found < 5000
    assert re.fullmatch(elided(f"hpc3d.prepare: ... {found} tokens instead of 5,000...\n"), error)


def test_token_file_serves_as_tokenizer(capsys, tmp_path, bpe, text, output):
    end = next(token for token in "abc" if bpe.id_of(token))
    second = tmp_path / "second.h5"
    for tokenizer in (bpe, BpeTokenizer(bpe.json, end), ByteTokenizer()):
        write_tokens(output, [text], tokenizer)
        assert call(capsys, text, "-o", second, "--force", "--tokenizer", output)[0] == 0
        with TokenFile(output) as one, TokenFile(second) as other:
            assert one.made_by() == other.made_by() and one.end_name == other.end_name
        assert (row(output, tokenizer.name) == row(second, tokenizer.name)).all()
    words = (text, "-o", second, "--force", "--tokenizer", output, "--end", end)
    code, _, error = call(capsys, *words)
    assert code == 2 and f"--end {end}: the end token of the tokenizer byte is fixed" in error


def test_special_tokens_of_texts_are_recognized_on_request(capsys, tmp_path, bpe, output):
    """A notice is printed if there are none, or if they are encoded as ordinary text."""
    (tmp_path / "tokenizer.json").write_text(bpe.json)
    words = (tmp_path / "chat.txt", "-o", output, "--force", "--tokenizer", tmp_path)
    notice = f"no special token was found in the texts; the tokenizer has {bpe.end_name}\n"
    ordinary = f"the texts contain special tokens as ordinary text ({bpe.end_name}); set "
    ordinary = f"hpc3d.prepare: {ordinary}--special-tokens to recognize them\n"
    for name, option, ends, said in (
        (bpe.end_name, [], 1, ordinary),
        ("", [], 1, ""),
        (bpe.end_name, ["--special-tokens"], 2, ""),
        ("<|im_start|>", ["--special-tokens"], 1, f"hpc3d.prepare: --special-tokens: {notice}"),
    ):
        (tmp_path / "chat.txt").write_text(f"the rain{name}the rain")
        code, lines, error = call(capsys, *words, *option)
        assert code == 0 and without_progress(error) == said
        assert [*row(output, bpe.name)].count(bpe.end) == ends
        assert f"documents   {ends}" in lines


def test_run_folder_serves_as_tokenizer(capsys, tmp_path, bpe, text, output):
    """A run with the byte tokenizer has no tokenizer.json."""
    for tokenizer in (ByteTokenizer(), bpe):
        data = DataConfig(tokenizer=tokenizer.name)
        (tmp_path / "config.toml").write_text(to_toml(Config(data=data)))
        if tokenizer is bpe:
            (tmp_path / "tokenizer.json").write_text(bpe.json)
        assert call(capsys, text, "-o", output, "--force", "--tokenizer", tmp_path)[0] == 0
        assert bytes(tokenizer.decode(row(output, tokenizer.name))[:3]) == TEXT[:3].encode()


def test_single_text_of_characters_needs_no_end_token(capsys, tmp_path, text, output):
    """Several texts need one, and so do file formats with several documents."""
    nano(tmp_path, TEXT)
    first, letters = tmp_path / "first.h5", len(TEXT)
    assert call(capsys, tmp_path / "train.bin", "-o", first)[0] == 0
    words = ("-o", output, "--force", "--tokenizer", first, "--json")
    code, lines, _ = call(capsys, text, *words)
    assert code == 0 and (row(output, "bpe") == row(first, "bpe")).all()
    assert json.loads(lines[-1]).items() >= {"tokens": letters, "documents": None}.items()
    jsonl = tmp_path / "text.jsonl"
    jsonl.write_text(json.dumps({"text": TEXT}))
    copied = shutil.copy(text, tmp_path / "copied.txt")
    for texts in ([text, copied], [jsonl]):
        code, _, error = call(capsys, *texts, *words)
        assert code == 2 and r"--end $'\n' for characters" in error
        code, lines, _ = call(capsys, *texts, *words, "--end", "\n")
        assert code == 0 and len(row(output, "bpe")) == len(texts) * (letters + 1)
        assert json.loads(lines[-1])["documents"] == len(texts) * (TEXT.count("\n") + 1)


def test_missing_tokenizers_library_is_reported(capsys, monkeypatch, text, output):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    code, _, error = call(capsys, text, "-o", output, "--tokenizer", "bpe")
    assert (
        code == 2
        and "needs tokenizers: pip install tokenizers" in error
        and error.count("\n") == 1
    )


@pytest.mark.parametrize(
    ("words", "part"),
    [
        ([], "TEXT and -o FILE.h5"),
        (["text.txt"], "TEXT and -o FILE.h5"),
        (["-o", "new.h5"], "TEXT and -o FILE.h5"),
        (["text.txt", "-o", "new.txt"], "new.txt: ... .h5"),
        (["text.txt", "-o", "none/new.h5"], "none"),
        (["text.txt", "-o", "old.h5"], "--force"),
        (["none.txt", "-o", "new.h5"], "none.txt ... .jsonl or .parquet file, ... .bin file"),
        (["old.h5", "-o", "new.h5"], "old.h5 is already a token file; specify texts, or train"),
        (["bad.dat", "-o", "new.h5"], "bad.dat ... UTF-8"),
        (["a/meta.pkl", "-o", "new.h5"], "a/meta.pkl ... not text; specify a/train.bin"),
        (["text.txt", "bad.dat", "-o", "old.h5", "--force"], "bad.dat ... UTF-8"),
        (["text.txt", "-o", "new.h5", "--vocabulary", "300"], "--vocabulary 300: ... 256"),
        (["text.txt", "-o", "new.h5", "--vocabulary", "many"], "invalid int value"),
        (["text.txt", "-o", "new.h5", "--tokenizer", "word"], "word is not ... token file (.h5)"),
        (
            ["text.txt", "-o", "new.h5", "--tokenizer", "no.h5"],
            "--tokenizer: no.h5 does not exist",
        ),
        (
            ["text.txt", "-o", "new.h5", "--tokenizer", "old.h5"],
            "old.h5 is not a readable token f",
        ),
        (["text.txt", "-o", "new.h5", "--fast"], "--fast; see --help"),
        (["text.txt", "./text.txt", "-o", "new.h5"], "/text.txt is listed twice; "),
        ([".", "text.txt", "-o", "new.h5"], "/text.txt is listed twice; "),
        (["empty.txt", "-o", "new.h5"], "empty.txt: the text is empty"),
        (["text.txt", "-o", "new.h5", "--end", "x"], "--end x: "),
        (["text.txt", "-o", "new.h5", "--special-tokens"], "needs the tokenizer of a model; set "),
        (["--verify", "none.h5"], "none.h5: "),
        (["text.txt", "--verify", "old.h5"], "TEXT or -o; leave"),
    ],
)
def test_error_is_one_line_and_nothing_is_written(capsys, monkeypatch, text, words, part):
    monkeypatch.chdir(text.parent)
    Path("old.h5").write_text("precious")
    Path("bad.dat").write_bytes(b"\xff\0")
    Path("empty.txt").touch()
    before = sorted(os.listdir())
    code, lines, error = call(capsys, *words)
    assert code == 2 and lines == []
    assert (
        error.startswith("hpc3d.prepare: ")
        and error.count("\n") == 1
        and re.search(elided(part), error)
    )
    assert "data.path" not in error
    assert sorted(os.listdir()) == before and Path("old.h5").read_text() == "precious"


def test_all_wrong_options_are_reported(capsys, text):
    code, _, error = call(capsys, text, "-o", "none/new.h5", "--end", "x")
    assert code == 2 and re.match(r"hpc3d.prepare: -o .*\nhpc3d.prepare: --end x: .*\n$", error)


@pytest.mark.parametrize("vocabulary", [-1, 0, 256])
def test_bpe_requires_an_id_for_each_byte(capsys, text, output, vocabulary):
    words = (text, "-o", output, "--tokenizer", "bpe", "--vocabulary", vocabulary)
    code, _, error = call(capsys, *words)
    assert code == 2 and " 257" in error and not output.exists()


def test_force_option_replaces_the_output(capsys, text, output):
    output.write_text("old")
    assert call(capsys, text, "-o", output, "--force")[0] == 0
    assert len(row(output)) == len(TEXT.encode()) + 1


def test_help_names_every_option(capsys):
    with pytest.raises(SystemExit) as caught:
        prepare.main(["--help"])
    printed = capsys.readouterr().out
    assert caught.value.code == 0
    options = {"TEXT", "-o", "--tokenizer", "--vocabulary", "--force", "--verify", "--json"}
    assert all(option in printed for option in options)


def test_progress_is_logged(capsys, caplog, tmp_path, output):
    (tmp_path / "long.txt").write_text(60_000 * "word ")
    with caplog.at_level("INFO", logger="hpc3d"):
        assert call(capsys, tmp_path / "long.txt", "-o", output)[2] == ""
    assert "0.3 of 0.3 MB of text" in caplog.messages


@pytest.mark.parametrize("after", [1, 2, 5, 6])
def test_killed_run_leaves_the_old_file(tmp_path, output, after):
    for name in "abcdef":
        (tmp_path / f"{name}.txt").write_bytes(b"line\n" * 50_000)
    write_tokens(output, [tmp_path / "a.txt"], ByteTokenizer())
    before = output.read_bytes()
    program = f"""
import os, signal
from itertools import count
from pathlib import Path
from hpc3d.data.tokenizer import ByteTokenizer
from hpc3d.data.token_file import text_files, write_tokens
pieces = count(1)
kill = lambda size: next(pieces) == {after} and os.kill(os.getpid(), signal.SIGKILL)
write_tokens(Path({str(output)!r}), text_files({str(tmp_path)!r}), ByteTokenizer(), kill)
"""
    done = python("-c", program)
    assert done.returncode == -signal.SIGKILL
    assert output.read_bytes() == before
    write_tokens(output, [tmp_path / "a.txt"], ByteTokenizer())
    assert [*tmp_path.glob(f"*{output.name}?*")] == []


@pytest.mark.parametrize("room", [0, 1000, 100_000, 600_000])
def test_full_disk_is_reported_in_one_line(tmp_path, output, room):
    large = tmp_path / "large.txt"
    large.write_bytes(b"line\n" * 200_000)
    output.write_bytes(b"old")
    program = f"""
import resource, sys
resource.setrlimit(resource.RLIMIT_FSIZE, ({room}, {room}))
from hpc3d.prepare import main
sys.exit(main([{str(large)!r}, "-o", {str(output)!r}, "--force"]))
"""
    done = python("-B", "-c", program)
    assert done.returncode == 2
    told = without_progress(done.stderr.decode())
    assert told.startswith("hpc3d.prepare: ") and told.count("\n") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["large.txt", "tokens.h5"]
    assert output.read_bytes() == b"old"


def test_corpus_matches_its_readme():
    text = (CORPUS / "python.txt").read_bytes()
    readme = (CORPUS / "README.md").read_text(encoding="utf-8")
    assert hashlib.sha256(text).hexdigest() in readme and f"{len(text):,} bytes" in readme
    assert "PYTHON SOFTWARE FOUNDATION LICENSE VERSION 2" in (CORPUS / "LICENSE").read_text()
    assert row(CORPUS).astype(np.uint8).tobytes() == text + b"\0"


@pytest.mark.skipif(platform.python_version() != "3.11.7", reason="made from Python 3.11.7")
@pytest.mark.slow
def test_corpus_can_be_regenerated():
    made = runpy.run_path(str(CORPUS / "make.py"))["corpus"]()
    assert made.encode() == (CORPUS / "python.txt").read_bytes()


def test_progress_names_the_number_of_texts(capsys, text, output, caplog):
    caplog.set_level("INFO")
    words = ["--tokenizer", "bpe", "--vocabulary", "300"]
    assert call(capsys, text, "-o", output, *words)[0] == 0
    assert "training a tokenizer on 1 text" in caplog.messages
