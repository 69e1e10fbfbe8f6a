"""A predicted step: the numbers of the command, and more to look at."""

import json

import pytest

import hpc3d
from hpc3d.simulate import main
from tests.library.tiny import TINY, WORDS

MESH = {"mesh.x": 2, "mesh.y": 2}
COMMAND = ["gpt-serial", "--machine", "a100-selene", "--mesh.x", "2", "--mesh.y", "2", "--json"]


@pytest.fixture(scope="module")
def step():
    return hpc3d.predict_step("gpt-serial", TINY | MESH, machine="a100-selene")


def test_its_numbers_are_those_of_the_command(step, capsys):
    main([*COMMAND, *WORDS])
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert json.loads(json.dumps(step)) == found
    assert step.config.mesh.grid().size == step["ranks"] == 4


def test_its_tables_are_frames(step):
    assert {*step.memory.columns} == {"stage", *step["memory"]["stages"][0]}
    assert step.received["bytes"].sum() == sum(
        each["bytes"] for ops in step["bytes"].values() for each in ops.values()
    )


def test_it_says_what_it_is(step):
    assert repr(step).startswith("gpt-serial on 4 ranks of a100-selene: ")


def test_it_is_kept_as_a_run(step, tmp_path):
    run = step.keep(str(tmp_path / "kept"))
    assert run.name == "kept" and run.table("step")["ranks"][0] == 4
    with pytest.raises(ValueError, match="kept exists"):
        step.keep(tmp_path / "kept")


def test_it_is_drawn(step):
    assert len(step.timeline().figure.axes[0].get_yticks()) == 4


def test_nothing_is_printed(capsys):
    hpc3d.predict_step("gpt-serial", TINY | {"mesh.d": 2})
    assert capsys.readouterr() == ("", "")
