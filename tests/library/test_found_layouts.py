"""Layouts found by a search: those of the command, as rows and as an input file."""

import json

import pytest

import hpc3d
from hpc3d.config.load import load
from hpc3d.plan import main
from tests.library.tiny import TINY, WORDS


@pytest.fixture(scope="module")
def layouts():
    return hpc3d.find_layouts("gpt-serial", 2, TINY, "a100-selene", top=3)


@pytest.mark.slow
def test_layouts_match_the_output_of_the_plan_command(layouts, capsys):
    words = ["--ranks", "2", "--top", "3", "--machine", "a100-selene", *WORDS, "--json"]
    assert main(["gpt-serial", *words]) == 0
    printed = capsys.readouterr().out
    found = json.loads(printed.splitlines()[-1])
    assert f"{layouts}\n" in printed
    assert json.loads(json.dumps(layouts)) == found["layouts"]
    losers = layouts.losers()
    assert [*losers["reason"]] == [each["reason"] for each in found["losers"]]
    assert [*losers["count"]] == [each["count"] for each in found["losers"]]


def test_best_layout_is_first_and_can_be_written(layouts, tmp_path):
    seconds = [row["step_time_s"] for row in layouts]
    assert seconds == sorted(seconds) and 1 <= len(seconds) <= 3 and layouts.technique is None
    written = load(layouts.write(tmp_path / "planned.toml"), [])
    assert written.mesh == layouts.config().mesh and written.mesh.grid().size == 2
    assert written.model.hidden == 32


def test_notebook_representation_shows_the_best_layout(layouts):
    head, *lines = str(layouts).splitlines()
    assert head.split() == ["step", "memory", "bubble", "comm.", "axis", "layout"]
    assert len(lines) == len(layouts) and lines[0].startswith("  1 ")
    assert all(f" {text}" in line for line, text in zip(lines, layouts.frame()["layout"]))
    frame = layouts.frame()
    assert [*frame["step_time_s"]] == [row["step_time_s"] for row in layouts]
    assert frame["layout"][0] in layouts._repr_html_()


@pytest.mark.slow
def test_technique_is_proposed_if_nothing_fits(tmp_path):
    """The unchanged input requires 400 kB."""
    less = hpc3d.find_layouts("gpt-serial", 1, TINY, memory=3e5, top=1)
    assert less.technique == "train.optimizer=adafactor"
    assert str(less).startswith("All layouts use train.optimizer=adafactor.\n")
    assert less[0]["peak_bytes"] <= 3e5
    assert load(less.write(tmp_path / "less.toml"), []).train.optimizer == "adafactor"
