"""Training on a train.bin file of nanoGPT, as described in docs/data.md."""

import json

import numpy as np
import pytest

from hpc3d import checkpoint, prepare
from hpc3d.checkpoints.run_tokenizer import kept_tokenizer
from tests.data.prepared import TEXT, nano
from tests.mpi import checked
from tests.runs import losses, newest

SMALL = "--model.layers 1 --model.hidden 32 --model.heads 2 --model.sequence 32 --train.batch 4"


def trained(tmp_path, *words):
    """Run of three steps on two ranks with the tokens of a train.bin."""
    tokens = tmp_path / "tokens.h5"
    assert prepare.main([str(tmp_path / "train.bin"), "-o", str(tokens), *words]) == 0
    out = ["--run.out", tmp_path / "results", "--train.steps", 3, "--checkpoint.every", 3]
    checked(2, "-m", "hpc3d.train", "--data.path", tokens, *SMALL.split(), *out)
    run = newest(tmp_path / "results")
    assert len(losses(run)) == 3
    tokens.unlink()
    return run


@pytest.mark.slow
def test_nanogpt_character_data_trains_and_generates_text(tmp_path):
    nano(tmp_path, TEXT)
    run = trained(tmp_path)
    words = ["--prompt", "the c", "--tokens", 9, "--json"]
    printed = checked(1, "-m", "hpc3d.generate", run, *words)
    (sample,) = json.loads(printed.splitlines()[-1])["samples"]
    assert len(sample["text"]) == 9 and {*sample["text"]} <= {*TEXT}


@pytest.mark.slow
def test_token_ids_train_and_export_with_their_tokenizer(tmp_path, bpe):
    (tmp_path / "tokenizer.json").write_text(bpe.json)
    bpe.encode(TEXT.encode()).astype(np.uint16).tofile(tmp_path / "train.bin")
    run = trained(tmp_path, "--tokenizer", str(tmp_path))
    assert checkpoint.main(["export", str(run), "-o", str(tmp_path / "out")]) == 0
    assert kept_tokenizer(tmp_path / "out").json == bpe.json
