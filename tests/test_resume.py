"""Runs on real ranks that end and are resumed: `--resume RUN_DIR`."""

import json
import re
import shutil
import signal
import subprocess
from pathlib import Path

import numpy as np
import pytest

import hpc3d.trace
from hpc3d import train as verb
from hpc3d.analyze.metrics.step import between_rows
from hpc3d.checkpoints.sharded import steps_of
from hpc3d.data.token_file import open_tokens
from hpc3d.trace.checks_per_rank import violations
from tests.elided import elided
from tests.mpi import checked, mpirun
from tests.runs import losses, newest, plan_of, said, train, wait_for, when_running, words
from tests.strided import daily

STEPS, RANKS = 8, 4
LINE = re.compile(r"^ *(\d+) +(\d+\.\d+) ", re.MULTILINE)


def undisturbed(ranks, folder):
    """Return the losses of an uninterrupted run."""
    return losses(train(ranks, folder, train__steps=STEPS))


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return undisturbed(RANKS, tmp_path_factory.mktemp("whole"))


def part(folder, steps=4, ranks=RANKS, **values):
    """Run some steps, and save every second step."""
    return train(ranks, folder, train__steps=steps, checkpoint__every=2, **values)


def resumed(ranks, run, *options, steps=STEPS):
    return checked(
        ranks, "-m", "hpc3d.train", "--resume", run, "--train.steps", steps, *options, timeout=200
    )


def by_step(run):
    """Return {step: loss} of a trace, which may lack the last steps of a killed run."""
    with hpc3d.trace.open(run) as trace:
        mine = trace.steps["rank"] == 0
        steps, found = (trace.steps[name][mine].tolist() for name in ("step", "loss"))
    return dict(zip(steps, found, strict=True))


@daily
@pytest.mark.slow
def test_resume_on_the_same_layout_is_bitwise_equal(whole, tmp_path):
    """Log and trace are continued, too."""
    run = part(tmp_path)
    said = resumed(RANKS, run)
    assert losses(run).tolist() == whole.tolist()
    with hpc3d.trace.open(run) as trace:
        assert trace.attrs["complete"] and violations(trace) == []
        saving = {row["name"]: row for row in between_rows(trace)}
    assert saving["snapshot"]["times"] == saving["checkpoint"]["times"] == 4
    assert {row["category"] for row in saving.values()} == {"io"}
    assert len(by_step(run / "trace-1.h5")) == 4 and (run / "config-1.toml").exists()
    assert re.search(r"(?m)checkpoints: \d+\.\d MB .*; 2 .*; .* s$", said)
    assert re.search(r"checkpoint step-00000008: \d+\.\d MB in .* s; training waited .* s", said)
    log = (run / "train.log").read_text(encoding="utf-8")
    assert [int(step) for step, _ in LINE.findall(log)] == [*range(STEPS)]


def rates(run):
    with hpc3d.trace.open(run / "trace.h5") as trace:
        return trace.steps["learning_rate"][trace.steps["rank"] == 0].tolist()


@pytest.mark.slow
def test_extended_run_does_not_raise_the_learning_rate(tmp_path, capsys):
    """The schedule stays, unless the user changes it; it is printed and saved."""
    how = {"train__decay": "cosine", "train__warmup": 1, "checkpoint__every": 2}
    run = train(2, tmp_path, train__steps=4, **how)
    (run / "config.toml").write_text(
        (run / "config.toml").read_text().replace("decay_steps = 4\n", "")
    )  # as versions without the key have written it
    out = resumed(2, run, steps=6)
    assert re.search(r"resume: .* train\.decay_steps = 4; .* step 4 .* 3\.000e-04", out)
    assert rates(run)[3:] == pytest.approx([9.75e-4, 3e-4, 3e-4])
    assert "decay_steps = 4\n" in (run / "config.toml").read_text()
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    longer = ["--train.steps", "7", "--train.decay_steps", "8"]
    verb.rehearse(2, ["--dry-run", "--resume", str(run), *longer])
    out = capsys.readouterr().out
    assert "resume: train.decay_steps was 4, is 8" in out and f"would be {run}" in out
    assert before == {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    out = resumed(2, run, "--train.decay_steps", 8, "--checkpoint.every", 0, steps=7)
    assert "resume: train.decay_steps was 4, is 8" in out
    assert re.search(r"schedule has changed: 8\.083e-04 .* 3\.000e-04 in step 6", out)
    assert rates(run)[5:] == pytest.approx([3e-4, 8.083e-4], rel=1e-3)


@pytest.mark.slow
def test_resumed_run_finds_its_text_and_rejects_a_changed_one(tmp_path):
    """After the rejection, the run can still be resumed with the original text."""
    for folder, content in (("here", "first text " * 900), ("there", "other text " * 900)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "text.txt").write_text(content)
    options = words("out", train__steps=2, checkpoint__every=2, data__path="text.txt", **HELD)
    checked(2, "-m", "hpc3d.train", *options, cwd=tmp_path / "here")
    run = newest(tmp_path / "here" / "out")
    more = ["-m", "hpc3d.train", "--resume", run, "--train.steps", 4]
    text = tmp_path / "here" / "text.txt"
    text.rename(tmp_path / "kept.txt")
    (tmp_path / "there" / "text.txt").rename(text)
    refused = mpirun(2, *more, cwd=tmp_path / "there")
    (line,) = said(refused)
    assert refused.returncode == 2 and f"data.path: {text} differs from the text" in line
    (tmp_path / "kept.txt").rename(text)
    out = checked(2, *more, cwd=tmp_path / "there")
    assert "resume: step 2 follows" in out and "data.path was" not in out


@pytest.mark.slow
def test_mixture_of_texts_is_the_same_on_every_layout_and_after_resume(tmp_path):
    """The mixture is resumed in the middle of an epoch and of a round."""
    paths = [str(tmp_path / name) for name in ("a", "b")]
    for path, count in zip(paths, (900, 3000), strict=True):
        Path(path).mkdir()
        for number in range(9):
            content = np.random.default_rng(count + number).bytes(count // 9).hex()
            Path(path, f"{number}.txt").write_text(content)
    mixed = {"data__path": json.dumps(paths), "data__weights": "[2, 3]", "train__batch": 36}
    mixed["data__shuffle"] = "documents"
    expected = losses(train(1, tmp_path / "alone", train__steps=STEPS, **mixed))
    run = part(tmp_path / "parts", mesh__d=2, mesh__p=2, parallel__microbatches=3, **mixed)
    out = resumed(RANKS, run, "--mesh.d", 1, "--mesh.p", 1, "--mesh.x", 2, "--mesh.y", 2)
    np.testing.assert_allclose(losses(run), expected[4:], rtol=1e-10)
    position = json.loads((run / "position.json").read_text())
    used = {path: position[f"sequences of {open_tokens(path).sha256}"] for path in paths}
    assert sum(used.values()) == position["sequences"] == 36 * STEPS
    for path, count in used.items():
        windows = (len(open_tokens(path)) - 1) // 4
        assert f"text: {path}; {count / windows:.3g} epochs" in out
    data = json.loads((run / "environment.json").read_text())["data"]
    assert [*data] == ["data.path[0]", "data.path[1]"]


@pytest.mark.slow
def test_resume_on_other_layouts_and_rank_counts_keeps_the_losses(whole, tmp_path):
    run = part(tmp_path, steps=2, ranks=8)
    said = resumed(12, run, steps=3)
    assert "resume: mesh.y was 2, is 3" in said
    resumed(1, run, steps=4)
    resumed(16, run, steps=5)
    layout = ["--mesh.p", 2, "--mesh.d", 2, "--mesh.x", 2, "--mesh.y", 1, "--mesh.z", 1]
    layout += ["--parallel.schedule", "1f1b", "--parallel.microbatches", 4, "--parallel.zero", 1]
    resumed(8, run, *layout, steps=6)
    said = resumed(4, run, steps=7)  # 2 stages of 2 replicas each stay
    assert "resume: mesh.x was 2, is 1" in said and "mesh.p was" not in said
    said = resumed(6, run)  # they do not divide 6 ranks
    assert "resume: mesh.p was 2, is 1" in said and "resume: mesh.d was 2, is 1" in said
    parts = [by_step(run / f"trace-{number}.h5") for number in range(1, 7)] + [by_step(run)]
    assert [[*found] for found in parts] == [[0, 1], [2], [3], [4], [5], [6], [7]]
    for step, loss in (pair for found in parts for pair in found.items()):
        assert loss == pytest.approx(whole[step], rel=1e-10)


@pytest.mark.slow
def test_killed_run_resumes_from_its_announced_checkpoint(tmp_path_factory):
    """All ranks are killed with kill -9 after the second checkpoint;
    tests/checkpoints/test_saver.py kills one rank at every write."""
    tmp_path = tmp_path_factory.mktemp("killed")

    def kill():
        wait_for(lambda: any(len(steps_of(run / "checkpoints")) > 1 for run in tmp_path.iterdir()))
        subprocess.run(["pkill", "-9", "-f", str(tmp_path)], check=True)

    options = words(tmp_path, train__steps=1000, checkpoint__every=1)
    killed = mpirun(RANKS, "-m", "hpc3d.train", *options, meanwhile=kill)
    assert killed.returncode == -signal.SIGKILL
    run = newest(tmp_path)
    done = int(steps_of(run / "checkpoints")[0].name.removeprefix("step-"))
    resumed(RANKS, run, steps=max(STEPS, done + 1))
    found, whole = by_step(run), undisturbed(RANKS, tmp_path_factory.mktemp("whole"))
    assert {*range(done, STEPS)} <= found.keys()
    assert all(found[step] == loss for step, loss in enumerate(whole) if step in found)
    assert not [*(run / "checkpoints").glob("*.tmp")]


@pytest.mark.slow
def test_resume_skips_a_damaged_checkpoint(whole, tmp_path):
    run = part(tmp_path)
    shard = run / "checkpoints" / "step-00000004" / "rank-00003.bin"
    content = bytearray(shard.read_bytes())
    content[7] ^= 1
    shard.write_bytes(content)
    out = resumed(RANKS, run)
    assert f"{shard.name} " in out and "resume: step 2 " in out
    assert losses(run).tolist() == whole.tolist()


@pytest.mark.slow
def test_run_in_progress_cannot_be_resumed(tmp_path):
    refused = []

    def act(run):
        refused.append(mpirun(2, "-m", "hpc3d.train", "--resume", run))
        (run / "STOP").touch()

    options = words(tmp_path, train__steps=50000)
    mpirun(2, "-m", "hpc3d.train", *options, meanwhile=when_running(tmp_path, act))
    (line,) = said(refused[0])
    assert refused[0].returncode == 2
    assert re.search(r": used by process \d+ ", line)


def evaluations(run):
    """Return (step, loss, tokens, accuracy) of each evaluation in the trace."""
    with hpc3d.trace.open(run) as trace:
        assert violations(trace) == []
        columns = [trace.evaluation[key] for key in ("step", "loss", "tokens", "accuracy")]
    return np.transpose(columns)


HELD = {"data__validation": 0.003, "train__eval_every": 3, "checkpoint__keep_best": "true"}


@pytest.mark.slow
def test_evaluations_match_one_rank_and_continue_after_resume(tmp_path):
    """There is an evaluation after the last step. A resumed run does not repeat evaluations, and
    knows the best one."""
    expected = evaluations(train(1, tmp_path / "alone", train__steps=STEPS, **HELD))
    assert expected[:, 0].tolist() == [2, 5, 7]
    run = part(tmp_path / "parts", 6, mesh__p=2, parallel__microbatches=4, **HELD)
    np.testing.assert_allclose(evaluations(run), expected[:2], rtol=1e-10)
    resumed(RANKS, run)
    np.testing.assert_allclose(evaluations(run), expected, rtol=1e-10)
    log = (run / "train.log").read_text(encoding="utf-8")
    found = re.findall(r"(evaluation after step \d+: .* in \d+\.\d\d s)(, the best so far)?", log)
    best = [loss <= expected[: place + 1, 1].min() for place, loss in enumerate(expected[:, 1])]
    assert [bool(mark) for *_, mark in found] == best
    assert len(found) == 3
    kept = [int(path.name.removeprefix("step-")) for path in steps_of(run / "checkpoints")]
    assert 1 + expected[expected[:, 1].argmin(), 0] in kept and len(kept) <= 3


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (["--resume"], "--resume .: "),
        (["--resume", "absent"], "--resume absent: "),
        (["--resume", "{run}", "--train.steps", 4], "4 steps; ... --train.steps"),
        (["--resume", "{run}", "--model.layers", 3], "model.layers = "),
        (
            ["--resume", "{run}", "--train.steps", 9, "--data.validation", 0.05],
            "data.validation = 0.05: nothing was held out so far, ...; use a separate text",
        ),
        (["--resume", "{empty}"], ": ... start a new run"),
    ],
)
@pytest.mark.slow
def test_invalid_resume_is_rejected(runs, options, line):
    words = [str(word).format(**runs) for word in options]
    before = files_of(runs)
    with pytest.raises(ValueError, match=elided(line)):
        plan_of(words, ranks=2)
    assert files_of(runs) == before


@pytest.mark.slow
def test_ranks_reject_an_invalid_resume_together(runs):
    before = files_of(runs)
    done = mpirun(2, "-m", "hpc3d.train", "--resume", runs["run"], "--model.layers", 3)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    found = [line for line in said(done) if "model.layers = " in line]
    assert len(found) == 1, "the change is reported once, not for each checkpoint"
    assert files_of(runs) == before


def files_of(runs):
    return {path: {*path.rglob("*")} for path in runs.values()}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Run, and what remains of it without its checkpoints."""
    folder = tmp_path_factory.mktemp("runs")
    run = part(folder / "one", ranks=2)
    empty = shutil.copytree(run, folder / "two", ignore=shutil.ignore_patterns("checkpoints"))
    return {"run": run, "empty": empty}
