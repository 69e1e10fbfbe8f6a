"""The tokenizer of a run: stored, compared on resume, exported and imported."""

import json

import pytest

from hpc3d import checkpoint, prepare, train
from hpc3d.checkpoints.run_tokenizer import (
    end_ids,
    export,
    keep,
    kept_tokenizer,
    refuse_another,
    refuse_unfit,
    special_ids,
    take_along,
)
from hpc3d.config.input_file import Config, DataConfig, ModelConfig
from hpc3d.config.load import to_toml
from hpc3d.data.token_file import Tokens
from hpc3d.data.tokenizer import ByteTokenizer, train_bpe
from hpc3d.data.tokenizer_files import characters, tokenizer_from
from tests.elided import elided
from tests.runs import ended

TEXT = "the rain in Spain stays mainly in the plain. " * 50
MODEL = ModelConfig()


@pytest.fixture(scope="module")
def bpe():
    return train_bpe([TEXT.encode()], 280)


def tokens_of(made):
    """Return a token source without tokens."""
    tokens = Tokens()
    tokens.tokenizer, tokens.vocabulary, tokens.json = made.name, made.vocabulary, made.json
    tokens.end_name = made.end_name
    return tokens


def run_of(folder, name):
    """Return the folder of a run with the given name of its tokens."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.toml").write_text(to_toml(Config(data=DataConfig(tokenizer=name))))
    return folder


def test_tokenizer_is_found_from_the_run_and_its_checkpoints(tmp_path, bpe):
    run = run_of(tmp_path / "results" / "run", "bpe")
    folder = run / "checkpoints" / "step-00000001"
    folder.mkdir(parents=True)
    keep(tmp_path, tokens_of(bpe))  # somebody's, beside results/
    assert kept_tokenizer(run) is kept_tokenizer(folder) is None
    keep(run, tokens_of(bpe))
    keep(run, tokens_of(characters({"a": 0, "b": 1})))  # what is there stays
    for place in (run, folder):
        assert kept_tokenizer(place).json == bpe.json


def test_text_of_another_tokenizer_is_rejected(tmp_path, bpe):
    """Tests also bytes instead of BPE, and BPE instead of bytes."""
    other, byte, ours = (tokens_of(each) for each in (characters({"a": 0}), ByteTokenizer(), bpe))
    kept, bytes_of = run_of(tmp_path / "kept", "bpe"), run_of(tmp_path / "bytes", "byte")
    older, new = run_of(tmp_path / "older", "bpe"), run_of(tmp_path / "new", None)
    keep(kept, ours)
    keep(bytes_of, byte)
    assert not (bytes_of / "tokenizer.json").exists()
    padded = json.loads(bpe.json) | {"truncation": None, "padding": None}
    padded["padding"] = {"strategy": "BatchLongest", "direction": "Right", "pad_id": 0}
    padded["padding"] |= {"pad_to_multiple_of": None, "pad_type_id": 0, "pad_token": "<|end|>"}
    same = tokens_of(bpe)
    same.json = json.dumps(padded, indent=3)
    taken = [(kept, ours), (kept, same), (bytes_of, byte), (older, ours)]
    for run, tokens in [*taken, *((new, each) for each in (ours, byte))]:
        refuse_another(run, tokens, MODEL)
    for run, tokens in [(kept, other), (kept, byte), (bytes_of, ours), (older, byte)]:
        with pytest.raises(ValueError, match=elided("data.path: ... hpc3d.prepare TEXT")):
            refuse_another(run, tokens, MODEL)


def test_text_of_a_larger_vocabulary_is_rejected(tmp_path, bpe):
    """A masked model needs one more entry, because the tokenizer has no mask token."""
    run, tokens = run_of(tmp_path / "run", None), tokens_of(bpe)
    for kind, least in (("gpt2", bpe.vocabulary), ("bert", bpe.vocabulary + 1)):
        refuse_another(run, tokens, ModelConfig(kind=kind, vocabulary=least))
        small = ModelConfig(kind=kind, vocabulary=least - 1)
        said = f"needs a vocabulary of {least} tokens, but model.vocabulary = {least - 1}; "
        said = f"^data.path: the tokenizer of this text {said}"
        with pytest.raises(ValueError, match=f"{said}{run} has no tokenizer: use a token file"):
            refuse_another(run, tokens, small)
        with pytest.raises(ValueError, match=f"{said}use data that were tokenized with"):
            refuse_another(run, tokens, small, tokens.tokenizer)


@pytest.mark.parametrize(("kind", "least"), [("gpt2", 256), ("bert", 257)])
def test_text_of_bytes_for_an_unknown_tokenizer_needs_a_vocabulary_of_bytes(kind, least, tmp_path):
    run, tokens = run_of(tmp_path / "run", None), tokens_of(ByteTokenizer())
    refuse_another(run, tokens, ModelConfig(kind=kind, vocabulary=least))
    refuse_another(run, tokens, ModelConfig(kind=kind, vocabulary=least + 44), "byte")
    said = f"^data.path: the text is tokenized into bytes, .* {run} is unknown and has"
    for other in (200, least + 44):
        with pytest.raises(ValueError, match=f"{said} {other} tokens; .*--tokenizer FILE$"):
            refuse_another(run, tokens, ModelConfig(kind=kind, vocabulary=other))


def test_text_of_another_tokenizer_than_vocab_json_is_rejected(tmp_path, bpe):
    told = json.loads(bpe.json)["model"]
    (tmp_path / "vocab.json").write_text(json.dumps(told["vocab"]))
    merges = [each if isinstance(each, str) else " ".join(each) for each in told["merges"]]
    (tmp_path / "merges.txt").write_text("\n".join(merges))
    refuse_another(tmp_path, tokens_of(tokenizer_from(str(tmp_path))), MODEL)
    with pytest.raises(ValueError, match=f"--tokenizer {tmp_path}$"):
        refuse_another(tmp_path, tokens_of(characters({"a": 0})), MODEL)


@pytest.mark.parametrize("ends", [True, False])
def test_exported_tokenizer_names_the_end_of_text_token(ends, tmp_path, bpe):
    tokenizer = bpe if ends else characters({"a": 0, "b": 1})
    run, out = run_of(tmp_path / "run", "bpe"), tmp_path / "out"
    out.mkdir()
    assert not export(run, out) and special_ids(run) == {}
    keep(run, tokens_of(tokenizer))
    assert export(run, out)
    settings = json.loads((out / "tokenizer_config.json").read_text())
    assert settings.get("eos_token") == ("<|end|>" if ends else None)
    assert special_ids(run)["eos_token_id"] == (0 if ends else None)
    assert kept_tokenizer(out).encode(b"ab").tolist() == tokenizer.encode(b"ab").tolist()


def test_byte_tokenizer_is_exported_as_json(tmp_path):
    run, out = run_of(tmp_path / "run", "byte"), tmp_path / "out"
    out.mkdir()
    assert export(run, out) and special_ids(run) == {"bos_token_id": 0, "eos_token_id": 0}
    assert kept_tokenizer(out).encode("ä".encode()).tolist() == [0xC3, 0xA4]
    again = run_of(tmp_path / "again", None)
    assert take_along(out, again)
    refuse_another(again, tokens_of(ByteTokenizer()), MODEL)


def test_nothing_is_exported_by_the_defaults_of_a_lost_configuration(tmp_path):
    """An empty file or a folder does not prove that the run has no tokenizer."""
    run = run_of(tmp_path / "run", "byte")
    (run / "config.toml").write_text("")
    step = run / "checkpoints" / "step-00000001"
    with pytest.raises(ValueError, match="empty or truncated"):
        special_ids(step)
    (run / "config.toml").unlink()
    (run / "config.toml").mkdir()
    with pytest.raises(ValueError, match="is a folder"):
        special_ids(step)


def test_imported_tokenizer_settings_are_preserved(tmp_path, bpe):
    theirs, run, out = (tmp_path / name for name in ("theirs", "run", "out"))
    for folder in (theirs, run, out):
        folder.mkdir()
    (theirs / "model.safetensors").touch()
    assert not take_along(theirs, run)
    (theirs / "tokenizer.json").write_text(bpe.json)
    told = {"tokenizer_class": "LlamaTokenizer", "eos_token": "in", "bos_token": {"content": "t"}}
    (theirs / "tokenizer_config.json").write_text(json.dumps(told))
    assert take_along(theirs / "model.safetensors", run) and export(run, out)
    assert json.loads((out / "tokenizer_config.json").read_text()) == told
    letter, word = (bpe.id_of(token) for token in ("t", "in"))
    assert special_ids(run) == {"bos_token_id": letter, "eos_token_id": word}
    assert kept_tokenizer(run).end == word != bpe.end


def test_special_ids_and_generation_settings_round_trip(tmp_path, bpe):
    """Tests a list of end ids too, with and without a tokenizer."""
    theirs, run, out = (tmp_path / name for name in ("theirs", "run", "out"))
    for folder in (theirs, run, out):
        folder.mkdir()
    special = {"bos_token_id": 3, "eos_token_id": [1, 2], "pad_token_id": None}
    (theirs / "config.json").write_text(json.dumps(special | {"model_type": "llama"}))
    (theirs / "generation_config.json").write_text('{"eos_token_id":   [2, 9], "top_k": 4}')
    assert not take_along(theirs, run)
    assert export(run, out) == ["generation_config.json"]
    assert special_ids(run) == special
    for name in ("run", "theirs"):
        assert end_ids(tmp_path / name) == {1, 2, 9}
    (theirs / "tokenizer.json").write_text(bpe.json)
    assert take_along(theirs, run)
    assert export(run, out) == ["generation_config.json", "tokenizer.json"]
    assert special_ids(run) == {"bos_token_id": 3, "eos_token_id": [1, 2]}
    (theirs / "config.json").write_text('{"bos_token_id": 50256, "eos_token_id": [1, 50256]}')
    assert take_along(theirs, run)
    assert special_ids(run) == {"bos_token_id": None, "eos_token_id": None}
    assert (out / "generation_config.json").read_bytes() == (
        theirs / "generation_config.json"
    ).read_bytes()


def test_import_rejects_a_tokenizer_that_does_not_match_the_model(tmp_path, bpe):
    rules = tmp_path / "tokenizer.json"
    refuse_unfit(tmp_path, 10)
    rules.write_text(bpe.json)
    refuse_unfit(tmp_path, bpe.vocabulary)
    with pytest.raises(
        ValueError, match=f"^{rules}: it has 280 tokens, but model.vocabulary = 279; replace"
    ):
        refuse_unfit(tmp_path, bpe.vocabulary - 1)
    (tmp_path / "generation_config.json").write_bytes(b"\xff")
    with pytest.raises(ValueError, match=r"generation_config.json is not valid JSON: "):
        refuse_unfit(tmp_path, bpe.vocabulary)
    (tmp_path / "generation_config.json").unlink()
    rules.write_text("{}")
    with pytest.raises(ValueError, match=f"^{rules}: not the JSON text"):
        refuse_unfit(tmp_path, 1000)


def prepared_words(tmp_path):
    """Return a BPE token file, and the arguments that train a small model on it."""
    (tmp_path / "a.txt").write_text(TEXT)
    assert prepare.main(["a.txt", "-o", "a.h5", "--tokenizer", "bpe", "--vocabulary", "280"]) == 0
    words = "--data.path a.h5 --model.layers 1 --model.hidden 32 --model.heads 2 --train.batch 4"
    return f"{words} --train.steps 2 --checkpoint.every 2 --model.sequence 16".split()


@pytest.mark.slow
def test_run_stores_its_tokenizer_and_export_includes_it(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert train.main(prepared_words(tmp_path)) == 0
    (run,) = (tmp_path / "results").iterdir()
    (tmp_path / "a.h5").unlink()
    assert checkpoint.main(["export", str(run), "-o", "alone.safetensors"]) == 0
    assert not (tmp_path / "tokenizer.json").exists()
    assert checkpoint.main(["export", str(run), "-o", "out"]) == 0
    text = TEXT.encode()
    kept, exported = kept_tokenizer(run), kept_tokenizer(tmp_path / "out")
    assert kept.encode(text).tolist() == exported.encode(text).tolist()
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["eos_token_id"] == kept.end == 0
    assert checkpoint.main(["import", "out", "-o", "again"]) == 0
    assert kept_tokenizer(tmp_path / "again").json == kept.json
    go_on = ["--resume", "again", "--train.steps", "3", "--data.path", "a.txt"]
    capsys.readouterr()
    for words in (go_on, [*go_on, "--dry-run"]):
        assert ended(train.main, *words) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        assert f"data.path = {tmp_path / 'a.txt'}: the tokenizer of this text (" in error
    assert ended(train.main, *go_on[:4]) == 2
    default = "(the default text, shipped with hpc3d): the tokenizer of this text ("
    assert default in capsys.readouterr().err
    for name in ("config.json", "model.safetensors"):
        (tmp_path / "out" / name).unlink()
    assert ended(checkpoint.main, "export", str(run), "-o", "out") == 2
