"""A run opened with `hpc3d.open`."""

import pytest

import hpc3d
from tests.analyze.report.by_hand import write_run


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return hpc3d.open(write_run(tmp_path_factory.mktemp("run") / "small"))


def test_opened_run_has_losses_tables_and_a_verdict(run):
    assert len(run.losses) == 3 and run.metrics == []
    assert run.config.name == "gpt"
    assert "% of a step is computation" in run.verdict
    assert {"time", "waits", "path"} <= {*run.tables}
    assert run.table("time")["seconds"].sum() > 0
    assert run.name in repr(run)


def test_events_are_returned_as_a_dataframe(run):
    frame = run.events(["rank", "name", "dur"])
    assert [*frame.columns] == ["rank", "name", "dur"] and len(frame)
    assert {"bytes", "phase"} <= {*run.events().columns}


@pytest.mark.slow
def test_report_method_writes_the_html_report(run, tmp_path):
    page = run.report(tmp_path / "report")
    assert run.name in page.read_text(encoding="utf-8")
    assert (tmp_path / "report" / "tables").is_dir()
    assert run.report() == run.folder / "report" / "report.html"


@pytest.mark.slow
def test_timeline_is_displayed_and_saved(run, tmp_path):
    drawing = run.timeline()
    assert drawing._repr_png_().startswith(b"\x89PNG")
    drawing.save(tmp_path / "step.svg")
    assert b"<svg" in (tmp_path / "step.svg").read_bytes()
    assert run.timeline(step=1).title == "Step 1"
    assert run.figure("waits").figure


@pytest.mark.parametrize(
    ("ask", "said"),
    [
        (lambda run: run.table("x"), "x: no such table; use one of "),
        (lambda run: run.figure("x"), "x: this run has no such figure; use one of "),
        (lambda run: run.pipeline(), "pipeline: this run has no such figure"),
        (lambda run: run.timeline(step=99), ".*step 99"),
        (lambda run: hpc3d.open("nowhere"), "nowhere"),
    ],
)
def test_unknown_names_raise_value_error(run, ask, said):
    with pytest.raises(ValueError, match=f"^{said}"):
        ask(run)
