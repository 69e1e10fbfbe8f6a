"""The command `layout` prints the text form and writes the picture; bad input is one line."""

from pathlib import Path
from xml.etree import ElementTree

import pytest

from hpc3d.analyze.picture.layout_text import lines
from hpc3d.layout.__main__ import main
from tests.analyze.picture.layouts import blocks_of

INPUTS = Path(__file__).parent.parent / "inputs"


def test_text_form_is_printed_and_the_picture_is_written(tmp_path, capsys):
    out = tmp_path / "layout.svg"
    assert main(["gpt-4d-64", "--parallel.zero", "3", "--out", str(out)]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed == [*lines(blocks_of("gpt-4d-64", "--parallel.zero", "3")), f"written to {out}"]
    assert ElementTree.fromstring(out.read_text(encoding="utf-8")).get("role") == "img"


def test_run_folder_has_the_layout_of_its_configuration(tmp_path, capsys):
    text = (INPUTS / "gpt-4d-64.toml").read_text(encoding="utf-8")
    (tmp_path / "config.toml").write_text(text, encoding="utf-8")
    assert main([str(tmp_path)]) == 0
    assert capsys.readouterr().out.splitlines() == [*lines(blocks_of("gpt-4d-64"))]


def test_hosts_of_a_machine_are_drawn(capsys):
    assert main(["long-context-16", "--machine", "h100"]) == 0
    assert "- - - - host 1 - - - -" in capsys.readouterr().out.splitlines()


def test_chosen_matrix_is_listed_and_drawn(tmp_path, capsys):
    out = tmp_path / "layout.svg"
    assert main(["gpt-3d-8", "--matrix", "head.norm.gamma", "--out", str(out)]) == 0
    title, described = "head.norm.gamma [384], layout [n_z]", "192:384 1 3 5 7"
    drawn = out.read_text(encoding="utf-8")
    assert drawn.count(title) == 2 and described in drawn
    printed = capsys.readouterr().out
    assert "head.norm.gamma [384], layout [n_z]" in printed
    assert "192:384  1 3 5 7" in printed and "replicated along x, y" in printed


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["gpt-text"], "gpt-text does not set mesh.x, mesh.y and mesh.z; add --ranks N"),
        (["gpt-3d-8", "--matrix", "w"], "--matrix w: the model has no such parameter"),
        (["gpt-3d-8", "--matrix", ""], "--matrix '': the model has no such parameter"),
        (["gpt-3d-8", "--mesh.x", "5"], "must be divisible by mesh.x"),
        (["gpt-3d-8", "--machine", "nowhere"], "nowhere"),
        (["gpt-3d-8", "--out", "layout.png"], "--out layout.png: the picture is an SVG file"),
        (["gpt-3d-8", "--out", "/nowhere/layout.svg"], "hpc3d.layout: /nowhere: No such file"),
    ],
)
def test_bad_input_is_one_line(words, said, capsys):
    assert main(words) == 2
    error = capsys.readouterr().err
    assert said in error and all(each.startswith("hpc3d.layout: ") for each in error.splitlines())


def test_no_picture_is_written_for_bad_input(tmp_path):
    out = tmp_path / "layout.svg"
    assert main(["gpt-3d-8", "--matrix", "w", "--out", str(out)]) == 2
    assert not out.exists()
