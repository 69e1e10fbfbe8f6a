"""The command `reproduce`: the same configuration gives the same losses and bytes."""

import json
import re
import shutil
from pathlib import Path

import pytest

from hpc3d import reproduce
from hpc3d.config.load import load
from hpc3d.library import launched_run
from tests.library.tiny import WORDS
from tests.mpi import surroundings
from tests.runs import ended


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """Run of three steps on one rank."""
    out = tmp_path_factory.mktemp("original")
    words = ["gpt-serial", *WORDS, "--train.dtype", "float64", "--run.out", str(out)]
    return launched_run.launched(1, words)


@pytest.fixture
def run(original, tmp_path):
    """Copy of the run, to be changed."""
    shutil.copytree(original, tmp_path / "run")
    return tmp_path / "run"


def reproduced(capsys, *words):
    """Return the exit code, the printed lines, and the results."""
    code = ended(reproduce.main, *words, "--json")
    *lines, found = capsys.readouterr().out.splitlines()
    return code, lines, json.loads(found)


def changed(run, step, loss):
    """Replace the loss of a step in metrics.jsonl."""
    path = run / "metrics.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()]
    records[step]["loss"] = loss
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def test_same_configuration_gives_identical_losses_and_bytes(run, capsys):
    facts = json.loads((run / "environment.json").read_text())
    facts |= {"load": [99.0, 9.0, 9.0], "other_cpu_share": 0.9}  # they always differ
    (run / "environment.json").write_text(json.dumps(facts))
    code, lines, found = reproduced(capsys, run)
    assert code == 0 and found["largest_difference"] == 0 and found["steps"] == 3
    assert (found["losses_agree"], found["bytes_agree"], found["environment"]) == (True, True, [])
    assert lines[2] == "losses       identical, 3 steps, tolerance 1e-10"
    assert lines[4] == "environment  identical"
    assert found["folder"].startswith(str(run.parent))


def test_other_losses_are_reported_and_accepted_within_the_tolerance(run, capsys):
    before = json.loads((run / "metrics.jsonl").read_text().splitlines()[1])["loss"]
    changed(run, 1, before * (1 + 1e-6))
    code, lines, found = reproduced(capsys, run)
    assert code == 3 and not found["losses_agree"]
    assert found["largest_difference"] == pytest.approx(1e-6, rel=1e-5)
    assert lines[2].startswith("losses       DIFFERENT, largest relative difference 1e-06, first ")
    assert ", first in step 1, 3 steps" in lines[2] and found["first_different_step"] == 1
    assert reproduced(capsys, run, "--tolerance", "1e-5")[0] == 0


def test_other_seed_and_environment_are_found(run, capsys):
    path = run / "config.toml"
    path.write_text(re.sub(r"(?m)^seed = \d+", "seed = 7", path.read_text()))
    facts = json.loads((run / "environment.json").read_text())
    facts["packages"]["numpy"], facts["data"]["data.path"] = "1.0", "0"
    (run / "environment.json").write_text(json.dumps(facts))
    code, _, found = reproduced(capsys, run)
    assert code == 3 and found["largest_difference"] > 1e-6
    assert [line.split(":")[0] for line in found["environment"]] == [
        "packages.numpy",
        "data.data.path",
    ]


def test_second_run_has_no_trackers_and_no_time_limit(run, capsys):
    path = run / "config.toml"
    text = re.sub(r"(?m)^(max_minutes) = .*", r"\1 = 5.0", path.read_text())
    path.write_text(re.sub(r"(?m)^(trackers) = .*", r"\1 = ['tensorboard']", text))
    _, _, found = reproduced(capsys, run)
    config = load(Path(found["folder"]) / "config.toml", [], of_run=True)
    assert (config.train.max_minutes, config.run.trackers) == (0, ())
    assert found["bytes_agree"]


def test_run_that_stopped_early_is_repeated_up_to_its_last_step(run, capsys):
    path = run / "metrics.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:2]))
    _, _, found = reproduced(capsys, run)
    assert (found["steps"], found["losses_agree"]) == (2, True)
    records = (Path(found["folder"]) / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(record)["steps"] for record in records] == [2, 2]


def test_settings_that_a_resumed_run_changed_are_named(tmp_path, capsys):
    """The number of steps, which also changed, is not named."""
    words = ["gpt-serial", *WORDS, "--checkpoint.every", "3", "--run.out", str(tmp_path)]
    first = launched_run.launched(1, words)
    launched_run.launched(1, ["--resume", str(first), "--train.steps", "4", "--seed", "7"])
    code, lines, found = reproduced(capsys, first)
    assert code == 3 and found["first_different_step"] == 0
    assert lines[3].startswith("settings     changed at step 3: seed was 1234, is 7; the second")
    (first / "trace.h5").unlink()
    assert [*reproduce._settings(first)] == ["at a resume: seed was 1234, is 7"]


def compared(before, after, tolerance=1e-10):
    return reproduce.compared(before, after, tolerance)


def test_different_bytes_of_a_rank_are_found(run, original, monkeypatch):
    assert compared(run, original)["bytes_agree"]
    count = reproduce._bytes
    monkeypatch.setattr(reproduce, "_bytes", lambda path: count(path) + (path == run))
    assert compared(run, original)["bytes_agree"] is False


def test_bytes_are_not_compared_without_a_trace_or_after_a_resume(run, original):
    (run / "config-1.toml").touch()
    assert compared(run, original)["bytes_agree"] is None
    (run / "config-1.toml").unlink()
    (run / "trace.h5").unlink()
    assert compared(run, original)["bytes_agree"] is None


@pytest.mark.parametrize(("loss", "agree"), [(None, False), (0.0, False)])
def test_loss_that_is_not_finite_differs_from_a_finite_one(loss, agree, run, original):
    changed(run, 2, loss)
    found = compared(run, original)
    assert found["losses_agree"] == agree
    assert (found["largest_difference"] is None) == (loss is None)


def test_launcher_that_starts_no_run_is_reported_in_one_line(run, capsys):
    assert ended(reproduce.main, run, "--launcher", "false") == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert error == ("hpc3d.reproduce: training ended with exit code 1: false started no run")


def not_a_run(run):
    (run / "config.toml").unlink()
    return "is not the folder of a run"


def without_steps(run):
    (run / "metrics.jsonl").unlink()
    return "has not completed a step"


def of_other_weights(run):
    path = run / "metrics.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[1:]))
    return "the log starts at step 1, so the run continued from other weights"


@pytest.mark.parametrize("damage", [not_a_run, without_steps, of_other_weights])
def test_run_that_cannot_be_repeated_is_rejected_in_one_line(damage, run, capsys):
    line = damage(run)
    assert ended(reproduce.main, run) == 2
    error = capsys.readouterr().err
    assert line in error and error.count("\n") == 1


@pytest.mark.slow
def test_run_on_several_ranks_is_reproduced(tmp_path, capsys, monkeypatch):
    for key, value in surroundings().items():
        monkeypatch.setenv(key, value)
    words = ["gpt-serial", *WORDS, "--mesh.x", "2", "--mesh.d", "2", "--run.out", str(tmp_path)]
    code, _, found = reproduced(capsys, launched_run.launched(4, words))
    assert code == 0 and found["bytes_agree"] and found["bytes"] > 0
