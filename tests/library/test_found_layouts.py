"""Layouts that are searched for: those of the command, as rows and as an input file."""

import json

import pytest

import hpc3d
from hpc3d.config.load import load
from hpc3d.plan import main
from tests.library.tiny import MODEL, TINY


@pytest.fixture(scope="module")
def layouts():
    return hpc3d.find_layouts("gpt-serial", 2, "a100-selene", top=3, **TINY)


@pytest.mark.slow
def test_they_are_those_of_the_command(layouts, capsys):
    words = [w for key, v in MODEL.items() for w in (f"--model.{key}", str(v))]
    words += ["--machine", "a100-selene", "--train.batch", "8", "--train.steps", "3", "--json"]
    assert main(["gpt-serial", "--ranks", "2", "--top", "3", *words]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    for key in ("step_time_s", "peak_bytes", "simulated"):
        assert [row[key] for row in layouts.best] == [row[key] for row in found["layouts"]]
    losers = [(row["reason"], row["count"]) for row in layouts.losers]
    assert losers == [(each["reason"], each["count"]) for each in found["losers"]]


def test_the_best_is_first_and_written(layouts, tmp_path):
    seconds = [row["step_time_s"] for row in layouts.best]
    assert seconds == sorted(seconds) and 1 <= len(seconds) <= 3 and layouts.technique is None
    written = load(layouts.write(tmp_path / "planned.toml"), [])
    assert written.mesh == layouts.config().mesh and written.mesh.grid().size == 2
    assert written.model.hidden == 32


def test_a_notebook_shows_the_best(layouts):
    assert layouts._repr_html_() == layouts.best._repr_html_()
    assert repr(layouts).count("\n") == len(layouts.best) - 1


@pytest.mark.slow
def test_where_nothing_fits_there_is_a_technique(tmp_path):
    """7 MB: see tests/test_plan.py."""
    less = hpc3d.find_layouts("gpt-3d-8", 8, memory=7e6, top=1, model={"layers": 2})
    assert less.technique == "train.optimizer=adafactor"
    assert less.best[0]["peak_bytes"] <= 7e6
    assert load(less.write(tmp_path / "less.toml"), []).train.optimizer == "adafactor"


@pytest.mark.parametrize("given", [{"ranks": 0}, {"ranks": 2.5}, {"ranks": 2, "top": 0}])
def test_numbers_that_cannot_be_are_refused(given):
    with pytest.raises(ValueError, match="must be a whole number, 1 or more"):
        hpc3d.find_layouts("gpt-serial", **given)
