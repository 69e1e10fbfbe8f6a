"""A predicted step: the numbers of the command, and additional values."""

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


def test_step_prediction_matches_the_output_of_the_command(step, capsys):
    main([*COMMAND, *WORDS])
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert json.loads(json.dumps(step)) == found
    assert step.config.grid().size == step["ranks"] == 4


def test_prediction_tables_are_dataframes(step):
    assert {*step.memory.columns} == {"stage", *step["memory"]["stages"][0]}
    assert step.received["bytes"].sum() == sum(
        each["bytes"] for ops in step["bytes"].values() for each in ops.values()
    )


def test_prediction_repr_names_the_model_ranks_and_machine(step):
    assert repr(step).startswith("gpt-serial on 4 ranks of a100-selene: ")


def test_prediction_is_saved_as_a_run(step, tmp_path):
    run = step.keep(str(tmp_path / "kept"))
    assert run.name == "kept" and run.table("step")["ranks"][0] == 4
    with pytest.raises(ValueError, match="kept already exists"):
        step.keep(tmp_path / "kept")


def test_prediction_timeline_has_a_row_per_rank(step):
    assert len(step.timeline().figure.axes[0].get_yticks()) == 4


def test_predict_step_prints_nothing(capsys):
    hpc3d.predict_step("gpt-serial", TINY | {"mesh.d": 2})
    assert capsys.readouterr() == ("", "")
