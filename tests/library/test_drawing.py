"""Figures that are shown and saved."""

import pytest

from hpc3d.library.drawing import Drawing


def figure():
    from matplotlib.figure import Figure

    return Figure(figsize=(1, 1))


def test_a_notebook_shows_a_png():
    assert Drawing(figure)._repr_png_().startswith(b"\x89PNG")


def test_nothing_is_drawn_before_it_is_looked_at(tmp_path):
    made = []
    drawing = Drawing(lambda: made.append(1) or figure())
    assert not made
    assert drawing.save(tmp_path / "a.svg").read_text().startswith("<?xml")
    drawing.save(str(tmp_path / "a.png"))
    assert len(made) == 1


def test_other_endings_and_folders_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"a\.gif: "):
        Drawing(figure).save(tmp_path / "a.gif")
    with pytest.raises(OSError, match=r"no/a\.png"):
        Drawing(figure).save(tmp_path / "no" / "a.png")
