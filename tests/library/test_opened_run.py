"""A run that is opened: by its folder and by its trace, and what there is to look at."""

import numpy as np
import pytest

import hpc3d
from hpc3d.library.opened_run import Tables, open_run
from tests.library.tiny import TINY


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    where = tmp_path_factory.mktemp("runs") / "tiny"
    hpc3d.predict_step("gpt-serial", mesh={"x": 2}, **TINY).keep(where).close()
    return where


def test_it_is_there_by_folder_and_by_file(folder):
    with open_run(folder) as run, open_run(str(folder / "trace.h5")) as same:
        assert run.folder == same.folder == folder
        assert repr(run) == repr(same) == "Run(tiny): simulated, 2 ranks, 1 step"
        assert (run.ranks, run.config.mesh.x, run.config.model.hidden) == (2, 2, 32)
        assert np.isnan(run.losses).all() and len(run.losses) == 1
        assert len(run.events) == len(run.events["dur"]) > 0
        assert len(run.steps) == 2 and {*run.memory["rank"]} == {0, 1}


def test_tables_are_those_of_the_report(folder):
    with open_run(folder) as run:
        (step,) = run.tables["step"]
        assert step["ranks"] == 2 and step["step_s_median"] > 0
        assert {row["axis"] for row in run.tables["waits"]} >= {"x"}
        with pytest.raises(ValueError, match=r"no table 'wait'; .* waits"):
            run.tables["wait"]
    assert len(run.tables) == len([*run.tables])  # what was read stays


def test_a_step_is_drawn(folder):
    with open_run(folder) as run:
        drawing = run.timeline()
        assert drawing.figure.axes[0].get_ylabel() == "rank"
        with pytest.raises(ValueError, match="step 7"):
            run.timeline(step=7)


@pytest.mark.slow
def test_its_report_is_written(folder, tmp_path):
    with open_run(folder) as run:
        page = run.report(tmp_path / "report")
        assert page.read_text(encoding="utf-8").lower().startswith("<!doctype html>")
        assert run.report() == folder / "report" / "report.html"


def test_what_is_no_run_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"no-run: .* results/NAME-STAMP"):
        open_run(tmp_path / "no-run")
    with pytest.raises(ValueError, match=f"{tmp_path}: not the folder of a run"):
        open_run(tmp_path)


def test_tables_say_what_they_are():
    assert repr(Tables({"a": [], "b": [{"c": 1}]})) == "Tables: a, b"
