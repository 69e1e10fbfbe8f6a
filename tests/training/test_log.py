"""The log of a run: hosts, settings that differ from the defaults, and steps."""

import sys
from contextlib import closing
from dataclasses import replace

import pytest

from hpc3d.config.load import load
from hpc3d.config.resolve import resolve
from hpc3d.console.sanitize import sanitized_streams
from hpc3d.runtime.metrics_file import read
from hpc3d.training.evaluator import Evaluation
from hpc3d.training.log import Log, differences, duration, hosts, layout_lines
from hpc3d.training.trainer import Step


def test_hosts_are_listed_with_their_rank_counts():
    assert [*hosts(["a"] * 4)] == []
    assert [*hosts(["a", "a", "b", "a"])] == ["4 ranks on 2 hosts: a 3, b 1"]
    many = [f"n{rank // 4}" for rank in range(64)]
    (line,) = hosts(many)
    assert line.startswith("64 ranks on 16 hosts: n0 4, n1 4, ") and line.endswith("n7 4, 8 more")


@pytest.mark.parametrize(
    ("context", "text"),
    [
        ("ring", "ring of 4 ranks with 2 chunks of 8 tokens each"),
        ("all-to-all", "all-to-all of 4 ranks with 16 tokens each"),
        (
            "both --parallel.ulysses 2",
            "ring of 2 ranks with 2 chunks of 16 tokens each; "
            "all-to-all of 2 ranks with 16 tokens each",
        ),
    ],
)
def test_context_parallelism_is_described(context, text):
    words = f"--mesh.c 4 --model.sequence 64 --parallel.context {context}"
    config = resolve(load(None, words.split()), 4)
    assert [*layout_lines(config)][-1] == f"context: {text}"


@pytest.mark.parametrize(
    ("words", "key", "limit"),
    [
        ("", "", ""),
        ("--model.window 63", "", ""),
        ("--model.window 64", "model.window = 64", "the sequences have 64 tokens"),
        ("--model.window 8 --model.global_every 2", "", ""),
        (
            "--model.window 8 --model.global_every 3",
            "model.global_every = 3",
            "the model has 2 blocks",
        ),
    ],
)
def test_window_without_effect_is_reported(words, key, limit):
    config = resolve(load(None, words.split()), 1)
    found = [line for line in layout_lines(config) if line.startswith("window")]
    assert found == ([f"window: {key} has no effect, because {limit}"] if key else [])


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("--parallel.scheme 3d", "scheme 3d: X[m_xy, k_z]  W[k_zx, n_y]  Y[m_xz, n_y]"),
        ("--parallel.scheme 1d", "scheme 1d: X[m, k]  W[k, n_x]  Y[m, n_x]"),
        (
            '--parallel.split {m="x",n="y",own="y"}',
            "parallel.split: X[m_x, k] owned along y  W[k_x, n_y]  Y[m_x, n_y]",
        ),
    ],
)
def test_stored_blocks_are_described_in_index_notation(words, line):
    config = resolve(load(None, ["--mesh.x", "2", *words.split()]), 2)
    assert next(layout_lines(config)) == line


def test_non_default_keys_are_listed():
    config = resolve(load(None, ["--train.steps", "5", "--mesh.x", "2"]), 2)
    byte = replace(config.data, tokenizer="byte")
    settled = replace(config.model, vocabulary=256)
    train = replace(config.train, decay_steps=5)
    config = replace(config, data=byte, model=settled, train=train)
    assert differences(config) == ["mesh.x = 2", "train.steps = 5"]
    other = replace(config, data=replace(byte, tokenizer="bpe"))  # logged by tokenized_by
    assert not any("data.tokenizer" in line for line in differences(other))
    longer = replace(config, train=replace(train, decay_steps=9))
    assert differences(longer)[-1] == "train.decay_steps = 9"


@pytest.fixture
def log(tmp_path):
    with closing(Log(tmp_path / "train.log", speaks=True)) as log:
        yield log


def test_step_line_has_the_remaining_time_and_a_metrics_record(log, tmp_path, capsys):
    log.record(0, load(None, []))
    for number, seconds in enumerate([9.0, 2.0, 4.0, 3.0]):
        log.step(Step(number, 5.0, 0.1, 1.5, 64, seconds, 0.25, 10**7, 0), 4)
    heading, *lines = capsys.readouterr().out.splitlines()
    assert heading.endswith(" done")
    assert [line.partition("/")[2] for line in lines] == [
        "4, 27 s left",
        "4, 4.00 s left",
        "4, 3.00 s left",
        "4",
    ]
    assert (tmp_path / "train.log").read_text().splitlines() == [heading, *lines]
    record = read(tmp_path)[2]
    del record["time"]
    assert record == {
        **{"step": 2, "steps": 4, "loss": 5.0, "learning_rate": 0.1, "gradient_norm": 1.5},
        **{"tokens": 64, "seconds": 4.0, "tokens_per_s": 16.0},
        **{"communication": 0.25, "peak_bytes": 10**7},
    }


def test_loss_of_each_validation_text_is_logged(log, tmp_path, capsys):
    log.record(0, load(None, ["--data.validation", '["/web/held.h5", "/code/held.h5"]']))
    texts = [Evaluation(7, loss, 64, 0.25, 0.5) for loss in (3.0, 2.0)]
    log.evaluation(Evaluation(7, 2.5, 128, 0.25, 1.0, tuple(texts)), best=True)
    _, *lines = capsys.readouterr().out.splitlines()
    scores = "perplexity 12.18, accuracy 25.00 %; 128 tokens in 1.00 s, the best so far"
    assert lines[2] == f"evaluation after step 7: mean loss 2.5000, {scores}"
    assert [line.partition(",")[0] for line in lines[:2]] == [
        "evaluation of web/held.h5: loss 3.0000",
        "evaluation of code/held.h5: loss 2.0000",
    ]
    (record,) = read(tmp_path)
    assert {key: record[key] for key in record if "loss" in key} == {
        "validation_loss": 2.5,
        "validation_loss/web/held.h5": 3.0,
        "validation_loss/code/held.h5": 2.0,
    }


def test_log_file_is_written_if_stdout_is_full(log, tmp_path, monkeypatch):
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        with sanitized_streams():
            log.say("done")
    assert (tmp_path / "train.log").read_text() == "done\n"


def test_adaptive_loss_scale_is_in_the_record(log, tmp_path):
    log.record(0, load(None, []))
    log.step(Step(0, 5.0, 0.1, float("inf"), 64, 1.0, 0.25, 10**7, 0, 2.0**15), 4)
    (record,) = read(tmp_path)
    assert (record["loss_scale"], record["gradient_norm"]) == (2**15, None)


def test_colors_appear_on_the_terminal_but_not_in_the_log(log, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("hpc3d.runtime.colors.in_colour", lambda stream: True)
    log.say("done", "green")
    assert capsys.readouterr().out == "\x1b[32mdone\x1b[0m\n"
    assert (tmp_path / "train.log").read_text() == "done\n"


def test_remaining_time_uses_the_last_steps(log, capsys):
    log.record(0, load(None, []))
    for number in range(60):
        seconds = 9.0 if number < 30 else 2.0
        log.step(Step(number, 5.0, 0.1, 1.5, 64, seconds, 0.25, 10**7, 0), 61)
    assert capsys.readouterr().out.endswith("   2.000  60/61, 2.00 s left\n")


def test_other_ranks_print_nothing(tmp_path, capsys):
    log = Log(tmp_path / "train.log", speaks=False)
    log.record(0, load(None, []))
    log.step(Step(0, 5.0, 0.1, 1.5, 64, 1.0, 0.25, 10**7, 0), 4)
    assert not capsys.readouterr().out and not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.00869, "8.69 ms"),
        (1.5, "1.50 s"),
        (41.2, "41 s"),
        (59.6, "1 min 0 s"),
        (200, "3 min 20 s"),
        (18720, "5 h 12 min"),
        (273600, "3 d 4 h"),
    ],
)
def test_durations_are_readable(seconds, text):
    assert duration(seconds) == text
