"""Optional packages that an input requires are checked before anything starts."""

import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from hpc3d import report, simulate, train
from hpc3d.runtime.optional_packages import EXTRAS, need
from tests.runs import ended

SETUP = Path(__file__).parents[2] / "setup.cfg"


def hidden(monkeypatch, *packages):
    for package in packages:
        monkeypatch.setitem(sys.modules, package, None)


def test_every_optional_package_is_in_its_extra():
    sections = SETUP.read_text(encoding="utf-8").partition("[options.extras_require]")[2]
    for package, extra in EXTRAS.items():
        listed = sections.partition(f"\n{extra} =\n")[2].partition("=\n")[0]
        assert f"    {package}>=" in listed


def test_each_missing_package_is_one_line(monkeypatch):
    there = ["bokeh", *filter(find_spec, EXTRAS)]  # there is no otf2 for Python 3.12
    assert {"bokeh", "scipy"} < {*there}
    need("this", *there)
    hidden(monkeypatch, "bokeh", "scipy")
    with pytest.raises(ValueError) as caught:
        need("this", "numpy", *there)
    assert str(caught.value).splitlines() == [
        "this needs bokeh: pip install bokeh",
        "this needs scipy: pip install 'hpc3d[exact]'",
    ]


def test_exact_gelu_without_scipy_is_rejected_before_a_run_folder_exists(monkeypatch, tmp_path):
    hidden(monkeypatch, "scipy")
    words = ["--model.gelu", "exact", "--run.out", str(tmp_path)]
    with pytest.raises(ValueError, match=r"^model.gelu = exact needs scipy: .*\[exact\]'$"):
        train.read_command_line(1, words)
    assert not [*tmp_path.iterdir()]


def test_report_without_its_packages_is_rejected_before_reading(monkeypatch, capsys, tmp_path):
    hidden(monkeypatch, "bokeh", "matplotlib")
    assert ended(report.main, tmp_path / "none") == 2
    error = capsys.readouterr().err.splitlines()
    remedies = {line.partition("pip install ")[2] for line in error}
    assert len(error) == 2 and remedies == {"bokeh", "matplotlib"}


def test_schedule_figure_without_matplotlib_is_rejected_before_the_simulation(monkeypatch, capsys):
    hidden(monkeypatch, "matplotlib")
    words = ["schedule", "--name", "1f1b", "--stages", "2", "--microbatches", "2"]
    assert simulate.main([*words, "--png", "x.png"]) == 2
    out, error = capsys.readouterr()
    assert not out and "pip install matplotlib" in error and error.count("\n") == 1
