"""`python -m hpc3d.partition compare`: its table and its exit codes."""

import json

import pytest

pytest.importorskip("torch")
pytest.importorskip("networkx")

from hpc3d.partition.__main__ import main
from hpc3d.partition.baselines.contenders import Contender
from hpc3d.partition.baselines.side_by_side import as_row
from hpc3d.partition.evaluation import Evaluated, PipelineChoice, StageChoice

NAMES = [
    "ours",
    "data parallel",
    "GPipe, even layers",
    "GPipe, by time",
    "GPipe hybrid",
    "by parameters",
    "Megatron-LM",
    "Megatron-LM, pipeline",
    "PipeDream",
    "RaNNC",
]


def compared(capsys, *words):
    code = main(["compare", "inputs.partition.mlp:small", "--ranks", "2", *words])
    return code, capsys.readouterr()


def test_compare_prints_a_row_for_every_planner(capsys):
    """A row has the step time and the samples/s, and none is faster than hpc3d's."""
    code, printed = compared(capsys, "--batch", "4096", "--machine", "v100-8x4", "--json")
    *text, last = printed.out.splitlines()
    found = json.loads(last)
    rows = {row["name"]: row for row in found["rows"]}
    assert code == 0 and [*rows] == NAMES and found["batch"] == 4096
    assert found["memory"] == pytest.approx(0.9 * 32e9)
    for name, row in rows.items():
        (line,) = [line for line in text if line.startswith(f"{name}  ")]
        assert f"{row['step']:.4g}" in line and row["fits"]
        assert row["samples_s"] == pytest.approx(4096 / row["step"])
        assert row["step"] >= rows["ours"]["step"] * (1 - 1e-9)


def test_compare_reports_planners_that_do_not_fit(capsys):
    """Weights, gradients and moments of six layers take 399,360 bytes. hpc3d's plan needs a rank
    for three layers, so only planners with all layers on one rank fail."""
    code, printed = compared(capsys, "--memory", "320000B", "--json")
    assert code == 0, printed.err
    rows = {row["name"]: row for row in json.loads(printed.out.splitlines()[-1])["rows"]}
    assert rows["ours"]["fits"] and not rows["data parallel"]["fits"]
    assert rows["data parallel"]["fullest"] > 320_000
    assert "(too large)" in printed.out


def test_contender_row_has_plain_values():
    stages = StageChoice(3, 2, True), StageChoice(8, 1, False)
    numbers = dict.fromkeys(Evaluated._fields, (1.0,))
    step = Evaluated(**numbers | {"seconds": 4.0, "held": (7.0, 5.0), "fits": True})
    row = as_row(Contender("it", PipelineChoice(stages, 4), step, "so", 2), 8)
    assert row == {
        "name": "it",
        "note": "so",
        "ways": 2,
        "stages": 2,
        "replicas": [2, 1],
        "microbatches": 4,
        "recompute": "some",
        "schedule": "1f1b",
        "fits": True,
        "fullest": 7.0,
        "step": 4.0,
        "samples_s": 2.0,
    }
    assert as_row(Contender("none", None, None), 8)["step"] is None


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("inputs.partition.mlp:absent", "--ranks", "2"), "has no function absent"),
        (("tests.partition.sample_models:decides", "--ranks", "2"), "sample_models.py:"),
        (("inputs.partition.mlp:small", "--ranks", "2", "--memory", "10B"), "--memory"),
    ],
)
def test_invalid_comparison_is_rejected_in_one_line(words, line, capsys):
    assert main(["compare", *words]) == 2
    err = capsys.readouterr().err
    assert line in err and err.count("\n") == 1


def test_invalid_options_are_rejected(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["compare", "a:b"])
    assert ended.value.code == 2 and "--ranks" in capsys.readouterr().err
