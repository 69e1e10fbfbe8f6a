"""Evaluation settings that are rejected with one line, which names the key and a remedy."""

import re

import pytest

from hpc3d.config.load import load
from hpc3d.config.resolve import resolve
from tests.config.refused import problems
from tests.elided import elided

HELD = "--data.validation", "0.05"
EVERY = "--train.eval_every", "5"
MODULE = "--torch.factory", "m:f"
BEST = "--checkpoint.keep_best", "true"
PIPEDREAM = (
    *("--mesh.p", "2", "--parallel.schedule", "pipedream-2bw", "--parallel.microbatches", "2"),
    *("--train.batch", "16"),
)


@pytest.mark.parametrize(("words", "line"), [
    (("--data.validation", "1.5"), "data.validation = 1.5: ... above 0 and below 1"),
    (("--data.validation", "1"), "data.validation = 1.0: ... above 0 and below 1"),
    (("--data.validation", "0.0", *EVERY), "data.validation = 0.0: ... above 0"),
    (("--data.validation", "-0.1"), "data.validation = -0.1: ... above 0"),
    (("--data.validation", "nan"), "data.validation = nan: ... above 0"),
    (EVERY, "train.eval_every = 5 ... data.validation; ... such as 0.05"),
    ((*EVERY, "--data.validation", ""), "train.eval_every = 5 ... data.validation"),
    ((*EVERY, "--data.validation", "[]"), "train.eval_every = 5 ... data.validation"),
    (("--data.validation", '["a.txt", ""]'), "data.validation must contain no empty path; ..."),
    (("--train.eval_every", "-1"), "train.eval_every = -1: must be at least 0"),
    (("--train.eval_batches", "-1"), "train.eval_batches = -1: must be at least 0"),
    ((*BEST, *HELD), "checkpoint.keep_best = true: ... train.eval_every > 0; ..."),
    ((*BEST, *HELD, *EVERY, *PIPEDREAM), "checkpoint.keep_best = true: ... use false, or ..."),
    ((*MODULE, *EVERY), "train.eval_every = 5 requires torch.validation; ... MODULE:FUNCTION"),
    ((*MODULE, *EVERY, "--train.eval_batches", "0"), "train.eval_batches = 0: ... the number"),
])  # fmt: skip
def test_invalid_evaluation_settings_are_rejected(words, line):
    found = problems(*words, ranks=2)
    assert any(re.match(elided(line), each) for each in found), found


def test_wrong_type_error_names_the_key():
    for value, line in (
        ("true", "data.validation: input should be a valid number or a valid string or a list, "),
        ("[1]", "data.validation[0]: input should be a valid string, not 1; "),
    ):
        (found,) = problems("--data.validation", value)
        assert found.startswith(line)


@pytest.mark.parametrize("words", [(*HELD, *EVERY, *BEST), HELD, ("--data.validation", "")])
def test_valid_evaluation_settings_are_accepted(words):
    config = resolve(load(None, words), 8)
    assert config.data.validation in (0.05, "")


def test_evaluation_is_accepted_with_asynchronous_schedules():
    assert resolve(load(None, (*HELD, *EVERY, *PIPEDREAM)), 2).train.eval_every == 5
