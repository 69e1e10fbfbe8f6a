"""The tokenizer of a run: kept, refused where it is another one, exported."""

import json

import pytest

from hpc3d import checkpoint, prepare, train
from hpc3d.checkpoints.run_tokenizer import export, keep, kept_tokenizer, refuse_another
from hpc3d.data.tokenizer import characters, train_bpe

TEXT = "the rain in Spain stays mainly in the plain. " * 50


@pytest.fixture(scope="module")
def bpe():
    return train_bpe([TEXT.encode()], 280)


def test_it_is_found_from_a_run_and_from_its_checkpoints(tmp_path, bpe):
    folder = tmp_path / "checkpoints" / "step-00000001"
    folder.mkdir(parents=True)
    assert kept_tokenizer(tmp_path) is None
    keep(tmp_path, bpe.json)
    for place in (tmp_path, folder):
        assert kept_tokenizer(place).json == bpe.json


def test_a_text_of_another_tokenizer_is_refused(tmp_path, bpe):
    keep(tmp_path, bpe.json)
    refuse_another(tmp_path, json.dumps(json.loads(bpe.json), indent=3))
    with pytest.raises(ValueError, match=r"^data\.path: its tokens are of another tokenizer"):
        refuse_another(tmp_path, characters({"a": 0, "b": 1}).json)


@pytest.mark.parametrize("ends", [True, False])
def test_what_is_exported_names_the_end_of_a_text(ends, tmp_path, bpe):
    tokenizer = bpe if ends else characters({"a": 0, "b": 1})
    export(tokenizer, tmp_path)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert settings.get("eos_token") == ("<|end|>" if ends else None)
    assert kept_tokenizer(tmp_path).encode(b"ab").tolist() == tokenizer.encode(b"ab").tolist()


@pytest.mark.slow
def test_a_run_keeps_it_and_an_export_carries_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text(TEXT)
    assert prepare.main(["a.txt", "-o", "a.h5", "--tokenizer", "bpe", "--vocabulary", "280"]) == 0
    words = "--data.path a.h5 --model.layers 1 --model.hidden 32 --model.heads 2 --train.batch 4"
    words = [
        *words.split(),
        *["--train.steps", "2", "--checkpoint.every", "2", "--model.sequence", "16"],
    ]
    assert train.main(words) == 0
    (run,) = (tmp_path / "results").iterdir()
    (tmp_path / "a.h5").unlink()
    assert checkpoint.main(["export", str(run), "-o", "out"]) == 0
    text = TEXT.encode()
    kept, exported = kept_tokenizer(run), kept_tokenizer(tmp_path / "out")
    assert kept.encode(text).tolist() == exported.encode(text).tolist()
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["eos_token_id"] == kept.end == 0
    assert checkpoint.main(["import", "out", "-o", "again"]) == 0
    assert kept_tokenizer(tmp_path / "again").json == kept.json
