"""A run that was resumed three times is one run in its report and in `hpc3d.open`."""

import json
import re
import shutil

import numpy as np
import pytest

import hpc3d
from hpc3d import report
from hpc3d.analyze.attempts import Attempts, resumes
from hpc3d.config.load import to_toml
from hpc3d.runtime import metrics_file
from hpc3d.trace.merge import merge
from tests.analyze.report.by_hand import reported, write_run
from tests.mpi import checked
from tests.pipeline.mixes import config_of
from tests.runs import losses, train, without_progress
from tests.trace.test_previous_attempts import FLAT as OTHER
from tests.trace.test_previous_attempts import attempt

RANKS, STEPS = 2, 9
FLAT = {
    "checkpoint__every": 2,
    "train__eval_every": 3,
    "data__validation": '["LICENSE", "setup.cfg"]',
    "parallel__scheme": "1d",
    "mesh__x": 2,
}


def resumed(run, steps, after, *options):
    """Resume a run from its checkpoint after step `after`, which may not be the newest one."""
    for path in (run / "checkpoints").glob("step-*"):
        if int(path.name.removeprefix("step-")) > after:
            shutil.rmtree(path)
    words = ["--resume", run, "--train.steps", steps, *options]
    checked(RANKS, "-m", "hpc3d.train", *words, timeout=200)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Attempt 1 trains steps 0 to 5, attempt 2 steps 4 to 7, and attempt 3, with another layout,
    steps 6 to 8."""
    run = train(RANKS, tmp_path_factory.mktemp("run"), train__steps=6, **FLAT)
    resumed(run, 8, 4)
    resumed(run, STEPS, 6, "--mesh.x", 1, "--mesh.d", 2)
    return run


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Return the losses of the same run without interruptions."""
    run = train(RANKS, tmp_path_factory.mktemp("whole"), train__steps=STEPS, **FLAT)
    return losses(run).tolist()


@pytest.mark.slow
@pytest.mark.parametrize("is_recorded", [True, False])
def test_losses_of_all_attempts_equal_those_of_an_uninterrupted_run(
    folder, whole, tmp_path, is_recorded
):
    """With and without metrics.jsonl, which contains the same losses."""
    run = shutil.copytree(folder, tmp_path / "run")
    if not is_recorded:
        (run / metrics_file.NAME).unlink()
    opened = hpc3d.open(run)
    assert np.abs(np.subtract(opened.losses, whole)).max() < 1e-10
    rows = opened.table("loss")
    assert rows["step"].tolist() == [*range(STEPS)] and (rows["seconds"] > 0).all()
    assert rows["attempt"].tolist() == [1, 1, 1, 1, 2, 2, 3, 3, 3]
    assert rows["superseded"].fillna("").tolist() == [""] * 4 + ["1", "1", "2", "2", ""]
    evaluations = opened.table("evaluation")
    assert evaluations["step"].tolist() == [2, 5, 8]
    assert evaluations["attempt"].tolist() == [1, 2, 3]
    texts = opened.table("validation")
    assert texts["step"].tolist() == [2, 2, 5, 5, 8, 8]
    assert texts["text"].tolist() == ["LICENSE", "setup.cfg"] * 3
    assert texts["attempt"].tolist() == [1, 1, 2, 2, 3, 3]
    assert (texts[["accuracy", "tokens", "perplexity"]] > 0).all(axis=None)
    means = texts.groupby("step")["loss"].mean().to_numpy()
    np.testing.assert_allclose(means, evaluations["loss"], rtol=1e-12)


@pytest.mark.slow
def test_table_of_attempts_lists_layouts_and_superseded_steps(folder):
    rows = hpc3d.open(folder).table("attempts")
    assert rows["layout"].tolist() == ["1d, x=2"] * 2 + ["data parallel, d=2"]
    assert rows[["first", "last"]].to_numpy().tolist() == [[0, 5], [4, 7], [6, 8]]
    assert rows["superseded"].dropna().tolist() == [4, 6]
    assert rows["file"].tolist() == ["trace-1.h5", "trace-2.h5", "trace.h5"]
    assert (rows["step_s"] > 0).all() and (rows["tokens_per_s"] > 0).all()
    assert resumes(rows.to_dict("records")) == {4: "attempt 2", 6: "attempt 3: data parallel, d=2"}


@pytest.mark.slow
def test_timeline_shows_the_newest_attempt_that_has_the_step(folder):
    run = hpc3d.open(folder)
    assert [run.timeline(step).title for step in (3, 8)] == ["Step 3", "Step 8"]
    shown = [run._of(step).label for step in (3, 5, 7)]
    assert shown == ["1d, x=2", "1d, x=2", "data parallel, d=2"]
    known = r"step 99.* steps 6 to 8; .*trace-2\.h5 has steps 0 to 7"
    with pytest.raises(ValueError, match=known):
        run.timeline(99)


@pytest.mark.slow
def test_report_marks_resumes_and_links_the_log(folder, capsys):
    assert report.main([str(folder), "--figures", "svg"]) == 0
    assert without_progress(capsys.readouterr().err) == ""
    page = (folder / "report" / "report.html").read_text(encoding="utf-8")
    assert 'href="../train.log"' in page
    figure = (folder / "report" / "figures" / "loss.svg").read_text(encoding="utf-8")
    drawn = re.findall("<!-- (.*?) -->", figure)  # the text of each label
    assert "attempt 2" in drawn and "attempt 3: data parallel, d=2" in drawn
    assert (folder / "report" / "figures" / "steps.svg").exists()
    assert "| attempt |" in (folder / "report" / "report.md").read_text(encoding="utf-8")


def record(step, loss, **values):
    return json.dumps({"step": step, "loss": loss, "seconds": 0.5, **values}) + "\n"


def test_records_add_steps_without_a_trace(tmp_path):
    """The trace of the only attempt has steps 0 to 2."""
    run = write_run(tmp_path / "small")
    lines = [record(step, 9.0 - step, gradient_norm=0.25) for step in (2, 3)]
    (run / metrics_file.NAME).write_text("".join(lines))
    opened = hpc3d.open(run)
    assert opened.losses == [4.0, 3.5, 3.25, 6.0]
    assert "attempt" not in opened.tables and opened.table("loss")["attempt"].isna().all()
    assert opened.table("loss")["grad_norm"].tolist() == [1.5, 1.5, 1.5, 0.25]


def test_traces_take_precedence_over_equal_records(tmp_path):
    """Attempt 1 trains steps 0 to 2, and attempt 2 steps 2 to 4. Records have other times."""
    attempt(tmp_path, 0, 3)
    attempt(tmp_path, 2, 5)
    with hpc3d.trace.open(tmp_path / "trace.h5") as trace:
        rows = Attempts(trace).losses(), Attempts(trace).evaluations()
        assert [row["attempt"] for row in rows[0]] == [1, 1, 2, 2, 2]
        lines = [record(row["step"], row["loss"]) for row in rows[0]]
        for row in rows[1]:
            values = {"validation_loss": row["loss"], "evaluation_seconds": 9.0}
            lines.append(json.dumps({"step": row["step"], **values}) + "\n")
        lines[1] = record(1, 9.0)
        (tmp_path / metrics_file.NAME).write_text("".join(lines))
        retrained, evaluations = Attempts(trace).losses(), Attempts(trace).evaluations()
    assert evaluations == rows[1] and [retrained[0], *retrained[2:]] == [rows[0][0], *rows[0][2:]]
    assert (retrained[1]["loss"], retrained[1]["seconds"]) == (9.0, 0.5)


def test_first_attempt_without_a_trace_is_read_from_the_records(tmp_path):
    """It was killed after step 2. The second attempt trains steps 2 and 3."""
    attempt(tmp_path, 2, 4)
    config = tmp_path / "config-1.toml"
    config.write_text(to_toml(config_of("p=2 d=2 x=1 y=1 z=1 schedule=gpipe zero=1")))
    lines = [record(step, 9.0 - step, tokens=64) for step in range(2)]
    lines.append(json.dumps({"step": 1, "validation_loss": 8.0}) + "\n")
    (tmp_path / metrics_file.NAME).write_text("".join(lines))
    with hpc3d.trace.open(merge(tmp_path)) as trace:
        assert trace.attrs["missing"].startswith("steps 0 to 1: trained, ")
        attempts = Attempts(trace)
        unknown = []
        module = config.read_text().replace("[torch]", '[torch]\nfactory = "a:b"')
        for text in ("", "[mesh]\nx = 2\n", module):
            config.write_text(text)
            unknown.append(Attempts(trace).table()[0])
    assert [row["attempt"] for row in attempts.losses()] == [1, 1, 2, 2]
    assert [row["attempt"] for row in attempts.evaluations()] == [1, 2, 2]
    first, second = attempts.table()
    assert [first["layout"], second["layout"]] == ["gpipe, ZeRO 1, p=2 d=2", "1f1b, p=2"]
    assert [first["ranks"], first["file"], second["file"]] == [4, "no trace", "trace.h5"]
    assert {(row["layout"], row["ranks"]) for row in unknown} == {("layout unknown", None)}
    assert [first[key] for key in ("first", "last", "step_s", "tokens_per_s")] == [0, 1, 0.5, 128]


def test_all_outputs_state_the_steps_and_the_file_of_another_layout(tmp_path, capsys):
    """Attempt 1 trains steps 0 to 2, and attempt 2, with another layout, steps 2 to 4."""
    run, other = tmp_path / "run", write_run(tmp_path / "small")
    attempt(run, 0, 3)
    attempt(run, 2, 5, layout=OTHER)
    named = "trace-1.h5, steps before 2"
    assert report.main([str(run), "--json"]) == 0
    *lines, found = capsys.readouterr().out.splitlines()
    assert f"other layout: {named}" in lines
    about = json.loads(found)["runs"][0]["about"]
    assert about["other layout"] == named
    assert about["trace"].endswith(" events in 3 of 5 completed steps")
    page = (run / "report" / "report.html").read_text(encoding="utf-8")
    assert "Nothing is missing: all 2 ranks, all 5 steps." in page
    assert report.main([str(run), str(other), "--out", str(tmp_path / "out")]) == 0
    (note,) = (line for line in capsys.readouterr().out.splitlines() if named in line)
    assert note.endswith(f": the times exclude steps with another layout ({named})")
    for name in ("report.html", "report.md"):
        text = (tmp_path / "out" / name).read_text(encoding="utf-8")
        assert note.removeprefix("compare with care: ") in text
    whole = reported(capsys, run / "trace.h5")["runs"][0]["about"]["trace"]
    assert whole == about["trace"]
    attempt(run, 2, 5)  # continues attempt 1 with the same layout
    assert reported(capsys, run)["runs"][0]["about"]["trace"].endswith(" in 5 completed steps")


def test_single_trace_file_is_analyzed_without_the_rest_of_the_run(tmp_path):
    run = write_run(tmp_path / "small")
    hpc3d.open(run)
    (run / metrics_file.NAME).write_text(record(3, 1.0))
    copy = shutil.copy(run / "trace.h5", run / "trace-1.h5")
    assert len(hpc3d.open(run).losses) == 4 and len(hpc3d.open(copy).losses) == 3
