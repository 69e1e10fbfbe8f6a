"""`python -m hpc3d.evaluate`: results on one and several ranks, and rejected input."""

import json
from contextlib import ExitStack
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest

from hpc3d import evaluate as verb
from hpc3d.checkpoints.hf_export import export
from hpc3d.checkpoints.run_tokenizer import keep
from hpc3d.checkpoints.sharded import Checkpoint
from hpc3d.console.sanitize import Problems
from hpc3d.data.token_file import open_tokens, write_tokens
from hpc3d.data.tokenizer import BpeTokenizer, train_bpe
from hpc3d.runtime import host_memory
from tests.checkpoints import drawn_models
from tests.elided import elided
from tests.mpi import checked, launching
from tests.runs import said

# Sequences of 8 tokens divide over c=2, and 12 heads over x=2 y=2.
MODEL = "kind=llama kv_heads=4 ffn=48 vocabulary=256 sequence=8 layers=2 batch=16"
# 1,323 targets: 165 windows of 8 and one of 3, in batches of 16.
TEXT = "the cat sat on the mat; größer\n" * 40 + "end"

HEADING = "file loss perplexity bits/byte accuracy tokens tokens/s"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Folder of a run on four ranks, with a text."""
    folder = tmp_path_factory.mktemp("run")
    drawn_models.saved(folder, f"p=2 d=2 schedule=1f1b microbatches=2 zero=1 {MODEL}", 3)
    (folder / "text.txt").write_text(TEXT, encoding="utf-8")
    (folder / "short.txt").write_text("cat", encoding="utf-8")
    return folder


def words(folder, *more, data=("text.txt",)):
    texts = [folder / name for name in data]
    return ["-m", "hpc3d.evaluate", folder, "--data", *texts, "--json", *more]


def result(printed):
    return json.loads(printed.splitlines()[-1])


def expected(folder, text, separator=None):
    """Return the mean loss and the accuracy of byte tokens, from the logits of each window.

    Documents, which end with the token `separator`, have windows of their own.
    """
    tokens = np.array([*text.encode(), 0])
    loss, right = 0.0, 0
    ends = np.flatnonzero(tokens[:-1] == separator) + 1
    starts = sorted({*range(0, len(tokens) - 1, 8), *ends.tolist()} - {len(tokens) - 1})
    for start, stop in pairwise([*starts, len(tokens) - 1]):
        window = tokens[start : stop + 1]
        padded = np.zeros((1, 8), np.int64)
        padded[0, : len(window) - 1] = window[:-1]
        (logits,) = drawn_models.logits(folder, padded)
        logits = logits[: len(window) - 1]
        top = logits.max(1)
        chosen = logits[np.arange(len(logits)), window[1:]]
        loss += float((top + np.log(np.exp(logits - top[:, None]).sum(1)) - chosen).sum())
        right += int((chosen == top).sum())
    return loss / (len(tokens) - 1), right / (len(tokens) - 1)


def test_every_token_is_evaluated_once_on_any_layout(run):
    """The newest layout is that of the run; the other one is given by options."""
    loss, accuracy = expected(run / "checkpoints" / "step-00000003", TEXT)
    short_loss, _ = expected(run / "checkpoints" / "step-00000003", "cat")
    count = len(TEXT.encode())
    layout = "--mesh.x", 2, "--mesh.y", 2, "--parallel.scheme", "2d"
    for more in ((), layout):
        printed = checked(4, *words(run, *more, "--data", run / "short.txt"))
        found, short = result(printed)["files"]
        assert found["loss"] == pytest.approx(loss, rel=1e-10)
        assert found["perplexity"] == pytest.approx(np.exp(loss), rel=1e-9)
        assert (found["accuracy"], found["tokens"]) == (pytest.approx(accuracy), count)
        assert found["bits_per_byte"] == pytest.approx(
            loss / np.log(2) * (count + 1) / count, rel=1e-10
        )
        assert short["tokens"] == 3
        assert short["loss"] == pytest.approx(short_loss, rel=1e-10)
        heading, row, other = printed.splitlines()[:3]
        assert " ".join(heading.split()) == HEADING
        assert f"{loss:.6f}" in row and f"{count:,}" in row and "short.txt" in other


def test_batches_limit_the_number_of_windows(run):
    done = result(checked(1, *words(run, "--batches", 2)))
    (found,) = done["files"]
    assert found["tokens"] == 2 * 16 * 8
    assert (done["mesh"], done["dtype"], done["batch"]) == ({}, "float64", 16)


def test_transformers_folder_is_evaluated_like_its_run(run, tmp_path):
    step = run / "checkpoints" / "step-00000003"
    export(Checkpoint(step), tmp_path / "theirs")
    for path in (step, tmp_path / "theirs"):
        data = ["--data", run / "short.txt", "--json"]
        printed = checked(1, "-m", "hpc3d.evaluate", path, *data)
        assert result(printed)["files"][0]["loss"] == pytest.approx(
            expected(step, "cat")[0], rel=1e-10
        )


def test_documents_of_a_sequence_are_separated_as_in_training(tmp_path):
    """The 3-byte documents of the text share windows of 8 tokens with learned positions."""
    text, separator = "ab\nba\nab\nab\nba\nab", ord("\n")
    (tmp_path / "text.txt").write_text(text)
    model = MODEL.replace("kind=llama kv_heads=4 ffn=48", "kind=gpt2")
    step = drawn_models.saved(tmp_path / "run", f"{model} boundaries=true separator={separator}")
    export(Checkpoint(step), tmp_path / "theirs")
    separated, packed = expected(step, text, separator), expected(step, text)
    assert abs(separated[0] - packed[0]) > 1e-3
    documents = ["--data.boundaries", "true", "--data.separator", separator]
    for path, ranks, more, (loss, accuracy) in [
        (step, 2, ["--mesh.c", 2], separated),
        (tmp_path / "theirs", 1, documents, separated),
        (tmp_path / "theirs", 1, [], packed),
    ]:
        data = ["--data", tmp_path / "text.txt", "--json"]
        (found,) = result(checked(ranks, "-m", "hpc3d.evaluate", path, *data, *more))["files"]
        assert found["loss"] == pytest.approx(loss, rel=1e-10)
        assert found["accuracy"] == pytest.approx(accuracy)
    data = ["--data", tmp_path / "text.txt"]
    assert prepared(1, step, *data).plan.config.data.separator == separator
    theirs = prepared(1, tmp_path / "theirs", *data, *documents[:2]).plan.config.data
    assert (theirs.boundaries, theirs.separator) == (True, 0)


@pytest.mark.parametrize("separator", [0, None])
def test_text_with_another_end_token_than_the_model_is_rejected(tmp_path, separator):
    """A model without a separator takes the one of the first text."""
    pytest.importorskip("tokenizers")
    made = train_bpe([TEXT.encode()], 275)
    (tmp_path / "text.txt").write_text(TEXT)
    for name, end in (("a", None), ("b", "t")):
        text = tmp_path / f"{name}.h5"
        write_tokens(text, [tmp_path / "text.txt"], BpeTokenizer(made.json, end))
    model = MODEL.replace("vocabulary=256", f"vocabulary={made.vocabulary}")
    step = drawn_models.saved(tmp_path / "run", f"{model} boundaries=true separator=0")
    keep(tmp_path / "run", open_tokens(tmp_path / "a.h5"))
    path, more = step, []
    if separator is None:
        export(Checkpoint(step), tmp_path / "theirs")
        path, more = tmp_path / "theirs", ["--data.boundaries", "true"]
    files = ["--data", tmp_path / "a.h5"]
    assert prepared(1, path, *files, *more).plan.config.data.separator == 0
    with pytest.raises(ValueError, match=r"^--data: \S*b.h5 has .* \(t\), .* end with token 0 "):
        prepared(1, path, *files, tmp_path / "b.h5", *more)


@pytest.mark.slow
def test_ranks_reject_invalid_input_together(run):
    for more in (["--mesh.x", 4], ["--data", "none.txt"], ["--batches", 0]):
        done = launching(*words(run, "--launch", 2, *more))
        assert (done.returncode, done.stdout, len(said(done))) == (2, "", 1)


def prepared(ranks, *given):
    """Open the model and the texts of a command line as rank 0 does."""
    job = SimpleNamespace(size=ranks, complain=lambda line: None)
    with ExitStack() as texts:
        return verb._prepare(job, [str(word) for word in given], texts)


def test_damaged_checkpoint_is_skipped(run, tmp_path):
    for step in (1, 2):
        newest = drawn_models.saved(tmp_path / "run", MODEL, step)
    file = newest / "rank-00000.bin"
    file.write_bytes(b"\1" + file.read_bytes()[1:])
    found = prepared(1, tmp_path / "run", "--data", run / "text.txt")
    assert found.plan.source.path.name == "step-00000001"


def test_text_that_does_not_fit_the_model_is_rejected(run, tmp_path):
    bpe = pytest.importorskip("tokenizers") and train_bpe([TEXT.encode()], 262)
    write_tokens(tmp_path / "bpe.h5", [run / "text.txt"], bpe)
    (tmp_path / "empty.txt").touch()
    wide = drawn_models.saved(tmp_path / "wide", MODEL.replace("256", "300"))
    masked = drawn_models.saved(tmp_path / "masked", "kind=bert vocabulary=257 sequence=8")
    for path, text, line in [
        (run, tmp_path / "none.txt", "--data: ... does not exist; "),
        (
            run,
            "a.h5,b.h5",
            "--data: a.h5,b.h5 does not exist; set several texts as --data a.h5 b.h5",
        ),
        (run, '["a.h5", "b.h5"]', "--data: ... set several texts as --data a.h5 b.h5"),
        (run, tmp_path / "empty.txt", "--data: ... is empty; "),
        (
            run,
            tmp_path / "bpe.h5",
            "--data ...bpe.h5: the tokenizer of this text needs ... of 262 tokens, but ... 256",
        ),
        (wide, run / "text.txt", "--data ...text.txt: ... tokenizer of ... is unknown"),
        (masked, run / "short.txt", "--data ...short.txt: 4 tokens, ... at least 9; "),
    ]:
        with pytest.raises(ValueError, match=f"^{elided(line)}"):
            prepared(1, path, "--data", text)
    assert prepared(1, wide, "--data", tmp_path / "bpe.h5").batches[0].count


def test_tokenizer_of_the_run_is_required(run, tmp_path):
    pytest.importorskip("tokenizers")
    ours, other = (train_bpe([text], 270) for text in (TEXT.encode(), b"another text " * 9))
    wide = drawn_models.saved(tmp_path / "wide", MODEL.replace("256", "300"))
    (tmp_path / "wide" / "config.toml").touch()
    (tmp_path / "wide" / "tokenizer.json").write_text(ours.json)
    for name, tokenizer in (("ours.h5", ours), ("other.h5", other)):
        write_tokens(tmp_path / name, [run / "text.txt"], tokenizer)
    assert prepared(1, wide, "--data", tmp_path / "ours.h5").texts[0].text_bytes == len(
        TEXT.encode()
    )
    for text in (tmp_path / "other.h5", run / "text.txt"):
        with pytest.raises(ValueError, match=elided("--data ...: the tokenizer of ... differs")):
            prepared(1, wide, "--data", text)
    with pytest.raises(ValueError, match=f"-o tokens.h5 --tokenizer {tmp_path / 'wide'}$"):
        prepared(1, wide, "--data", "a.jsonl")


@pytest.mark.parametrize(
    ("more", "line"),
    [
        (["--mesh.d", "3"], "mesh: d 3 = 3 ranks, but the job has 2"),
        (["--mesh.c", "4"], "mesh: c 4 = 4 ranks, but the job has 2"),
        (["--train.batch", "7", "--mesh.d", "2"], "train.batch"),
        (["--model.hidden", "8"], "--model.hidden: the trained model determines this key; "),
        (["--data.boundaries", "true"], "--data.boundaries: the trained model determines this "),
        (["--train.steps", "8"], "--train.steps: the trained model determines this key; "),
        (["--batches", "-1"], "argument --batches: -1: must be"),
        (["--mesh.x", "0"], "mesh.x = 0: must be at least 1"),
        (["other"], "unrecognized arguments: other; specify one model, and texts by --data; "),
    ],
)
def test_invalid_options_are_rejected_with_their_key(run, more, line):
    with pytest.raises((Problems, ValueError)) as refused:
        prepared(2, run, *more, "--data", run / "text.txt")
    assert line in str(refused.value)


def test_model_that_exceeds_the_memory_is_rejected(run, monkeypatch):
    monkeypatch.setattr(host_memory, "total", lambda: 1000)
    with pytest.raises(
        ValueError, match=elided("1 rank would use at least ... parallel.zero = 3")
    ):
        prepared(1, run, "--data", run / "text.txt")


def test_bits_per_byte_are_unknown_without_the_size_of_the_text(run):
    config = prepared(1, run, "--data", run / "text.txt").plan.config

    class Text:
        text_bytes = 30

        def __len__(self):
            return 10

    assert verb.bits_per_byte(np.log(8), Text(), config) == pytest.approx(1.0)
    Text.text_bytes = None
    assert verb.bits_per_byte(np.log(8), Text(), config) is None
