"""A predicted step: the numbers of the command, and more to look at."""

import json

import pytest

import hpc3d
from hpc3d.simulate import main
from tests.library.tiny import TINY

WORDS = ["gpt-serial", "--machine", "a100-selene", "--mesh.x", "2", "--mesh.y", "2", "--json"]


@pytest.fixture(scope="module")
def step():
    return hpc3d.predict_step("gpt-serial", "a100-selene", mesh={"x": 2, "y": 2}, **TINY)


def test_its_numbers_are_those_of_the_command(step, capsys):
    words = [w for key, v in TINY["model"].items() for w in (f"--model.{key}", str(v))]
    main([*WORDS, *words, "--train.batch", "8", "--train.steps", "3"])
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    for key in ("step_time_s", "tokens_per_s", "bubble", "communication", "flop", "mfu", "hfu"):
        assert getattr(step, key) == found[key]
    assert (step.machine, step.ranks) == (found["machine"], found["ranks"]) == ("a100-selene", 4)
    memory = found["memory"]
    assert (step.fits, step.total_bytes) == (memory["fits"], memory["total"])
    assert step.memory == [{"stage": 0, **memory["stages"][0]}]
    assert step.peak_bytes == memory["worst"]["all"]
    rows = {(row["axis"], row["op"]): (row["calls"], row["bytes"]) for row in step.received}
    assert rows == {
        (axis, op): (each["calls"], each["bytes"])
        for axis, ops in found["bytes"].items()
        for op, each in ops.items()
    }


def test_it_says_what_it_is(step):
    assert repr(step).startswith("gpt-serial on 4 ranks of a100-selene: ")


def test_it_is_kept_as_a_run(step, tmp_path):
    with step.keep(tmp_path / "kept") as run:
        assert (run.ranks, run.trace.attrs["kind"]) == (4, "simulated")
    with pytest.raises(ValueError, match="kept exists"):
        step.keep(tmp_path / "kept")


def test_it_is_drawn(step):
    assert len(step.timeline().figure.axes[0].get_yticks()) == 4


def test_nothing_is_printed(capsys):
    hpc3d.predict_step("gpt-serial", ranks=2, mesh={"d": 2}, **TINY)
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ({"input": "gpt-seria"}, "gpt-seria: .* gpt-serial"),
        ({"machine": "h10"}, "h10: .* h100"),
        ({"mesh": {"x": 5}}, "x 5"),
        ({"train": {"lr": 1}}, "train.lr: "),
    ],
)
def test_what_the_command_refuses_is_a_value_error(given, line):
    with pytest.raises(ValueError, match=line):
        hpc3d.predict_step(**{"input": "gpt-serial", **given})
