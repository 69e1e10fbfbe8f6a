"""The command `sweep`: run and simulate points, resume, and write the tables."""

import csv
import os
import re
import signal
import subprocess
import sys

import pytest

from hpc3d import sweep
from hpc3d.runtime import mpi_launcher
from tests.library.tiny import MODEL
from tests.mpi import surroundings
from tests.runs import assert_gone, ended, wait_for

TINY = "".join(f"{key} = {value!r}\n" for key, value in MODEL.items())
SIMULATED = """
[sweep]
machine = "h100"
ranks = 2
model.hidden = [32, 64]
"""


@pytest.fixture
def study(tmp_path):
    """Write a study; return a function that runs the command with options."""

    def of(text):
        path = tmp_path / "study.toml"
        path.write_text(f"{TINY}train.batch = 8\ntrain.steps = 8\n{text}")

        def command(*words):
            return ended(sweep.main, path, "--out", tmp_path / "out", *words)

        return command

    return of


def started(capsys):
    """Return the points that the command has started since the last call."""
    return [int(number) for number in re.findall(r"^point (\d+):", capsys.readouterr().out, re.M)]


def table(path):
    with path.open() as file:
        return [*csv.DictReader(file)]


@pytest.mark.slow
def test_only_unfinished_points_are_simulated(study, capsys, tmp_path):
    run = study(SIMULATED)
    assert (run(), started(capsys)) == (0, [0, 1])
    first = table(tmp_path / "out/runs.csv")
    assert [row["model.hidden"] for row in first] == ["32", "64"]
    next((tmp_path / "out/points").glob("*hidden64*.json")).unlink()
    assert (run("--sweep.model.hidden", "32,64,128"), started(capsys)) == (0, [1, 2])
    rows = table(tmp_path / "out/runs.csv")
    assert rows[:2] == first
    assert float(rows[2]["received_bytes"]) > float(rows[1]["received_bytes"]) > 0


def test_list_prints_the_points_and_the_job_array(study, capsys, tmp_path):
    run = study("[sweep]\nranks = [1, 4]\nseed = [1, 2]")
    assert run("--list", "--model.layers", "2") == 0
    *points, count, job = capsys.readouterr().out.splitlines()
    assert (len(points), points[2]) == (4, "    2  unfinished  ranks=4 seed=1")
    assert count == "4 points, 0 finished"
    words = f"jobs/sweep.sbatch {tmp_path}/study.toml --out {tmp_path}/out --model.layers 2"
    assert job == f"as a job array: sbatch --array=0-3 --ntasks=4 {words}"
    assert not (tmp_path / "out").exists()


def test_list_explains_how_to_create_a_missing_job_script(study, capsys, tmp_path, monkeypatch):
    run = study("[sweep]\nranks = [1, 4]")
    monkeypatch.chdir(tmp_path)
    assert run("--list") == 0
    *_, job, advice = capsys.readouterr().out.splitlines()
    assert job.startswith("as a job array: sbatch --array=0-1 ")
    script = "jobs/sweep.sbatch is not in this folder"
    assert advice == f"{script}: python -m hpc3d.init FOLDER copies it to FOLDER"


def test_failed_point_is_reported_and_the_others_are_run(study, capsys, tmp_path):
    run = study(SIMULATED + 'train.dtype = ["float64", "float32"]')
    assert run() == 1
    error = capsys.readouterr().err.splitlines()
    assert [line.partition("machine ")[0] for line in error] == [
        "hpc3d.sweep: point 0: ",
        "hpc3d.sweep: point 2: ",
    ]
    rows = table(tmp_path / "out/runs.csv")
    assert [row["point"] for row in rows] == ["1", "3"]
    out = tmp_path / "out"
    assert run("--table", "--figures", "svg", "--width", "84mm") == 0
    assert 'width="238.11' in (out / "summary.svg").read_text(encoding="utf-8")
    assert not (out / "summary.png").exists()


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--table"], "out: no point is finished; run the study without --table"),
        (["--point", "2"], "--point 2: the last point is 1"),
        (["--sweep.model.hidden", "32,3"], "model.hidden=3: "),
        (["--model.hidden", "128"], "sets this key; use --sweep.model.hidden 128\n"),
        (["--seed=9", "--sweep.a", "[{seed = 1}]"], "sets this key; change sweep.a\n"),
        (["--ranks", "4"], "--ranks 4: the axis sweep.ranks sets this key; use --sweep.ranks 4\n"),
        (["--repetitions", "2"], "not a key of an input file; use --sweep.repetitions 2\n"),
        (
            ["--sweep.data.weights", "[1,1],[5,1]"],
            "--sweep.data.weights [1,1],[5,1]: write a list of lists as '[[1,1],[5,1]]'\n",
        ),
        (["--sweep.foo", "1,2"], "trace, run, ranks, machine, repetitions\n"),
        (["--sweep.rank", "1,2"], "sweep.rank: unknown key; did you mean ranks?\n"),
    ],
)
def test_invalid_request_is_one_line(words, line, study, capsys):
    assert study(SIMULATED)(*words) == 2
    error = capsys.readouterr().err
    assert line in error and error.count("\n") == 1


def test_missing_launcher_is_reported_once_before_the_first_point(study, monkeypatch, capsys):
    monkeypatch.setattr(mpi_launcher, "_library", lambda: None)
    assert study("[sweep]\nranks = [1, 2]\nseed = [1, 2]")() == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.count("\n") == 1
    assert printed.err.startswith("hpc3d.sweep: ranks = 2: mpi4py finds no MPI library; load ")


@pytest.mark.slow
def test_killed_sweep_continues(study, capsys, tmp_path):
    """Finished points are not run again, and a run with a checkpoint is resumed."""
    run, runs = study("[sweep]\nranks = 1\nseed = [1, 2]"), tmp_path / "out/runs"
    more = ["--train.steps", "150", "--checkpoint.every", "10"]
    words = [tmp_path / "study.toml", "--out", tmp_path / "out", *more]
    command = [sys.executable, "-m", "hpc3d.sweep", *map(str, words)]
    with subprocess.Popen(command, env=os.environ | surroundings()) as process:
        wait_for(lambda: [*runs.glob("*seed2*/checkpoints/step-????????")])
        process.send_signal(signal.SIGTERM)
    assert process.returncode == 130
    assert_gone(tmp_path)
    assert (run(*more), started(capsys)) == (0, [1])
    (second,) = runs.glob("*seed2*/trace.h5")
    assert (second.parent / "config-1.toml").exists()
    loss = table(tmp_path / "out/runs.csv")[1]["loss"]
    second.unlink()
    assert (run(*more), started(capsys)) == (0, [1])
    assert table(tmp_path / "out/runs.csv")[1]["loss"] == loss
    assert len([*runs.iterdir()]) == 3


@pytest.mark.slow
def test_launcher_starts_the_ranks(study, tmp_path):
    run = study("[sweep]\nranks = 1")
    launcher = tmp_path / "launch"
    launcher.write_text(f'#!/bin/sh\necho "$1 $2 $3" > {tmp_path}/said\nshift 3\nexec "$@"\n')
    launcher.chmod(0o755)
    assert run("--launcher", f"{launcher} --mpi=pmix", "--point", "0") == 0
    assert (tmp_path / "said").read_text() == "--mpi=pmix -n 1\n"
    assert run("--table") == 0
