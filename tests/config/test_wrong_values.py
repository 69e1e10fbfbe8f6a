"""All wrong values of an input are reported, and rules that depend on them are skipped."""

import math
from copy import deepcopy
from dataclasses import asdict, replace

import pytest

from hpc3d.config.input_file import Config
from hpc3d.config.wrong_values import WRONG, WrongValueUsed, mark_wrong, reported
from tests.config.refused import problems

USES = {
    "comparison": lambda: WRONG > 1,
    "equality": lambda: WRONG == "ring",
    "membership": lambda: WRONG in ("ring", "both"),
    "truth": lambda: not WRONG,
    "remainder": lambda: 8 % WRONG,
    "product": lambda: math.prod([2, WRONG]),
    "root": lambda: math.isqrt(WRONG),
    "table": lambda: {"ring": 1}[WRONG],
    "text": lambda: f"{WRONG}",
    "elements": lambda: [*WRONG],
    "keywords": lambda: dict(**WRONG),
    "method": lambda: WRONG.split,
}


@pytest.mark.parametrize("use", USES)
def test_every_use_of_a_wrong_value_raises(use):
    with pytest.raises(WrongValueUsed):
        USES[use]()


def test_keys_and_sections_are_marked_and_other_names_ignored():
    names = ["model.hidden = 33 must be divisible by model.heads", "seed", "mesh: 3 ranks"]
    config = mark_wrong(Config(), [*names, "train.decaying: unknown key", "modell", "--ranks", ""])
    assert config.model.hidden is config.seed is config.mesh.p is config.mesh.order is WRONG
    assert (config.model.heads, config.train) == (64, Config().train)
    assert asdict(config)["seed"] is deepcopy(WRONG) is WRONG
    assert replace(config, seed=1234).seed == 1234


def test_rule_ends_at_the_first_wrong_value_and_others_continue():
    def rule(*values):
        for value in values:
            if value > 1:
                yield f"{value}: at most 1"

    assert [*reported(rule(2, WRONG, 3), rule(4))] == ["2: at most 1", "4: at most 1"]


TABLES = """\
stepz = 1
[trian]
steps = 0
[train]
batch = 0
[model]
hidden = 33
heads = 2
"""


@pytest.mark.parametrize(
    ("text", "words", "keys"),
    [
        ("", "--parallel.zero 7 --model.hidden 33", "parallel.zero model.hidden"),
        ("", "--model.dropout 2 --train.tf32 true", "model.dropout train.tf32"),
        ("", "--train.steps 0 --parallel.recompute [9]", "train.steps parallel.recompute"),
        ("", "--train.clip x --mesh.x 4 --mesh.y 4", "train.clip mesh"),
        ("", "--model.padding 3 --mesh.d 16", "model.padding mesh"),
        ("", "--data.tokenizer 3 --mesh.d 16", "data.tokenizer mesh"),
        ("", "--model.hidden 33 --parallel.schedule 1fb1", "parallel.schedule model.hidden"),
        (
            "",
            "--parallel.split 3 --parallel.offload [] --model.layers 0",
            "parallel.split model.layers",
        ),
        (TABLES, "", "trian stepz train.batch model.hidden"),
        (
            TABLES,
            "--run.qqq 1 --parallel.zero 7",
            "parallel.zero run.qqq trian stepz train.batch model.hidden",
        ),
        ("train = 3\n[model]\nhidden = 33\nheads = 2\n", "", "train model.hidden"),
    ],
)
def test_wrong_values_of_different_kinds_are_reported_together(text, words, keys, tmp_path):
    said = problems(*words.split(), text=text, folder=tmp_path)
    assert sorted(line.split(" ")[0].rstrip(":") for line in said) == sorted(keys.split())


@pytest.mark.parametrize(
    "words",
    [
        "--model.kind t5 --model.kv_heads 4",  # kind would be gpt2, which has no kv_heads
        "--model.heads x --model.hidden 33",  # heads would be 64
        "--model.hiden 128 --model.heads 128",  # hidden would be 384
        "--modell.hidden 128 --model.heads 5",
        "--mesh.p 0 --parallel.chunks 4",  # p would be 1
        "--parallel.schedule gpip --parallel.chunks 2",  # gpipe has 1 chunk
        "--parallel.scheme 4d --mesh.y 8",  # the scheme would not use y
        "--train.optimizer adam --train.beta1 0.5",
    ],
)
def test_no_problem_of_a_default_is_reported_for_a_wrong_value(words):
    wrong, *others = problems(*words.split())
    assert wrong.startswith(words.split()[0].removeprefix("--").partition(".")[0])
    assert not others
