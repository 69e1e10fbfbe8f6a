"""Trained models: their folders and weights, and models that cannot generate text."""

import json
from dataclasses import replace

import numpy as np
import pytest
from safetensors.numpy import save_file

from hpc3d import prepare
from hpc3d.checkpoints.hf_export import export
from hpc3d.checkpoints.sharded import Checkpoint, restore
from hpc3d.comm.threads import run as on_threads
from hpc3d.data.tokenizer import BpeTokenizer, ByteTokenizer, train_bpe
from hpc3d.generation.tensor_layout import laid_out
from hpc3d.generation.trained_model import find_model, layout_words
from hpc3d.model.decoder import Decoder
from hpc3d.training.trainer import spec_of
from tests.checkpoints import drawn_models
from tests.elided import elided
from tests.strided import strided

BYTES = "schedule=none microbatches=2 vocabulary=256 layers=2 batch=12 sequence=5"
TRAINED = "p=2 d=2 x=2 schedule=1f1b microbatches=2 zero=3 vocabulary=256 batch=16"
MIXTRAL = (
    "e=2 d=2 zero=1 microbatches=2 vocabulary=256 batch=16 kind=llama ffn=48 experts=4 top_k=2"
)
LLAMA = f"{BYTES} kind=llama kv_heads=4 ffn=48 tied=false"


def saved(folder, line, told=None):
    """Run, and its model as files of transformers."""
    checkpoint = drawn_models.saved(folder / "run", line)
    export(Checkpoint(checkpoint), folder / "theirs")
    path = folder / "theirs" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | (told or {})))
    return folder / "run", folder / "theirs"


def values(model, words, sizes):
    """Return the parameter blocks of a model on each rank of a layout."""
    ranks = int(np.prod([*sizes.values()]))
    config = laid_out(model.config, layout_words(words), ranks, 1)

    def rank(mesh):
        opened = model.source.open(config)
        decoder = Decoder(mesh, spec_of(config, config.model.vocabulary), "float64", 5)
        restore(opened, decoder.parameters, None)
        return {
            item.name: (item, item.layout.slices(item.shape, mesh), item.value.copy())
            for item in decoder.parameters
        }

    return on_threads(config.sizes(), rank)


@pytest.mark.parametrize("line", strided([BYTES, LLAMA, TRAINED, MIXTRAL], 2))
def test_ranks_load_their_blocks_from_runs_and_exports(tmp_path, line):
    stored = drawn_models.saved(tmp_path / "run", line)
    export(Checkpoint(stored), tmp_path / "theirs")
    whole = drawn_models.model_of(stored).parameters
    expected = {item.name: item.value for item in whole}
    words = ["--mesh.x", "2", "--mesh.y", "2", "--mesh.z", "2", "--parallel.scheme", "3d"]
    for path in (tmp_path / "run", tmp_path / "theirs", stored):
        for blocks in values(find_model(path, words), words, {"x": 2, "y": 2, "z": 2}):
            assert blocks.keys() == expected.keys()
            for name, (_, where, block) in blocks.items():
                part = expected[name][where]
                np.testing.assert_array_equal(block[: len(part)], part)


def test_newest_intact_checkpoint_is_used_and_damaged_ones_are_reported(tmp_path):
    for step in (1, 2):
        newest = drawn_models.saved(tmp_path / "run", BYTES, step)
    file = newest / "rank-00000.bin"
    file.write_bytes(b"\1" + file.read_bytes()[1:])
    found = find_model(tmp_path / "run", [])
    assert found.source.path.name == "step-00000001"
    assert found.notes and "step-00000002" in found.notes[0]


def test_vocabulary_of_256_implies_byte_tokens(tmp_path):
    for path in saved(tmp_path, BYTES):
        found = find_model(path, [])
        assert isinstance(found.tokenizer, ByteTokenizer) and found.choices == 256
        assert [*found.prompt("é".encode())] == [0xC3, 0xA9]


def test_begin_and_end_tokens_of_a_model(tmp_path):
    run, theirs = saved(tmp_path, BYTES, {"eos_token_id": [3, 4], "bos_token_id": 7})
    ours, other = find_model(run, []), find_model(theirs, [])
    assert (ours.ends, [*ours.prompt(b"")]) == ({0}, [0])
    assert (other.ends, [*other.prompt(b"")]) == ({3, 4}, [7])
    with pytest.raises(ValueError, match="--prompt"):
        other._replace(begin=None).prompt(b"")


def test_prompt_is_limited_to_its_last_document(tmp_path):
    run, theirs = saved(tmp_path, f"{BYTES} boundaries=true separator=10")
    ours, other = find_model(run, []), find_model(theirs, [])
    assert (ours.ends, ours.separator, other.separator) == ({0, 10}, 10, -1)
    for text, read in ((b"a\nb\ncd", b"cd"), (b"a\ncd\n", b"cd\n"), (b"cd", b"cd")):
        for model, document in ((ours, read), (other, text)):
            ids = model.prompt(text)
            assert bytes(ids.tolist()) == text
            assert bytes(model.last_document(ids).tolist()) == document


def test_tokenizer_json_in_the_model_folder_is_used(tmp_path):
    pytest.importorskip("tokenizers")
    _, theirs = saved(tmp_path, BYTES.replace("vocabulary=256", "vocabulary=280"))
    with pytest.raises(
        ValueError, match=elided("no tokenizer.json ... 280 tokens; ...save_pretrained")
    ):
        find_model(theirs, [])
    tokenizer = train_bpe([b"the theme of the thesis"], 270)
    (theirs / "tokenizer.json").write_text(tokenizer.json)
    found = find_model(theirs, [])
    assert isinstance(found.tokenizer, BpeTokenizer)
    assert found.choices == tokenizer.vocabulary < 280
    assert [*found.prompt(b"the theme")] == [*tokenizer.encode(b"the theme")]
    assert [*found.prompt(b"<|end|>the theme")] == [0, *tokenizer.encode(b"the theme")]
    with pytest.raises(ValueError, match="--prompt"):
        found.prompt(b"\xff")
    (theirs / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=elided("not the JSON text of a BPE tokenizer")):
        find_model(theirs, [])


def test_cache_folder_error_names_the_snapshot(tmp_path):
    (tmp_path / "snapshots" / "0123").mkdir(parents=True)
    with pytest.raises(ValueError, match=f"use its snapshot {tmp_path}/snapshots/0123$"):
        find_model(tmp_path, [])


def test_tokenizer_is_read_from_the_token_file(tmp_path):
    pytest.importorskip("tokenizers")
    text, tokens = tmp_path / "text.txt", tmp_path / "tokens.h5"
    text.write_text("the theme of the thesis\n" * 9)
    made = ["--tokenizer", "bpe", "--vocabulary", "262", "-o", str(tokens)]
    assert prepare.main([str(text), *made]) == 0
    run, _ = saved(tmp_path, BYTES.replace("vocabulary=256", "vocabulary=262"))
    with pytest.raises(ValueError, match=elided("262 tokens but no tokenizer; set --data.path")):
        find_model(run, [])
    found = find_model(run, ["--data.path", str(tokens)])
    assert found.tokenizer.decode(found.prompt(b"the theme")) == b"the theme"
    with pytest.raises(ValueError, match=r"data\.path"):
        find_model(run, ["--data.path", str(tmp_path / "none.h5")])


def test_prompt_token_beyond_the_vocabulary_is_rejected(tmp_path):
    run, _ = saved(tmp_path, BYTES)
    found = find_model(run, [])
    small = replace(found.config, model=replace(found.config.model, vocabulary=100))
    with pytest.raises(
        ValueError, match=elided("--prompt contains token 255, ... 100 tokens; ...")
    ):
        found._replace(config=small).prompt(b"a\xff")


def test_bert_is_rejected_for_generation(tmp_path):
    for path in saved(tmp_path, f"{BYTES} kind=bert"):
        with pytest.raises(
            ValueError, match=elided("bert models do not support ... gpt2, ... llama, ")
        ):
            find_model(path, [])


def test_unrelated_keys_are_rejected(tmp_path):
    run, theirs = saved(tmp_path, BYTES)
    for path, word in [(run, "--model.sequence"), (theirs, "--data.path"), (run, "--train.steps")]:
        with pytest.raises(ValueError, match=f"{word}: "):
            find_model(path, [word, "3"])
    with pytest.raises(ValueError, match=r"--model\.hidden: .*\n--train\.steps: "):
        find_model(run, ["--model.hidden", "3", "--train.steps", "3"])
    assert find_model(theirs, ["--model.sequence", "3"]).config.model.sequence == 3


def test_weights_without_config_json_require_the_head_count(tmp_path):
    _, theirs = saved(tmp_path, BYTES)
    (theirs / "config.json").unlink()
    with pytest.raises(ValueError, match=r"set --model\.heads"):
        find_model(theirs, [])
    found = find_model(theirs / "model.safetensors", ["--model.heads", "12"])
    assert found.config.model.heads == 12


def test_folder_without_a_model_is_rejected(tmp_path):
    for path, what in ((tmp_path, "has no checkpoint"), (tmp_path / "none", "does not exist")):
        with pytest.raises(ValueError, match=f"{path} {what}; specify a run"):
            find_model(path, [])
    (tmp_path / "ckpt.pt").touch()
    with pytest.raises(ValueError, match=r"hugging-face\.md shows how to convert ckpt\.pt of"):
        find_model(tmp_path / "ckpt.pt", [])
    save_file({"a": np.zeros(3)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=str(tmp_path)):
        find_model(tmp_path, [])
